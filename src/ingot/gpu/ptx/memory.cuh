#pragma once
// Loads and stores of global memory, 4 to 16 bytes per thread, with cache hints for row kernels. Addresses are aligned
// to the width.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include <cstdint>

namespace ingot::ptx {

// Loads without L1, which is left to reused data (weights). The read-only path is not used, because the output may
// alias the input.
__device__ inline void load_streaming(const void* p, uint32_t (&w)[1]) {
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(w[0]) : "l"(p) : "memory");
}
__device__ inline void load_streaming(const void* p, uint32_t (&w)[2]) {
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
}
__device__ inline void load_streaming(const void* p, uint32_t (&w)[4]) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(p)
               : "memory");
}

// For data with two reads. The first load carries the hint to keep the line in L1 and L2; the second load carries the
// hint to evict the line first. Without the second hint the line stays for long, and written lines leave L2 earlier.
// Before sm_80 plain loads; no result changes.
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
__device__ inline void load_keeping(const void* p, uint32_t (&w)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile(
      "{.reg .b64 stay; createpolicy.fractional.L2::evict_last.b64 stay, 1.0;"
      " ld.global.L1::evict_last.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], stay;}"
      : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
      : "l"(p)
      : "memory");
#else
  load_streaming(p, w);
#endif
}
// In L2 alone: L1 is left to reused data.
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
__device__ inline void load_dropping(const void* p, uint32_t (&w)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile(
      "{.reg .b64 go; createpolicy.fractional.L2::evict_first.b64 go, 1.0;"
      " ld.global.L1::evict_first.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], go;}"
      : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
      : "l"(p)
      : "memory");
#else
  load_streaming(p, w);
#endif
}

// Stores without L1, which is left to reused data.
__device__ inline void store_streaming(void* p, const uint32_t (&w)[2]) {
  asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
}
__device__ inline void store_streaming(void* p, const uint32_t (&w)[4]) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]),
               "r"(w[3])
               : "memory");
}

// Stores whose lines leave L2 first: for outputs larger than L2, because no kernel can read these back from L2.
__device__ inline void store_evict_first(void* p, const uint32_t (&w)[1]) {
  asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(p), "r"(w[0]) : "memory");
}
__device__ inline void store_evict_first(void* p, const uint32_t (&w)[2]) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
}
__device__ inline void store_evict_first(void* p, const uint32_t (&w)[4]) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

// Prefetches data into L2. No result changes: the bytes may still be written before the read. Address and size are
// multiples of 16.
__device__ inline void prefetch_to_l2(const void* p, uint32_t bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}

// Loads and stores of shared memory by address.
__device__ inline void load_shared(uint32_t (&w)[1], uint32_t address) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(address) : "memory");
}
__device__ inline void load_shared(uint32_t (&w)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(address)
               : "memory");
}
__device__ inline void store_shared(uint32_t address, const uint32_t (&w)[1]) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(w[0]) : "memory");
}
__device__ inline void store_shared(uint32_t address, const uint32_t (&w)[2]) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(w[0]), "r"(w[1]) : "memory");
}
__device__ inline void store_shared(uint32_t address, const uint32_t (&w)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}

}  // namespace ingot::ptx
#endif
