#pragma once
// Sums over the threads of a row. The order is fixed by the thread's place, so results repeat bit for bit, and every
// thread of the group gets the same bits.
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
  // Lane i takes the partial sum of warp i of the group. A second round of shuffles adds these, which is short even for
  // 16 warps.
  const uint32_t lane = threadIdx.x % 32, first = warp & ~(warps - 1);
#pragma unroll
  for (int r = 0; r < R; ++r) v[r] = memory.partial[first + (lane & (warps - 1))][r];
  warp_sum(v, warps);
}

constexpr int kMaxCluster = 8;  // allowed on every device with clusters
struct ClusterSumMemory {
  float partial[kMaxCluster];
};

// Sums a value per block over the cluster. The caller has executed cluster_arrive() at its start; the matching wait in
// this function ensures that every block of the cluster runs before a write to its memory.
__device__ inline float cluster_sum(float v, uint32_t blocks, ClusterSumMemory& memory) {
  ptx::cluster_wait();
  if (threadIdx.x < blocks) ptx::cluster_store(&memory.partial[ptx::cluster_rank()], threadIdx.x, v);
  ptx::cluster_arrive();
  ptx::cluster_wait();
  float sum = 0;
  for (uint32_t i = 0; i < blocks; ++i) sum += memory.partial[i];
  return sum;
}

// Sums over groups of threads and over the blocks of a cluster, round after round, while further stores of the block
// may be in flight all the time. A value travels between blocks together with the number of its round, because a
// barrier of the cluster would also wait for the further stores. A round has one barrier of the group: before writing
// round n + 2 a thread passes the barrier of round n + 1, after all threads have read round n.
template <int R> class RoundSums {
 public:
  static constexpr int kMaxThreads = 1024;
  struct Memory {
    alignas(16) float of_warps[2][R][64];
    uint64_t of_blocks[2][R][kMaxCluster];
  };
  static_assert(R * kMaxCluster <= 32, "one lane polls one word");

  // Called by all threads, before a barrier of the block (of the cluster, above one block). A group: `width` threads, a
  // power of two up to a warp, or whole warps, then at most 15 groups; above one block a group is a whole block.
  __device__ RoundSums(Memory& memory, uint32_t width, uint32_t blocks)
      : memory_(memory), width_(width), blocks_(blocks) {
    const uint32_t warps = width / 32;
    group_ = width > 32 ? threadIdx.x / width : 0;
    first_ = group_ * ((warps + 3) & ~3u);
    mine_ = first_ + threadIdx.x / 32 - group_ * warps;
    float* const sums = &memory.of_warps[0][0][0];
    uint64_t* const words = &memory.of_blocks[0][0][0];
    for (uint32_t i = threadIdx.x; i < 2 * R * 64; i += blockDim.x) sums[i] = 0;
    for (uint32_t i = threadIdx.x; i < 2 * R * kMaxCluster; i += blockDim.x) words[i] = 0;
  }

  // `count` of the R sums. Rounds are numbered from 1.
  __device__ void operator()(float (&v)[R], uint32_t count, uint32_t round) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (uint32_t(r) >= count) continue;
      if (width_ >= 32) {
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) v[r] += __shfl_xor_sync(~0u, v[r], mask);
      } else {
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
          const float other = __shfl_xor_sync(~0u, v[r], mask);
          if (uint32_t(mask) < width_) v[r] += other;
        }
      }
    }
    if (width_ > 32) add_warps(v, count, round);
    if (blocks_ > 1) add_blocks(v, count, round);
  }

 private:
  static constexpr int kMaxPolls = 1 << 26;  // seconds: only a dead block can be so late

  __device__ void add_warps(float (&v)[R], uint32_t count, uint32_t round) {
    float(&sums)[R][64] = memory_.of_warps[round & 1];
    if (threadIdx.x % 32 == 0)
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (uint32_t(r) < count) sums[r][mine_] = v[r];
    ptx::barrier_sync(1 + group_, width_);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (uint32_t(r) >= count) continue;
      const auto four = [&](uint32_t i) {
        const float4 f = *reinterpret_cast<const float4*>(&sums[r][first_ + i]);
        return (f.x + f.y) + (f.z + f.w);
      };
      v[r] = four(0);
      if (width_ > 4 * 32) v[r] += four(4);
      if (width_ > 8 * 32) v[r] += four(8) + (width_ > 12 * 32 ? four(12) : 0);
      if (width_ > 16 * 32)
        for (uint32_t i = 16; i < width_ / 32; i += 4) v[r] += four(i);
    }
  }

  __device__ void add_blocks(float (&v)[R], uint32_t count, uint32_t round) {
    const uint32_t lane = threadIdx.x % 32, from = lane % kMaxCluster;
    uint64_t(&words)[R][kMaxCluster] = memory_.of_blocks[round & 1];
    if (threadIdx.x < blocks_)
#pragma unroll
      for (int r = 0; r < R; ++r)
        if (uint32_t(r) < count)
          ptx::cluster_store_relaxed(&words[r][ptx::cluster_rank()], lane,
                                     uint64_t(round) << 32 | __float_as_uint(v[r]));
    float sum = 0;
    if (from < blocks_ && lane / kMaxCluster < count) {
      const uint64_t* const word = &words[0][0] + lane;
      uint64_t seen = ptx::cluster_load_relaxed(word);
      for (int polls = 0; uint32_t(seen >> 32) != round; ++polls) {
        if (polls == kMaxPolls) __trap();
        seen = ptx::cluster_load_relaxed(word);
      }
      sum = __uint_as_float(uint32_t(seen));
    }
    __syncwarp();
#pragma unroll
    for (int mask = 1; mask < kMaxCluster; mask *= 2) sum += __shfl_xor_sync(~0u, sum, mask);
#pragma unroll
    for (int r = 0; r < R; ++r)
      if (uint32_t(r) < count) v[r] = R == 1 ? __shfl_sync(~0u, sum, 0) : __shfl_sync(~0u, sum, r * kMaxCluster);
  }

  Memory& memory_;
  uint32_t width_, blocks_, group_, first_, mine_;
};

}  // namespace ingot::tile
