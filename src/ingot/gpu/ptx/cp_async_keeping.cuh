#pragma once
// cp_async.cuh's copy of 16 bytes with load_keeping's hint (memory.cuh): L2 keeps the line at the cost of all others.
#include "ingot/gpu/ptx/cp_async.cuh"

#ifdef INGOT_EMULATE
namespace ingot::ptx {
inline void cp_async_keeping(uint32_t to, const void* from) { cp_async<16>(to, from); }
}  // namespace ingot::ptx
#else
namespace ingot::ptx {

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

}  // namespace ingot::ptx
#endif
