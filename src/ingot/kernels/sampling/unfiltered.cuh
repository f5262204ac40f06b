#pragma once
// The kernel for rows without filters. Several blocks share a row: each block finds the largest sum of its ids, and the
// last block of a row to finish takes the largest of these sums.
#include <cstdint>

#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/max_or_nan.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/sampling/largest_sum.cuh"
#include "ingot/kernels/sampling/row.cuh"

namespace ingot::sampling {

constexpr int kThreads = 512;
constexpr int kMostBlocks = 128;  // of a row

// The largest of the logits that a thread has seen; NaN if one of the logits was NaN. A thread keeps only the quad of
// its largest logit, and finds the id at the end by reading the quad again. An equal logit in a later quad changes
// nothing, because the lowest id wins among equal logits.
struct LargestLogit {
  float logit = -INFINITY;
  int32_t quad = -1;

  __device__ void add(int32_t q, const float (&x)[4]) {
    const float larger =
        ptx::max_or_nan(logit, ptx::max_or_nan(ptx::max_or_nan(x[0], x[1]), ptx::max_or_nan(x[2], x[3])));
    quad = larger != logit ? q : quad;
    logit = larger;
  }
  template <class T> __device__ uint64_t key(const Logits<T>& logits) const {
    if (logit != logit) return ~uint64_t(0);
    Best best;
    if (quad < 0) return best.key;
    float x[4];
    logits.load(quad, x);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (x[j] == logit && 4 * quad + j < logits.ids) best.add(x[j], uint32_t(4 * quad + j));
    return best.key;
  }
};
// The key of the largest logit of quads first, first + step, ... A thread loads several vectors at once, because it has
// little to compute for each.
template <class T> __device__ uint64_t largest_logit(const Logits<T>& logits, int32_t first, int32_t step) {
  constexpr int kVectorsInFlight = 4;
  LargestLogit largest;
  int32_t q = first;
  if (!logits.adjusts()) {
    const int32_t end = logits.vectors(), last = end % step;
    for (; q < end; q += kVectorsInFlight * step) {
      tile::Vec<T, 4> v[kVectorsInFlight];
#pragma unroll
      for (int k = 0; k < kVectorsInFlight; ++k)
        if (q + k * step < end) tile::load(v[k], logits.data + 4 * (q + k * step));
#pragma unroll
      for (int k = 0; k < kVectorsInFlight; ++k) {
        if (q + k * step >= end) break;
        float x[4];
        tile::to_float(v[k], x);
        largest.add(q + k * step, x);
      }
    }
    q = end - last + first + (first < last ? step : 0);  // the first quad of this thread that is not read as a vector
  }
  logits.each(q, step, [&](int32_t quad, const float(&x)[4]) {
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = 4 * quad + j < logits.ids ? x[j] : -INFINITY;
    largest.add(quad, y);
  });
  return largest.key(logits);
}

// The key of the largest sum of a thread: over every step-th quad from quad `first` on.
template <class T>
__device__ __forceinline__ uint64_t best_key(const SampleRow& row, const Logits<T>& logits, int32_t first, int32_t step,
                                             RowMemory& m) {
  if (row.temperature == 0) return largest_logit(logits, first, step);
  LargestSum sum(row, m);
  logits.each(first, step, [&](int32_t q, const float(&x)[4]) {
    sum.add(q, x, logits.ids, [](float, int32_t) { return true; });
    if (q + step < logits.quads()) sum.raise_bar();
  });
  return sum.best.key;
}

// Stores the key of block `part` of row `r` in keys[part], and returns whether this block is the last of the row's
// blocks to do so. The last block sets the count of blocks to zero for the next launch. Called by all threads with the
// first thread's key.
__device__ __forceinline__ bool is_last_block(const SampleParams& p, int32_t r, int32_t part, uint64_t key,
                                              uint64_t* keys, BestMemory& m) {
  if (threadIdx.x == 0) {
    __stcg(keys + part, key);
    m.last = ptx::fetch_add_acq_rel(p.arrived + r, 1) == uint32_t(p.blocks - 1);
    if (m.last) ptx::store_relaxed(p.arrived + r, 0);
  }
  __syncthreads();
  return m.last;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) sample_kernel(const __grid_constant__ SampleParams p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  RowMemory& m = tile::shared<RowMemory>();
  const int32_t r = int32_t(blockIdx.x) / p.blocks, part = int32_t(blockIdx.x) % p.blocks;
  const SampleRow& row = load_row(p, r, m);
  if (has_filter(row)) return;
  const Logits<T> logits(p, row, m);
  uint64_t key = best_key(row, logits, part * kThreads + int32_t(threadIdx.x), p.blocks * kThreads, m);
  key = first_warp_best(key, m.best);
  uint64_t* const keys = p.best + int64_t(r) * kMostBlocks;
  if (!is_last_block(p, r, part, key, keys, m.best)) return;
  key = int32_t(threadIdx.x) < p.blocks ? __ldcg(keys + threadIdx.x) : 0;
  store_token(p, row, sampled_id(first_warp_best(key, m.best)));
}

}  // namespace ingot::sampling
