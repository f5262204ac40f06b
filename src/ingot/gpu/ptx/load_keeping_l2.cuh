#pragma once
// memory.cuh's load_keeping for L2 alone: L1 is left to what is read again. It needs sm_80 and changes no result.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
namespace ingot::ptx {
inline void load_keeping_l2(const void* p, uint32_t (&w)[4]) { load_streaming(p, w); }
}  // namespace ingot::ptx
#else
#include <cstdint>

namespace ingot::ptx {

__device__ inline void load_keeping_l2(const void* p, uint32_t (&w)[4]) {
  asm volatile(
      "{.reg .b64 stay; createpolicy.fractional.L2::evict_last.b64 stay, 1.0;"
      " ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], stay;}"
      : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
      : "l"(p)
      : "memory");
}

}  // namespace ingot::ptx
#endif
