#pragma once
// All threads of a cluster meet: barriers that one of them has made are ready, and what any has written is there.
#include "ingot/gpu/ptx/cluster.cuh"

namespace ingot::tile {

__device__ __forceinline__ void sync_cluster() {
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace ingot::tile
