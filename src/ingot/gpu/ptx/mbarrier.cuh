#pragma once
// mbarriers: 8-byte objects in shared memory for counting arrivals and bytes of bulk copies. A phase completes when all
// expected arrivals and bytes are in; waits name the phase by its parity (a fresh barrier is in phase 0, so a wait for
// parity 1 passes at once). To wait, use tile/flag.cuh, where every wait is bounded.
#include <cstdint>

#include "ingot/gpu/ptx/address.cuh"

namespace ingot::ptx {

// A single thread initialises; further threads may use the barrier after fence_mbarrier_init() and a block or cluster
// barrier.
__device__ inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the cluster and to the copy engine.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// More bytes for the current phase, without arriving.
__device__ inline void mbarrier_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Expects the bytes, then arrives: the producer's call per stage.
__device__ inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// The same on a barrier of a neighbour block in the cluster; the address comes from cluster_address(). Without a
// release, which costs a fence of the whole GPU's memory: for buffers read only by wgmma or the copy engine.
__device__ inline void mbarrier_arrive_remote_relaxed(uint32_t cluster_address) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
}
__device__ inline void mbarrier_arrive_expect_tx_remote(uint32_t cluster_address, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(cluster_address),
               "r"(bytes)
               : "memory");
}

// Has the phase of this parity completed? The thread may be suspended for a while, for a time the hardware limits.
__device__ inline bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return done != 0;
}

}  // namespace ingot::ptx
