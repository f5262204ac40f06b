#pragma once
// The parts that the two kernels of dK and dV share: the keys of a warp, the queries that see these keys, the mask, and
// copies between global memory, shared memory and registers.
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/attention/parts/places.cuh"
#include "ingot/kernels/attention/portable/products.cuh"

namespace ingot::cuda::attention_portable {

// Copies the tile's rows of K (o = 0) or V (o = 1) to shared memory at `at`, by all threads of the block.
template <class F>
__device__ __forceinline__ void fetch_keys(const BackwardArguments& p, const KeyTile& tile, int o, uint32_t at) {
  using T = typename F::T;
  const Source& from = o == 0 ? p.k : p.v;
  load_rows<F::kWidth, F::kKeys, F::kThreads>(at, row_at<T>(from, int64_t(tile.k_begin) + tile.first, tile.kv_head),
                                              row_bytes<T>(from), tile.keys - tile.first, p.scores.width);
}
// Copies step n's rows of Q or dO. Queries behind the segment's end become zeros, and so do their lse and delta: they
// add zeros to both sums.
template <class F>
__device__ __forceinline__ void fetch_queries(const BackwardArguments& p, const KeyTile& tile, const Source& from,
                                              int head, int n, uint32_t at) {
  using T = typename F::T;
  const int first = n * F::kQueries;
  load_rows<F::kWidth, F::kQueries, F::kThreads>(at, row_at<T>(from, int64_t(tile.q_begin) + first, head),
                                                 row_bytes<T>(from), tile.queries - first, p.scores.width);
}
template <class F>
__device__ __forceinline__ void fetch_lse_and_delta(const BackwardArguments& p, const KeyTile& tile, int head, int n,
                                                    float (&lse)[F::kQueries], float (&delta)[F::kQueries]) {
  static_assert(2 * F::kQueries <= F::kThreads, "a thread loads one number");
  const int first = n * F::kQueries, rows = tile.queries - first, i = int(threadIdx.x) % F::kQueries;
  const int64_t token = int64_t(tile.q_begin) + first;
  if (threadIdx.x < F::kQueries)
    ptx::cp_async<4>(ptx::shared_address(&lse[i]), p.scores.lse + head * p.scores.lse_stride + token + i,
                     i < rows ? 4 : 0);
  else if (threadIdx.x < 2 * F::kQueries)
    ptx::cp_async<4>(ptx::shared_address(&delta[i]), p.scores.delta + head * p.scores.delta_stride + token + i,
                     i < rows ? 4 : 0);
}

// The keys of a warp, or of two warps that share keys: 16 kTiles rows from `first` on.
template <int kTiles> struct KeyRows {
  const BackwardArguments& p;
  const KeyTile& tile;
  int first;
  int g, t;  // the lane's row of an 8 x 8 matrix, and its pair of columns

  __device__ __forceinline__ int key_of(int m, int r) const { return first + 16 * m + g + 8 * r; }
  // The steps of `queries` queries in which some query sees one of the keys.
  __device__ __forceinline__ detail::StepRange steps(int queries) const {
    const int end = min(first + 16 * kTiles, tile.keys);
    return detail::within(detail::queries_seeing(first, end, tile.queries, tile.keys, p.walk.causal, p.walk.window),
                          first < end, queries, tile.begin, tile.begin + tile.steps);
  }
  // Whether some query of [begin, begin + count) does not see all of the keys.
  __device__ __forceinline__ bool is_masked(int begin, int count) const {
    if (!p.walk.causal) return false;
    const int seen = first - (tile.keys - tile.queries);
    return begin < seen + 16 * kTiles - 1 || (p.walk.window > 0 && begin + count > seen + p.walk.window);
  }
  // Calls clear(m, i) for the elements of a product of keys by the kQueries queries from `begin` on that lie outside
  // the mask: query i sees key j where j - offset <= i < j - offset + window.
  template <int kQueries, class Clear> __device__ __forceinline__ void mask(int begin, Clear&& clear) const {
    const int window = window_of(p.walk);
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int low = key_of(m, r) - (tile.keys - tile.queries) - begin - 2 * t;
        const int end = window > 0 ? low + window : kQueries;
#pragma unroll
        for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * j + e < low || 8 * j + e >= end) clear(m, 4 * j + 2 * r + e);
      }
  }
  // Writes the sums of the keys' columns from `column` on, times `by`, to dK or dV.
  template <class T, int kColumns>
  __device__ __forceinline__ void store(const float (&d)[kTiles][kColumns], void* to, const Strides& strides, float by,
                                        bool adds, int column = 0) const {
    const float scale[2] = {by, by};
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      T* row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        row[r] = key_of(m, r) < tile.keys
                     ? static_cast<T*>(to) + (int64_t(tile.k_begin) + key_of(m, r)) * strides.token +
                           tile.kv_head * strides.head + column
                     : nullptr;
      store_rows<T>(d[m], scale, row, p.scores.width - column, uint32_t(t), adds);
    }
  }
};

}  // namespace ingot::cuda::attention_portable
