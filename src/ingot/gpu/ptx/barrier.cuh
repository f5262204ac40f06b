#pragma once
// Named barriers 0 to 15 of a block (0 is __syncthreads). `threads` is the number of syncing or arriving threads, in
// whole warps.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include <cstdint>

namespace ingot::ptx {

__device__ inline void barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same for warps that reach the barrier by different instructions, such as the branches of warps with different
// roles: the aligned form, and __syncthreads, require a common instruction.
__device__ inline void barrier_sync_unaligned(uint32_t id, uint32_t threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives without waiting.
__device__ inline void barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ingot::ptx
#endif
