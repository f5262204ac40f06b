#pragma once
// The kernel for rows with filters. The blocks of a cluster share a row, because their barriers are cheap; on GPUs
// without clusters a row has one block.
//
// A filter keeps the first ids in the order of falling logits (filter_order.cuh), up to the id at which a running sum,
// of ones (top-k) or of weights (top-p), reaches a target. Histograms find the place of this id: each histogram divides
// the bin in which its predecessor found the place, until few enough ids are left to compare all of them with each
// other. All sums are of integers, so their order does not matter. Each block reads its part of the logits once, into
// shared memory.
#include <cstdint>

#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/max_or_nan.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/sampling/filter_order.cuh"
#include "ingot/kernels/sampling/filters.h"
#include "ingot/kernels/sampling/largest_sum.cuh"
#include "ingot/kernels/sampling/row.cuh"
#include "ingot/kernels/sampling/row_cluster.cuh"

namespace ingot::sampling {

constexpr int kCandidates = 128;  // the most ids that are compared with each other
constexpr int kThreadsOfCandidate = kFilterThreads / kCandidates;
constexpr int kTurnsOfPass = 15;  // turns whose counts fit into a block's histogram of 32 bits
constexpr uint64_t kNoLimit = ~uint64_t(0);
// The threads that search a histogram. With all threads, adding the sums of the warps would take longer than adding the
// bins. With fewer threads than this, the bins of a thread would take too many registers.
constexpr int kSearchThreads = kFilterThreads < 512 ? kFilterThreads : 512, kBinsOfThread = kBins / kSearchThreads;

// Global memory of one row, which the blocks of its cluster share.
struct FilterSpace {
  // The present histogram, the preceding histogram, which is being set to zero, and the next histogram, which is zero
  // already. The three arrays take these roles in turn.
  uint64_t sums[3][kBins];
  uint64_t list[2][kCandidates];  // places of the candidates of top-k and of top-p
  uint32_t listed[2];             // their number
  uint32_t unused[2];
};
// Where a running sum reaches its target: the bin of a histogram, and in the end the place of the last id to keep.
struct Found {
  Wide target;  // the target less the sums of all earlier bins
  uint32_t bin;
  uint32_t most_ids;  // the bin has at most this many ids
  uint64_t place;
};
struct FilterMemory {
  RowMemory row;
  Messages messages;
  Found found;
  Wide of_warp[kSearchThreads / 32];
  uint64_t list[kCandidates];
  uint32_t mantissas[kCandidates];
  uint32_t listed, first;
  uint32_t sums[kBins];
};

__device__ __forceinline__ Wide shuffle_up(Wide v, int by) {
  const uint64_t low = __shfl_up_sync(~0u, uint64_t(v), by), high = __shfl_up_sync(~0u, uint64_t(v >> 64), by);
  return Wide(high) << 64 | low;
}
// The sum over the lanes up to this one.
__device__ __forceinline__ Wide warp_prefix_sum(Wide v) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const Wide other = shuffle_up(v, by);
    if (int(threadIdx.x % 32) >= by) v += other;
  }
  return v;
}

// kClusters: a row has a cluster of blocks, else one block. kCached: all logits are in shared memory.
template <class T, bool kClusters, bool kCached> struct Filter : BlockLogits<T, kClusters, kCached> {
  using Block = BlockLogits<T, kClusters, kCached>;
  using Block::blocks, Block::rank, Block::received, Block::send, Block::sync;
  using Block::each_quad, Block::logits, Block::turns;

  const SampleRow& row;
  FilterSpace& space;
  FilterMemory& m;
  float high = 0;             // the largest logit
  int round = 0;              // the number of histograms so far
  float floor = -INFINITY;    // ids with smaller logits are not kept
  uint64_t limit = kNoLimit;  // the place of the last id that is kept

  __device__ float octaves(float x) const { return octaves_below(high, x, row.octaves_per_logit); }

  // --- the largest logit

  // Returns the ordered bits of the row's largest logit. Fills the cache of logits.
  __device__ uint32_t largest_logit() {
    Block::fill_cache();
    float most = -INFINITY;
    each_quad(0, turns(), [&](int32_t q, const float(&x)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) most = 4 * q + j < logits.ids ? ptx::max_or_nan(most, x[j]) : most;
    });
    const uint32_t of_warp = warp_max(ordered_bits(most)), lane = threadIdx.x % 32;
    if (lane == 0) m.row.best.of_warp[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (threadIdx.x < 32) {
      constexpr uint32_t kWarps = kFilterThreads / 32;
      const uint32_t mine = lane < kWarps ? uint32_t(m.row.best.of_warp[lane]) : 0;
      send(0, warp_max(mine), ~warp_max(lane < kWarps ? ~mine : 0));
    }
    sync();
    return warp_max(received(0, 0, 0));
  }
  // A logit such that every warp has an id with at least this logit; or -INFINITY. Called after largest_logit().
  __device__ float least_of_warps() const { return float_of_ordered(~warp_max(~received(0, 2, ~0u))); }

  // --- one filter

  // Keeps the first top_k of the kept ids, or with `weighted` the first ids whose weights reach the share top_p.
  __device__ void cut(bool weighted) {
    // Every warp has an id at or above this logit, so at least as many ids are kept as there are warps.
    if (!weighted && row.top_k <= blocks * (kFilterThreads / 32)) floor = least_of_warps();
    for (CountedIds counted;; ++round) {
      uint64_t(&sums)[kBins] = space.sums[round % 3];
      add_up(counted, weighted, sums);
      sync();
      clear(space.sums[(round + 2) % 3]);
      const Found found = find(sums, counted, weighted);
      counted.choose(__shfl_sync(~0u, found.bin, 0));  // tells the compiler that all lanes have the same bin
      if (found.most_ids > kCandidates) continue;
      ++round;
      limit = compare(counted, weighted);
      floor = logit_of(limit);
      return;
    }
  }
  // Calls use(id) for the ids of turns [begin, end) that are kept so far.
  template <class Use> __device__ void each_kept(int32_t begin, int32_t end, Use&& use) const {
    each_quad(begin, end, [&](int32_t q, const float(&x)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!(x[j] >= floor) || 4 * q + j >= logits.ids) continue;
        const Id id{x[j], octaves(x[j]), 4 * q + j};
        if (limit == kNoLimit || id.place() <= limit) use(id);
      }
    });
  }

  // --- histograms

  // Sets a histogram of the row to zero. Each block clears its part.
  __device__ void clear(uint64_t (&sums)[kBins]) const {
    for (int i = rank * kFilterThreads + int(threadIdx.x); i < kBins; i += blocks * kFilterThreads)
      __stcg(&sums[i], uint64_t(0));
  }
  // Adds ones or mantissas to the row's histogram. In each pass a block first adds up a histogram of 32 bits in shared
  // memory.
  __device__ void add_up(const CountedIds& counted, bool weighted, uint64_t (&sums)[kBins]) const {
    static_assert(int64_t(kTurnsOfPass) * 4 * kFilterThreads * 65536 < int64_t(1) << 32, "sums of mantissas fit");
    for (int32_t pass = 0; pass < turns(); pass += kTurnsOfPass) {
      for (int i = int(threadIdx.x); i < kBins; i += kFilterThreads) m.sums[i] = 0;
      __syncthreads();
      each_kept(pass, min(pass + kTurnsOfPass, turns()), [&](const Id& id) {
        if (!counted.has(id)) return;
        const uint32_t one = weighted ? mantissa_of(id.octaves) : 1;
        if (one != 0) atomicAdd(&m.sums[counted.digit(id)], one);
      });
      __syncthreads();
      for (int i = int(threadIdx.x); i < kBins; i += kFilterThreads)
        if (m.sums[i] != 0) ptx::add_relaxed(&sums[i], uint64_t(m.sums[i]));
      __syncthreads();
    }
  }

  // Finds the bin in which the running sum reaches the target. The target of histogram 0 is top_k, or the part of the
  // total that top-p keeps; the target of a later histogram is what the preceding histogram has left.
  __device__ Found find(const uint64_t (&sums)[kBins], const CountedIds& counted, bool weighted) const {
    const int first = kBinsOfThread * int(threadIdx.x), warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
    const bool searches = int(threadIdx.x) < kSearchThreads;
    static_assert(kBinsPerOctave % kBinsOfThread == 0, "the bins of a thread have one weight");
    // The weight of a mantissa follows from its bin in histogram 0; every later histogram lies inside one of these
    // bins.
    const auto sum_of = [&](uint64_t ones) {
      return weighted ? weight_of(ones, counted.level == 0 ? first : counted.bin) : Wide(ones);
    };
    uint64_t ones[kBinsOfThread];  // or mantissas
    Wide mine = 0, upto = 0, target = counted.level == 0 ? Wide(uint32_t(row.top_k)) : m.found.target;
    if (searches) {
      uint64_t all = 0;
#pragma unroll
      for (int k = 0; k < kBinsOfThread; ++k) ones[k] = __ldcg(&sums[first + k]);
#pragma unroll
      for (int k = 0; k < kBinsOfThread; ++k) all += ones[k];
      mine = sum_of(all);
      upto = warp_prefix_sum(mine);
      if (lane == 31) m.of_warp[warp] = upto;
    }
    __syncthreads();
    if (searches) {
      Wide before = upto - mine;  // the sum of all bins of earlier threads
      for (int w = 0; w < warp; ++w) before += m.of_warp[w];
      if (weighted && counted.level == 0) {
        Wide total = 0;
        for (int w = 0; w < kSearchThreads / 32; ++w) total += m.of_warp[w];
        target = target_of(total, row.top_p);
      }
      if (before < target && before + mine >= target) {
        // The bins of a thread have one weight, 2^shift, so the search among them counts ones (or mantissas), which are
        // small numbers.
        const int shift = weighted ? kOctaves - (counted.level == 0 ? first : counted.bin) / kBinsPerOctave : 0;
        const Wide left = target - before;
        const uint64_t wanted = uint64_t((left + ((Wide(1) << shift) - 1)) >> shift);
        uint64_t earlier = 0;
#pragma unroll
        for (int k = 0; k < kBinsOfThread; ++k) {
          if (earlier < wanted && earlier + ones[k] >= wanted) {
            m.found.target = left - (Wide(earlier) << shift);
            m.found.bin = uint32_t(first + k);
            m.found.most_ids = uint32_t(weighted ? ones[k] >> 15 : ones[k]);  // a mantissa is at least 2^15
          }
          earlier += ones[k];
        }
      }
    }
    __syncthreads();
    return m.found;
  }

  // --- the last step: at most kCandidates ids, compared with each other

  // The place at which the running sum over the counted ids reaches the target.
  __device__ uint64_t compare(const CountedIds& counted, bool weighted) const {
    list_own_candidates(counted, weighted);
    sync();
    load_candidates(weighted);
    __syncthreads();
    find_place(counted, weighted);
    __syncthreads();
    return m.found.place;
  }
  // Appends the block's candidates to the row's list.
  __device__ void list_own_candidates(const CountedIds& counted, bool weighted) const {
    if (threadIdx.x == 0) m.listed = 0;
    __syncthreads();
    each_kept(0, turns(), [&](const Id& id) {
      if (counted.has(id)) m.list[atomicAdd(&m.listed, 1u)] = id.place();
    });
    __syncthreads();
    const uint32_t own = m.listed;
    if (threadIdx.x == 0 && own > 0) m.first = ptx::fetch_add_relaxed(&space.listed[weighted], own);
    __syncthreads();
    if (threadIdx.x < own) __stcg(&space.list[weighted][m.first + threadIdx.x], m.list[threadIdx.x]);
  }
  // Loads the row's list into shared memory, with the mantissa of each candidate, or 1 for top-k.
  __device__ void load_candidates(bool weighted) const {
    if (threadIdx.x < kCandidates) {
      const uint32_t count = __ldcg(&space.listed[weighted]);
      if (threadIdx.x == 0) m.listed = count;
      if (threadIdx.x < count) {
        const uint64_t place = __ldcg(&space.list[weighted][threadIdx.x]);
        m.list[threadIdx.x] = place;
        m.mantissas[threadIdx.x] = weighted ? mantissa_of(octaves(logit_of(place))) : 1;
      }
    }
  }
  // Every kThreadsOfCandidate threads add up the mantissas in front of one candidate. The candidate with which the sum
  // reaches the target is the last id to keep.
  __device__ void find_place(const CountedIds& counted, bool weighted) const {
    const Wide target = m.found.target;
    const uint32_t count = m.listed, candidate = threadIdx.x / kThreadsOfCandidate;
    uint64_t mine = 0;
    uint32_t before = 0;  // at most 128 mantissas of 2^16
    if (candidate < count) {
      mine = m.list[candidate];
      for (uint32_t i = threadIdx.x % kThreadsOfCandidate; i < count; i += kThreadsOfCandidate)
        before += m.list[i] < mine ? m.mantissas[i] : 0;
    }
#pragma unroll
    for (int mask = kThreadsOfCandidate / 2; mask > 0; mask /= 2) before += __shfl_xor_sync(~0u, before, mask);
    if (candidate < count && threadIdx.x % kThreadsOfCandidate == 0) {
      const uint32_t own = m.mantissas[candidate];
      const Wide sum = weighted ? weight_of(before, counted.bin) : Wide(before);
      const Wide upto = weighted ? weight_of(before + own, counted.bin) : Wide(before + own);
      if (sum < target && upto >= target) m.found.place = mine;
    }
  }

  // --- the sampled token

  // The key of the largest sum over the ids that all filters keep.
  __device__ uint64_t largest_sum() const {
    LargestSum sum(row, m.row);
    each_quad(0, turns(), [&](int32_t q, const float(&x)[4]) {
      sum.add(q, x, logits.ids, [&](float logit, int32_t id) {
        return logit >= floor && octaves(logit) <= row.most_octaves &&
               (limit == kNoLimit || place_of(logit, id) <= limit);
      });
      sum.raise_bar();
    });
    const uint64_t mine = first_warp_best(sum.best.key, m.row.best);
    if (threadIdx.x < 32) send(1, mine, 0);
    sync();
    return warp_best(uint64_t(received(1, 1, 0)) << 32 | received(1, 0, 0));
  }
};

template <class T, bool kClusters, bool kCached>
__global__ void __launch_bounds__(kFilterThreads, 1) filter_kernel(const __grid_constant__ SampleParams p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  FilterMemory& m = tile::shared<FilterMemory>();
  const int32_t r = int32_t(blockIdx.x) / p.cluster;
  const SampleRow& row = load_row(p, r, m.row);
  if (!has_filter(row)) return;
  // The blocks of the cluster wait for each other below, because a block may write to the memory of another block only
  // after that block has started.
  if constexpr (kClusters) ptx::cluster_arrive_relaxed();
  const Logits<T> logits(p, row, m.row);
  FilterSpace& space = p.filters[r];
  const int32_t rank = kClusters ? int32_t(ptx::cluster_rank()) : 0;
  Filter<T, kClusters, kCached> filter{
      {{m.messages, p.cluster, rank}, logits, tile::dynamic_shared<float4>(), p.cached_turns}, row, space, m};
  // From the cluster's first barrier on, the memory that the blocks add to is zero.
  for (int i = 0; i < 2; ++i) filter.clear(space.sums[i]);
  if (rank == 0 && threadIdx.x < 2) __stcg(&space.listed[threadIdx.x], 0u);
  if constexpr (kClusters) ptx::cluster_wait();

  const uint32_t largest = filter.largest_logit();
  SampledId found = sampled_id(largest == ~0u ? ~uint64_t(0) : uint64_t(largest) << 32);
  if (found.flaw == 0) {
    filter.high = float_of_ordered(largest);
#pragma unroll 1
    for (int weighted = 0; weighted < 2; ++weighted)  // a single copy of the code, which is long
      if (weighted != 0 ? row.top_p > 0 : row.top_k > 0) filter.cut(weighted != 0);
    found = sampled_id(filter.largest_sum());
  }
  if (rank == 0) store_token(p, row, found);
}

}  // namespace ingot::sampling
