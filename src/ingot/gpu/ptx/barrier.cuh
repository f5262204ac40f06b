#pragma once
// Named barriers 0 to 15 of a block (0 is __syncthreads). `threads` counts all that sync or arrive on it, in whole
// warps.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include <cstdint>

namespace ingot::ptx {

__device__ inline void barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same for warps that come to it from different instructions, as from the branches of those with other work: the
// aligned form, and __syncthreads, want all of them at one.
__device__ inline void barrier_sync_unaligned(uint32_t id, uint32_t threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives and goes on.
__device__ inline void barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ingot::ptx
#endif
