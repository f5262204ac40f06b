#pragma once
// What a ring of weights needs without the copy engine, from compute capability 8.0 on: copies of 16 bytes whose
// completion arrives on an mbarrier, and arrivals and tests of mbarriers in the instructions of that generation
// (gpu/ptx/mbarrier.cuh has those of 9.0).
#include <cstdint>
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#endif

namespace ingot::ptx {

#ifdef INGOT_EMULATE
inline void cp_async_16(uint32_t to, const void* from) { cp_async<16>(to, from); }
inline void arrive_after_copies(uint64_t* barrier) {
  cp_async_commit_group();
  cp_async_wait_group<0>();
  mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_80(uint64_t* barrier) { mbarrier_arrive(barrier); }
inline bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) { return mbarrier_try_wait(barrier, parity); }
#else
// Copies 16 bytes past L1. Without an L2 policy, which takes five more instructions per copy (CUDA 13.0).
__device__ inline void cp_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// This thread's arrival, when its copies so far are done. The arrival does not order the thread's ordinary stores.
__device__ inline void arrive_after_copies(uint64_t* barrier) { cp_async_mbarrier_arrive(barrier); }
__device__ inline void mbarrier_arrive_80(uint64_t* barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(shared_address(barrier)) : "memory");
}
// Has the phase of this parity completed? The thread is not suspended.
__device__ inline bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return done != 0;
}
#endif

}  // namespace ingot::ptx
