#pragma once
// Thread block clusters: rank, barrier, and stores to a neighbour's shared memory.
#include <cstdint>

namespace ingot::ptx {

__device__ inline uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes `value` where block `rank` of the cluster keeps its copy of `local`. The block must have started (one cluster
// barrier) and must not have ended (another one after the store).
__device__ inline void cluster_store(float* local, uint32_t rank, float value) {
  const uint32_t address = uint32_t(__cvta_generic_to_shared(local));
  asm volatile(
      "{.reg .u32 remote; mapa.shared::cluster.u32 remote, %0, %1; st.shared::cluster.f32 [remote], %2;}" ::"r"(
          address),
      "r"(rank), "f"(value)
      : "memory");
}

}  // namespace ingot::ptx
