#pragma once
// Finds the largest logit of a row in the grid that computes the row. Equal logits go to the lower id, as in
// sampling.cpp.
#include <cstdint>

#include "ingot/gpu/ptx/atomics.cuh"

namespace ingot::sampling {

constexpr uint32_t kNan = 1, kNothing = 2;  // error bits: a logit was NaN; no logit was above -inf

// A logit and its id packed into one integer that grows with the logit and falls with the id. 0 means no logit, all
// ones a NaN.
struct Best {
  uint64_t key = 0;
  __device__ void add(float logit, uint32_t id) {
    const uint32_t u = __float_as_uint(logit + 0.f);  // makes -0 equal to 0
    const uint32_t ordered = u & 0x80000000u ? ~u : u | 0x80000000u;
    const uint64_t k = logit != logit ? ~uint64_t(0) : uint64_t(ordered) << 32 | uint32_t(~id);
    key = k > key ? k : key;
  }
};
// The logit of ordered bits, which are the upper half of a key. NaN for bits that belong to no logit.
__device__ __forceinline__ float float_of_ordered(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}
struct SampledId {
  int32_t token = 0;
  uint32_t flaw = 0;
};
__device__ __forceinline__ SampledId sampled_id(uint64_t key) {
  if (key == ~uint64_t(0)) return {0, kNan};
  constexpr uint32_t kLowest = ~0xff800000u;  // the ordered bits of -inf
  return {int32_t(~uint32_t(key)), uint32_t(key >> 32) > kLowest ? 0 : kNothing};
}

struct BestMemory {
  uint64_t of_warp[32];
  uint32_t last;
};
__device__ __forceinline__ uint64_t block_best(uint64_t key, BestMemory& m) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, key, mask);
    key = other > key ? other : key;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) m.of_warp[threadIdx.x / 32] = key;
  __syncthreads();
  for (uint32_t w = 0; w < blockDim.x / 32; ++w) key = m.of_warp[w] > key ? m.of_warp[w] : key;
  return key;
}

// Called by all threads of the grid, each with the best logit that the thread has seen. Returns true in the block that
// finishes last, which then knows the largest key. `arrived` is zero between launches; `best` has a word for every
// block.
__device__ __forceinline__ bool best_key_of_grid(const Best& mine, uint64_t* best, uint32_t* arrived, BestMemory& m,
                                                 uint64_t& largest) {
  const uint64_t key = block_best(mine.key, m);
  if (threadIdx.x == 0) {
    best[blockIdx.x] = key;
    m.last = ptx::fetch_add_acq_rel(arrived, 1) == gridDim.x - 1;
    if (m.last) ptx::store_relaxed(arrived, 0);
  }
  __syncthreads();
  if (!m.last) return false;
  uint64_t all = 0;
  for (uint32_t i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
    const uint64_t k = __ldcg(best + i);
    all = k > all ? k : all;
  }
  largest = block_best(all, m);
  return true;
}

}  // namespace ingot::sampling
