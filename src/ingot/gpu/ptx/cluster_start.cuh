#pragma once
// What a kernel of clusters needs when it starts and ends, where time counts. Beside cluster.cuh; sm_90 and later.
#include <cstdint>

namespace ingot::ptx {

// The cluster's number in the grid.
__device__ inline uint32_t cluster_index() {
  uint32_t n;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(n));
  return n;
}
// cluster_arrive() for those who have nothing to show but barriers, which fence_mbarrier_init() releases: that one
// waits until the whole GPU sees all that the thread has written.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

}  // namespace ingot::ptx
