#pragma once
// A barrier of all threads of a cluster: initialised mbarriers can then be used, and earlier writes of all threads are
// visible.
#include "ingot/gpu/ptx/cluster.cuh"

namespace ingot::tile {

__device__ __forceinline__ void sync_cluster() {
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace ingot::tile
