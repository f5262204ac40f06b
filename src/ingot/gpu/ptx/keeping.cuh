#pragma once
// memory.cuh's load_keeping in other forms: L2 keeps the lines at the cost of all others. It needs sm_80 (before, plain
// loads) and changes no result.
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/memory.cuh"

namespace ingot::ptx {

#ifdef INGOT_EMULATE
template <int N> void load_keeping_l2(const void* p, uint32_t (&w)[N]) { load_streaming(p, w); }
inline void load_keeping(const void* p, uint32_t (&w)[2]) { load_streaming(p, w); }
inline void cp_async_keeping(uint32_t to, const void* from) { cp_async<16>(to, from); }
#else

__device__ inline void load_keeping(const void* p, uint32_t (&w)[2]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile(
      "{.reg .b64 stay; createpolicy.fractional.L2::evict_last.b64 stay, 1.0;"
      " ld.global.L1::evict_last.L2::cache_hint.v2.u32 {%0, %1}, [%2], stay;}"
      : "=r"(w[0]), "=r"(w[1])
      : "l"(p)
      : "memory");
#else
  load_streaming(p, w);
#endif
}

// In L2 alone: L1 is left to what is read again.
__device__ inline void load_keeping_l2(const void* p, uint32_t (&w)[2]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile(
      "{.reg .b64 stay; createpolicy.fractional.L2::evict_last.b64 stay, 1.0;"
      " ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], stay;}"
      : "=r"(w[0]), "=r"(w[1])
      : "l"(p)
      : "memory");
#else
  load_streaming(p, w);
#endif
}
__device__ inline void load_keeping_l2(const void* p, uint32_t (&w)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile(
      "{.reg .b64 stay; createpolicy.fractional.L2::evict_last.b64 stay, 1.0;"
      " ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], stay;}"
      : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
      : "l"(p)
      : "memory");
#else
  load_streaming(p, w);
#endif
}

// cp_async of 16 bytes.
__device__ inline void cp_async_keeping(uint32_t to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  cp_async<16>(to, from);
#else
  asm volatile(
      "{.reg .b64 stay; createpolicy.fractional.L2::evict_last.b64 stay, 1.0;"
      " cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, stay;}" ::"r"(to),
      "l"(from)
      : "memory");
#endif
}
#endif

}  // namespace ingot::ptx
