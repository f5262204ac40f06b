#pragma once
// Instructions for rings of warps (warp_ring.cuh): a copy of 16 bytes under a predicate, and a prefetch of a line into
// the L2 cache.
#include <cstdint>
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#endif

namespace ingot::ptx {

#ifdef INGOT_EMULATE
inline void cp_async_16_if(bool copies, uint32_t to, const void* from) {
  if (copies) cp_async<16>(to, from);
}
inline void prefetch_line(const void*) {}
#else
// Copies 16 bytes past L1 where `copies` holds. The predicate is in the asm, because the compiler makes a branch of a
// condition around it. Without an L2 policy, which takes five more instructions per copy (CUDA 13.0).
__device__ inline void cp_async_16_if(bool copies, uint32_t to, const void* from) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %2, 0;"
      " @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(to),
      "l"(from), "r"(uint32_t(copies))
      : "memory");
}
// Brings the line of an address into L2.
__device__ inline void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }
#endif

}  // namespace ingot::ptx
