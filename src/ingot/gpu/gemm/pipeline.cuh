#pragma once
// The ring of stages between the producer and the consumers, and the turns of the consumers.
//     full[s]    one arrival, by the block's own producer, and the bytes of a stage
//     empty[s]   one arrival per reading warp, in all blocks of the cluster: a block may load a stage for both blocks
//                only when both have finished reading the old contents
#include <cstdint>

#include "ingot/gpu/gemm/shape.h"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/ring.cuh"

namespace ingot::gemm {

template <int kStages, int kCluster, Team kTeam, int kGroups = kWarpgroups> struct Pipeline {
  static constexpr uint32_t kReaders = (kTeam == Team::ping_pong ? 4 : 4 * kGroups) * kCluster;
  using Cursor = tile::RingCursor<kStages>;
  struct Memory {
    uint64_t full[kStages], empty[kStages];
  };

  // Called by a single thread; the remaining threads wait at the barrier of the block or the cluster.
  static __device__ void init(Memory& m) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&m.full[s], 1);
      ptx::mbarrier_init(&m.empty[s], kReaders);
    }
    ptx::fence_mbarrier_init();
  }
  // Called by the producer: waits until the stage may be overwritten, and announces the bytes to come.
  static __device__ __forceinline__ uint64_t* acquire(Memory& m, const Cursor& at, uint32_t bytes) {
    tile::wait_or_trap(&m.empty[at.stage], at.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(&m.full[at.stage], bytes);
    return &m.full[at.stage];
  }
  // Called by the consumers, by whole warps.
  static __device__ __forceinline__ void wait(Memory& m, const Cursor& at) {
    tile::wait_warp_or_trap(&m.full[at.stage], at.phase);
  }
  // Only wgmma has read the stage, and the product has ended, so no fence is needed.
  static __device__ __forceinline__ void release(Memory& m, uint32_t stage) {
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (kCluster == 1) {
      if (lane == 0) ptx::mbarrier_arrive(&m.empty[stage]);
    } else {
      if (lane < kCluster) ptx::mbarrier_arrive_remote_relaxed(ptx::cluster_address(&m.empty[stage], lane));
    }
  }
};

// Ping-pong: the warpgroups take turns to issue a tile's products.
template <Team kTeam> struct Turns {
  static constexpr bool kOn = kTeam == Team::ping_pong;
  uint32_t warpgroup;
  __device__ __forceinline__ void take() const {
    if (kOn) ptx::barrier_sync(1 + warpgroup, kConsumerThreads);
  }
  __device__ __forceinline__ void pass() const {
    if (kOn) ptx::barrier_arrive(2 - warpgroup, kConsumerThreads);
  }
  __device__ __forceinline__ void start() const {
    if (warpgroup == 1) pass();
  }
};

}  // namespace ingot::gemm
