#pragma once
// The blocks that share a row with filters: their barrier and messages, and the logits that each block keeps in shared
// memory.
#include <cstdint>

#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/kernels/sampling/row.cuh"
#include "ingot/kernels/sampling/sampling_config.h"

namespace ingot::sampling {

// The emulator switches among all threads at every barrier, so fewer threads are faster there.
#ifdef INGOT_EMULATE
constexpr int kFilterThreads = 128;
#else
constexpr int kFilterThreads = 1024;
#endif

// Messages of every block of the row to all of its blocks. Message 0: the largest logit and the smallest of the warps'
// largest logits. Message 1: the key of the largest sum.
struct alignas(16) Messages {
  uint32_t words[2][cuda::kMostCluster][4];
};

// The blocks of a row: a cluster, or without kClusters a single block.
template <bool kClusters> struct RowCluster {
  Messages& messages;
  int32_t blocks, rank;

  // A barrier of the row's blocks; their earlier stores to the row's memory are visible after the barrier. The fence of
  // one warp publishes the stores of all threads that the block's barrier has gathered. The cluster's barrier alone
  // would fence in every warp, which takes several times as long.
  __device__ void sync() const {
    __syncthreads();
    if constexpr (kClusters) {
      if (threadIdx.x < 32) ptx::fence_acq_rel_gpu();
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
  }
  // Sends four words to all blocks of the row. Called by the first warp.
  __device__ void send(int message, uint64_t low, uint64_t high) const {
    const uint32_t words[4] = {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
    if constexpr (kClusters) {
      if (int32_t(threadIdx.x) < blocks)
        ptx::cluster_store(ptx::cluster_address(messages.words[message][rank], threadIdx.x), words);
    } else if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) messages.words[message][0][i] = words[i];
    }
  }
  // A word of the message that the block of this lane's number has sent; `none` in lanes without a block.
  __device__ uint32_t received(int message, int word, uint32_t none) const {
    const int32_t lane = int32_t(threadIdx.x % 32);
    return lane < blocks ? messages.words[message][lane][word] : none;
  }
};

// The quads of one block: in every turn the blocks of the row take kFilterThreads quads each. The logits of the first
// turns stay in shared memory; with kCached these are all turns.
template <class T, bool kClusters, bool kCached> struct BlockLogits : RowCluster<kClusters> {
  using RowCluster<kClusters>::blocks, RowCluster<kClusters>::rank;
  const Logits<T>& logits;
  float4* cache;
  int32_t cached_turns;

  __device__ int32_t turns() const {
    return (logits.quads() + blocks * kFilterThreads - 1) / (blocks * kFilterThreads);
  }
  __device__ int32_t quad(int32_t turn) const { return (turn * blocks + rank) * kFilterThreads + int32_t(threadIdx.x); }
  __device__ float4& cached(int32_t turn) const { return cache[turn * kFilterThreads + int32_t(threadIdx.x)]; }

  // Loads the logits of the cached turns. Each thread reads only the logits that the thread itself has loaded, so no
  // barrier follows.
  __device__ void fill_cache() const {
    const int32_t end = kCached ? turns() : min(turns(), cached_turns);
    for (int32_t i = 0; i < end; ++i) {
      const int32_t q = quad(i);
      if (q >= logits.quads()) break;
      if constexpr (sizeof(T) == 4)
        if (logits.is_vector(q)) {
          ptx::cp_async<16>(ptx::shared_address(&cached(i)), logits.data + 4 * q);
          continue;
        }
      float x[4];
      logits.load_unadjusted(q, x);
      cached(i) = make_float4(x[0], x[1], x[2], x[3]);
    }
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    if (logits.adjusts()) adjust_cache(end);
  }
  __device__ void adjust_cache(int32_t end) const {
    for (int32_t i = 0; i < end; ++i) {
      const int32_t q = quad(i);
      if (q >= logits.quads()) break;
      const float4 v = cached(i);
      float x[4] = {v.x, v.y, v.z, v.w};
      logits.adjust(q, x);
      cached(i) = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
  // Calls use(quad, logits) for the quads of turns [begin, end).
  template <class Use> __device__ void each_quad(int32_t begin, int32_t end, Use&& use) const {
    for (int32_t i = begin; i < end; ++i) {
      const int32_t q = quad(i);
      if (q >= logits.quads()) break;
      float x[4];
      if (kCached || i < cached_turns) {
        const float4 v = cached(i);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
      } else {
        logits.load(q, x);
      }
      use(q, x);
    }
  }
};

}  // namespace ingot::sampling
