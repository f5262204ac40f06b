#pragma once
// Sums over the threads that share a row. The order is fixed by the thread's place, so results repeat bit for bit, and
// every thread of the group gets the same bits.
#include <cstdint>

#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cluster.cuh"

namespace ingot::tile {

// Sums over aligned groups of `width` lanes (a power of two, at most 32), R independent sums at once.
template <int R> __device__ inline void warp_sum(float (&v)[R], uint32_t width) {
  for (uint32_t mask = width / 2; mask > 0; mask /= 2)
#pragma unroll
    for (int r = 0; r < R; ++r) v[r] += __shfl_xor_sync(~0u, v[r], int(mask));
}

template <int R, int kMaxThreads> struct GroupSumMemory { float partial[kMaxThreads / 32][R]; };

// Sums over aligned groups of `width` threads of the block (a power of two; more than a warp goes through shared
// memory). Called by all threads of the block, once per kernel: the memory is not protected for a second use.
template <int R, int kMaxThreads>
__device__ inline void group_sum(float (&v)[R], uint32_t width, GroupSumMemory<R, kMaxThreads>& memory) {
  warp_sum(v, width < 32 ? width : 32);
  if (width <= 32) return;
  const uint32_t warp = threadIdx.x / 32, warps = width / 32;
  if (threadIdx.x % 32 == 0)
#pragma unroll
    for (int r = 0; r < R; ++r) memory.partial[warp][r] = v[r];
  __syncthreads();
  // Lane i takes the partial of warp i of the group; a second pass through the shuffles keeps this short at 16 warps.
  const uint32_t lane = threadIdx.x % 32, first = warp & ~(warps - 1);
#pragma unroll
  for (int r = 0; r < R; ++r) v[r] = memory.partial[first + (lane & (warps - 1))][r];
  warp_sum(v, warps);
}

constexpr int kMaxCluster = 8;  // what every device with clusters allows
struct ClusterSumMemory {
  float partial[kMaxCluster];
};

// Sums one value per block over the cluster. The caller has executed cluster_arrive() at its start; here the matching
// wait makes sure that every block of the cluster runs before its memory is written.
__device__ inline float cluster_sum(float v, uint32_t blocks, ClusterSumMemory& memory) {
  ptx::cluster_wait();
  if (threadIdx.x < blocks) ptx::cluster_store(&memory.partial[ptx::cluster_rank()], threadIdx.x, v);
  ptx::cluster_arrive();
  ptx::cluster_wait();
  float sum = 0;
  for (uint32_t i = 0; i < blocks; ++i) sum += memory.partial[i];
  return sum;
}

// Sums over groups of threads and over the blocks of a cluster in two steps, with other work in between, round after
// round (from 1): give() one round's values, take() the sums of the round before or of this one. Other stores of the
// block may be under way all the time: a value travels to other blocks together with the number of its round, as a
// barrier of the cluster would wait for those stores too.
template <int R, int kMaxThreads> class StagedSums {
 public:
  // By all threads, before the cluster's first barrier.
  __device__ void clear() {
    for (uint32_t i = threadIdx.x; i < kSlots * kMaxCluster * R; i += blockDim.x) (&remote_[0][0][0])[i] = 0;
  }

  // `count` of the R sums, over aligned groups of `width` threads (a power of two); above one block a group is a whole
  // block. A group of at most a warp has its sums in v at once, and take() leaves them there.
  __device__ void give(float (&v)[R], uint32_t count, uint32_t width, uint32_t blocks, uint32_t round) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (uint32_t(r) >= count) continue;
      if (width >= 32)
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) v[r] += __shfl_xor_sync(~0u, v[r], mask);
      else
        for (uint32_t mask = width / 2; mask > 0; mask /= 2) v[r] += __shfl_xor_sync(~0u, v[r], int(mask));
    }
    if (width <= 32 && blocks == 1) return;
    const uint32_t slot = round % kSlots, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = width / 32;
    if (lane == 0)
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (uint32_t(r) < count) partial_[slot][r][warp] = v[r];
    if (width > 32) ptx::barrier_sync(1 + threadIdx.x / width, width);
    if (blocks == 1 || warp != 0) return;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (uint32_t(r) >= count) continue;
      float sum[1] = {warps > 1 ? partial_[slot][r][lane & (warps - 1)] : v[r]};
      if (warps > 1) warp_sum(sum, warps);
      if (lane < blocks)
        ptx::cluster_store_relaxed(&remote_[slot][ptx::cluster_rank()][r], lane,
                                   uint64_t(round) << 32 | __float_as_uint(sum[0]));
    }
  }

  __device__ void take(float (&v)[R], uint32_t count, uint32_t width, uint32_t blocks, uint32_t round) const {
    const uint32_t slot = round % kSlots, warps = width / 32;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (uint32_t(r) >= count) continue;
      if (blocks > 1)
        v[r] = from_blocks(slot, r, blocks, round);
      else if (warps > 1)
        v[r] = from_warps(partial_[slot][r] + (threadIdx.x / 32 & ~(warps - 1)), warps);
    }
  }

 private:
  // A group may be giving the round after next while a neighbouring block still takes this one.
  static constexpr int kSlots = 4;
  static constexpr int kMaxPolls = 1 << 26;  // seconds: only a block that died can be late by that much

  static_assert(kMaxThreads <= 512, "from_warps() reads up to 16 values");
  __device__ float from_warps(const float* partial, uint32_t warps) const {
    const auto four = [&](int i) {
      const float4 f = *reinterpret_cast<const float4*>(partial + i);
      return (f.x + f.y) + (f.z + f.w);
    };
    if (warps == 2) return partial[0] + partial[1];
    if (warps == 4) return four(0);
    if (warps == 8) return four(0) + four(4);
    return (four(0) + four(4)) + (four(8) + four(12));
  }
  __device__ float from_blocks(uint32_t slot, int r, uint32_t blocks, uint32_t round) const {
    float sum = 0;
    for (uint32_t i = 0; i < blocks; ++i) {
      uint64_t word = ptx::cluster_load_relaxed(&remote_[slot][i][r]);
      for (int polls = 0; uint32_t(word >> 32) != round; ++polls) {
        if (polls == kMaxPolls) __trap();
        word = ptx::cluster_load_relaxed(&remote_[slot][i][r]);
      }
      sum += __uint_as_float(uint32_t(word));
    }
    return sum;
  }

  alignas(16) float partial_[kSlots][R][kMaxThreads / 32];
  uint64_t remote_[kSlots][kMaxCluster][R];
};

}  // namespace ingot::tile
