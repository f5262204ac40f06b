#pragma once
// The clock, the elected lane of a warp, sleep and trap.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include <cstdint>

namespace ingot::ptx {

// Nanoseconds, the same clock on all SMs; steps of 32 ns to about 1 us.
__device__ inline uint64_t global_timer() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
// True in exactly one lane of a converged warp, always the same lane.
__device__ inline bool elect_one() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected)::"memory");
  return elected != 0;
}
__device__ inline void sleep(uint32_t nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds) : "memory"); }
// Ends the kernel with an error that the process cannot clear: for states reachable only through a bug.
__device__ inline void trap() { asm volatile("trap;"); }

}  // namespace ingot::ptx
#endif
