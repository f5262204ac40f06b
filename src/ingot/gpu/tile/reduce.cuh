#pragma once
// Sums over the threads that share a row. The order is fixed by the thread's place, so results repeat bit for bit, and
// every thread of the group gets the same bits.
#include <cstdint>

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

// R values per block summed over the cluster, round after round, while other stores are under way: a barrier of the
// cluster would wait for those too. Each value travels with the number of its round (from 1). Rounds take turns between
// two memories; there is a barrier of the block between one round's sum and the next one's.
template <int R> struct ClusterSums {
  uint64_t slot[kMaxCluster][R];
  // By all threads, before the cluster's first barrier.
  __device__ void clear() {
    if (threadIdx.x < kMaxCluster * R) slot[threadIdx.x / R][threadIdx.x % R] = 0;
  }
};
constexpr int kMaxPolls = 1 << 26;  // seconds: only a block that died can be late by that much

template <int R>
__device__ inline void cluster_sums(float (&v)[R], uint32_t blocks, uint32_t round, ClusterSums<R>& memory) {
  if (threadIdx.x < blocks)
#pragma unroll
    for (int r = 0; r < R; ++r)
      ptx::cluster_store_relaxed(&memory.slot[ptx::cluster_rank()][r], threadIdx.x,
                                 uint64_t(round) << 32 | __float_as_uint(v[r]));
#pragma unroll
  for (int r = 0; r < R; ++r) v[r] = 0;
  for (uint32_t i = 0; i < blocks; ++i)
#pragma unroll
    for (int r = 0; r < R; ++r) {
      uint64_t word = ptx::cluster_load_relaxed(&memory.slot[i][r]);
      for (int polls = 0; uint32_t(word >> 32) != round; ++polls) {
        if (polls == kMaxPolls) __trap();
        word = ptx::cluster_load_relaxed(&memory.slot[i][r]);
      }
      v[r] += __uint_as_float(uint32_t(word));
    }
}

}  // namespace ingot::tile
