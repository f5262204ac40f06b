#pragma once
// A row of logits as the kernels of sampling read it: the parameters of a launch, the options of the row, and the row's
// logits with biases and the mask of allowed ids applied.
#include <cstdint>

#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/kernels/sampling/sampling.h"

namespace ingot::sampling {

constexpr int kHashWords = 256;  // words of the set of ids with biases

struct SampleParams {
  const void* logits;
  int64_t row_stride;
  int32_t* tokens;
  int64_t token_step;
  const SampleRow* rows;  // null: every row of logits has the options `common`, with its own number as lane and row
  SampleRow common;
  const int32_t* device_step;  // added to the step of every row; or null
  const int32_t* bias_ids;
  const float* biases;
  int64_t bias_id_stride, bias_stride;
  const uint32_t* allowed;
  int64_t allowed_stride;
  uint32_t* arrived;              // (rows), zero between launches
  uint64_t* best;                 // (rows, kMostBlocks): the key of the largest sum of each block
  struct FilterSpace* filters;    // (rows)
  int32_t blocks;                 // of a row without filters
  int32_t cluster, cached_turns;  // of a row with filters: blocks; turns whose logits are in shared memory
};

struct RowMemory {
  SampleRow row;
  BestMemory best;
  uint32_t hashed[kHashWords];  // ids that may have a bias: those whose bit id % (32 kHashWords) is set
  uint32_t bar;                 // ordered bits (best.cuh) of the sum of some id of the row; 0 before the first sum
};

// Loads the options of row `r` into shared memory. Called by all threads.
__device__ __forceinline__ const SampleRow& load_row(const SampleParams& p, int32_t r, RowMemory& m) {
  if (threadIdx.x == 0) {
    SampleRow row = p.rows != nullptr ? p.rows[r] : p.common;
    if (p.rows == nullptr) row.lane = uint32_t(r), row.row = r;
    if (p.device_step != nullptr) row.step += uint32_t(*p.device_step);
    m.row = row;
  }
  __syncthreads();
  return m.row;
}
__device__ __forceinline__ bool has_filter(const SampleRow& r) {
  return r.top_k > 0 || r.top_p > 0 || r.most_octaves < INFINITY;
}

// Stores the row's token, or -1 for a row without a distribution. Called by all threads; the first thread stores.
__device__ __forceinline__ void store_token(const SampleParams& p, const SampleRow& row, const SampledId& found) {
  if (threadIdx.x == 0) p.tokens[row.row * p.token_step] = found.flaw != 0 ? -1 : found.token;
}

// The logits of a row, adjusted by the biases of its ids and by the mask of allowed ids. Threads read four ids at a
// time, a quad: ids 4 quad to 4 quad + 3.
template <class T> struct Logits {
  const T* data;
  int32_t ids, biases;
  const int32_t* bias_ids;
  const float* bias;
  const uint32_t* allowed;  // null: all ids are allowed
  const uint32_t* hashed;
  bool aligned;

  __device__ Logits(const SampleParams& p, const SampleRow& r, RowMemory& m)
      : data(static_cast<const T*>(p.logits) + r.row * p.row_stride),
        ids(r.ids),
        biases(r.biases),
        bias_ids(p.bias_ids + r.row * p.bias_id_stride),
        bias(p.biases + r.row * p.bias_stride),
        allowed(r.masked != 0 ? p.allowed + r.row * p.allowed_stride : nullptr),
        hashed(m.hashed),
        aligned(reinterpret_cast<uintptr_t>(data) % (4 * sizeof(T)) == 0) {
    if (biases == 0) return;
    for (int i = int(threadIdx.x); i < kHashWords; i += int(blockDim.x)) m.hashed[i] = 0;
    __syncthreads();
    for (int i = int(threadIdx.x); i < biases; i += int(blockDim.x)) {
      const uint32_t h = uint32_t(bias_ids[i]) % (32 * kHashWords);
      atomicOr(&m.hashed[h / 32], 1u << h % 32);
    }
    __syncthreads();
  }
  __device__ int32_t quads() const { return (ids + 3) / 4; }
  __device__ bool may_have_bias(int32_t id) const {
    const uint32_t h = uint32_t(id) % (32 * kHashWords);
    return (hashed[h / 32] >> h % 32 & 1) != 0;
  }
  // The logit x of an id with all biases of the id, found by bisection.
  __device__ float biased(float x, int32_t id) const {
    int32_t low = 0;  // the first bias of an id that is at least `id`
    for (int32_t high = biases; low < high;) {
      const int32_t middle = (low + high) / 2;
      if (bias_ids[middle] < id)
        low = middle + 1;
      else
        high = middle;
    }
    for (; low < biases && bias_ids[low] == id; ++low) x += bias[low];
    return x;
  }
  // The adjusted logits of a quad; -INFINITY for ids that do not exist.
  __device__ void load(int32_t quad, float (&x)[4]) const {
    load_unadjusted(quad, x);
    adjust(quad, x);
  }
  __device__ bool is_vector(int32_t quad) const { return aligned && 4 * quad + 4 <= ids; }
  __device__ void load_unadjusted(int32_t quad, float (&x)[4]) const {
    const int32_t first = 4 * quad;
    if (is_vector(quad)) {
      tile::Vec<T, 4> v;
      tile::load(v, data + first);
      tile::to_float(v, x);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = first + j < ids ? tile::to_float(data[first + j]) : -INFINITY;
    }
  }
  // The number of quads that are read as vectors.
  __device__ int32_t vectors() const { return aligned ? ids / 4 : 0; }
  // Calls use(quad, adjusted logits) for quads first, first + step, ... Each vector is loaded before the preceding
  // vector is used.
  template <class Use> __device__ void each(int32_t first, int32_t step, Use&& use) const {
    tile::Vec<T, 4> next;
    int32_t q = first;
    if (q < vectors()) tile::load(next, data + 4 * q);
    for (; q < vectors(); q += step) {
      const tile::Vec<T, 4> v = next;
      if (q + step < vectors()) tile::load(next, data + 4 * (q + step));
      float x[4];
      tile::to_float(v, x);
      adjust(q, x);
      use(q, x);
    }
    for (; q < quads(); q += step) {
      float x[4];
      load(q, x);
      use(q, x);
    }
  }
  __device__ bool adjusts() const { return biases > 0 || allowed != nullptr; }
  __device__ void adjust(int32_t quad, float (&x)[4]) const {
    const int32_t first = 4 * quad;
    if (biases > 0) {
      // A single copy of the search serves all four ids, because few ids have a bias.
#pragma unroll 1
      for (int k = 0; k < 4; ++k) {
        if (!may_have_bias(first + k)) continue;
        const float with_bias = biased(k & 2 ? (k & 1 ? x[3] : x[2]) : (k & 1 ? x[1] : x[0]), first + k);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = j == k ? with_bias : x[j];
      }
    }
    if (allowed != nullptr) {
      const uint32_t bits = allowed[first / 32] >> (first % 32);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if ((bits >> j & 1) == 0) x[j] = -INFINITY;
    }
  }
};

}  // namespace ingot::sampling
