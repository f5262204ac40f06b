#pragma once
// The id with the largest sum of logit and noise: of a thread, of a warp and of a block.
#include <cstdint>

#include "ingot/kernels/sampling/best.cuh"
#include "ingot/kernels/sampling/noise.h"
#include "ingot/kernels/sampling/row.cuh"

namespace ingot::sampling {

// The largest word of a warp, in a single instruction from compute capability 8.0 on.
__device__ __forceinline__ uint32_t warp_max(uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  for (int mask = 16; mask > 0; mask /= 2) word = max(word, __shfl_xor_sync(~0u, word, mask));
  return word;
#else
  return __reduce_max_sync(~0u, word);
#endif
}
// The largest key of a warp.
__device__ __forceinline__ uint64_t warp_best(uint64_t key) {
  const uint32_t high = warp_max(uint32_t(key >> 32));
  return uint64_t(high) << 32 | warp_max(uint32_t(key >> 32) == high ? uint32_t(key) : 0);
}
// The largest key of a block, in the first warp; 0 in other warps.
__device__ __forceinline__ uint64_t first_warp_best(uint64_t key, BestMemory& m) {
  const uint32_t lane = threadIdx.x % 32;
  key = warp_best(key);
  __syncthreads();
  if (lane == 0) m.of_warp[threadIdx.x / 32] = key;
  __syncthreads();
  return threadIdx.x < 32 ? warp_best(lane < blockDim.x / 32 ? m.of_warp[lane] : 0) : 0;
}
// The ordered bits of a logit, which are the upper half of a key: they grow with the logit, and are all ones for a NaN.
__device__ __forceinline__ uint32_t ordered_bits(float logit) {
  Best b;
  b.add(logit, 0);
  return uint32_t(b.key >> 32);
}

// The largest sum of logit and scaled noise that a thread has found, or at temperature 0 the largest logit.
struct LargestSum {
  const SampleRow& row;
  Noise noise;
  RowMemory& m;
  Best best;

  __device__ LargestSum(const SampleRow& r, RowMemory& memory) : row(r), noise(r.seed, r.step, r.lane), m(memory) {
    if (threadIdx.x == 0) m.bar = 0;
    __syncthreads();
  }
  // Adds the ids of a quad. `kept(logit, id)` says whether an id may be sampled. The noise of an id is computed only if
  // the upper bound of the noise lets the sum reach `bar`, the sum of another id of the row.
  template <class Kept> __device__ void add(int32_t quad, const float (&x)[4], int32_t ids, Kept&& kept) {
    if (row.temperature == 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * quad + j < ids) best.add(x[j], uint32_t(4 * quad + j));
      return;
    }
    uint32_t may_win = 0;  // bit j: id 4 quad + j may be sampled
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (4 * quad + j < ids && kept(x[j], 4 * quad + j)) may_win |= 1u << j;
    if (may_win == 0) return;
    const auto words = noise.words(uint32_t(quad));
    // NaN before the first sum of the row; no sum compares as smaller than NaN.
    const float bar = float_of_ordered(*static_cast<volatile uint32_t*>(&m.bar));
    uint32_t tails = 0;  // bit j: the noise of id 4 quad + j needs further random bits (noise.h)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((may_win >> j & 1) == 0) continue;
      if (complement(words[j]) < kTail)
        tails |= 1u << j;
      else if (!(fmaf(row.temperature, noise_bound(words[j]), x[j]) < bar))
        best.add(noisy(row.temperature, noise_of(words[j]), x[j]), uint32_t(4 * quad + j));
    }
#pragma unroll 1
    for (uint32_t k = 0; tails >> k != 0; ++k) {  // a single copy of the code, because few ids have so much noise
      if ((tails >> k & 1) == 0) continue;
      const uint32_t id = 4 * uint32_t(quad) + k;
      const float logit = k & 2 ? (k & 1 ? x[3] : x[2]) : (k & 1 ? x[1] : x[0]);
      best.add(noisy(row.temperature, noise.of(id, word_of(words, k)), logit), id);
    }
  }
  // Raises the bar of the block to this thread's largest sum.
  __device__ void raise_bar() {
    const uint32_t reached = uint32_t(best.key >> 32);
    if (reached > *static_cast<volatile uint32_t*>(&m.bar)) atomicMax(&m.bar, reached);
  }
};

}  // namespace ingot::sampling
