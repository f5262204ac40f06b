#pragma once
// The end of the fast backward pass: of rows of a layer's dW and of its db, the sums of the clusters' parts, in an
// order that depends on nothing but their number; weight norm's backward; +=.
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"
#include "ingot/kernels/mlp/to_128/layer_pipeline_layout.cuh"

namespace ingot::cuda::layer_pipeline {

constexpr int kSumThreads = 256;
constexpr int kSumGroups = 2;  // of the parts that a thread adds, one after the other; threads side by side have others

// Columns 4 * lane .. of one row of a gradient, and what else its sums need: asked for before the sums are there, and
// not looked at until they are.
template <class T> struct GradientRow {
  float4 old = {};
  float old_db = 0, old_dg = 0;  // lane 0
  tile::Vec<T, 4> v = {};        // of weight norm
  T g = {};
};
template <class T> __device__ GradientRow<T> load_row(const LayerShape& at, int row, int lane) {
  GradientRow<T> to;
  const int64_t start = int64_t(row) * at.k + 4 * lane;
  const bool inside = 4 * lane < at.k;
  if (inside && at.dw != nullptr) to.old = *reinterpret_cast<const float4*>(at.dw + start);
  if (lane == 0 && at.db != nullptr) to.old_db = at.db[row];
  if (at.g == nullptr) return to;
  if (lane == 0 && at.dg != nullptr) to.old_dg = at.dg[row];
  if (inside) tile::load(to.v, static_cast<const T*>(at.v) + start);
  to.g = static_cast<const T*>(at.g)[row];
  return to;
}
// dW of that row: plain, or through the weight norm, W = g r v.
template <class T>
__device__ void add_row(const LayerShape& at, int row, const GradientRow<T>& of, float (&dw)[4], int lane) {
  if (at.g != nullptr) {
    float v[4], sum[2] = {};  // dW . v and |v|^2
    tile::to_float(of.v, v);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[0] = fmaf(dw[i], v[i], sum[0]), sum[1] = fmaf(v[i], v[i], sum[1]);
    tile::warp_sum(sum, 32);
    const float r = inverse_norm(sum[1]), dot = r * sum[0];
    if (lane == 0 && at.dg != nullptr) at.dg[row] = of.old_dg + dot;
#pragma unroll
    for (int i = 0; i < 4; ++i) dw[i] = tile::to_float(of.g) * r * (dw[i] - r * v[i] * dot);
  }
  if (4 * lane < at.k && at.dw != nullptr)
    *reinterpret_cast<float4*>(at.dw + int64_t(row) * at.k + 4 * lane) =
        make_float4(of.old.x + dw[0], of.old.y + dw[1], of.old.z + dw[2], of.old.w + dw[3]);
}

// Adds what kGroups groups of threads have summed, in order. Each group's kAcross float4 have two columns of a pair of
// rows; `of_row` is where the first one's have the lane's row.
template <int kGroups, int kAcross> __device__ __forceinline__ void add_groups(float (&dw)[4], const float2* of_row) {
#pragma unroll 2
  for (int i = 0; i < kGroups; ++i, of_row += 2 * kAcross) {
    const float2 left = of_row[0], right = of_row[2];
    dw[0] += left.x, dw[1] += left.y, dw[2] += right.x, dw[3] += right.y;
  }
}

// Rows of dW come in pairs, 8 apart.
__host__ __device__ constexpr int row_pairs(int n) { return (n + 15) / 16 * 8; }
__device__ constexpr int first_row(int pair) { return pair / 8 * 16 + pair % 8; }

// A block's share of a layer: pairs of rows `first`, `first + step`, ..., kPairs of them at a time, for each of which
// a thread asks for kAtOnce parts before it adds; there may be more only with one pair. Little code: all SMs read it at
// once, while nothing else is done.
template <class T, int kWidth, int kPairs, int kAtOnce> struct LayerSum {
  static constexpr int kAcross = kWidth / 2, kSide = kSumThreads / kAcross, kSlots = kSumGroups * kSumThreads;
  static constexpr int64_t kStride = part_floats(kWidth / kPanel);
  static_assert(2 * kPairs * 32 <= kSumThreads && kAtOnce % kSumGroups == 0);
  struct Shared {
    float4 partial[kPairs][kSlots];
    float bias[kPairs][2][kSumThreads / 32];
  };

  const LayerShape& at;
  const float* part;  // of cluster 0
  Shared& shared;
  int first, step, parts;  // step is also the number of clusters
  int thread, lane, warp;

  __device__ LayerSum(const LayerShape& layer, const float* partial, void* memory, int first_pair, int clusters,
                      uint32_t of)
      : at(layer),
        part(partial + layer.first_part * kStride),
        shared(*static_cast<Shared*>(memory)),
        first(first_pair),
        step(clusters),
        parts(layer.dw != nullptr || layer.dg != nullptr ? clusters : 0),
        thread(int(of)),
        lane(thread % 32),
        warp(thread / 32) {}

  // The row that this warp finishes, of those that start with pair `from`; or one that does not exist.
  __device__ int my_row(int from) const {
    const int pair = from + warp / 2 * step;
    return warp < 2 * kPairs && pair < row_pairs(at.n) ? first_row(pair) + warp % 2 * 8 : at.n;
  }
  __device__ GradientRow<T> load(int from) const {
    const int row = my_row(from);
    return row < at.n ? load_row<T>(at, row, lane) : GradientRow<T>{};
  }

  __device__ __forceinline__ void add_parts(int from) const {
    const int column = thread % kAcross * 2, pairs = row_pairs(at.n);
    const int count = column < at.k ? (parts - thread / kAcross + kSide - 1) / kSide : 0;
    float4 sum[kPairs][kSumGroups] = {};
#pragma unroll 1
    for (int q = 0; q < (kPairs == 1 ? (parts + kSide - 1) / kSide : 1); q += kAtOnce) {
      float4 v[kPairs][kAtOnce];
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        if (from + j * step >= pairs) break;
        const float4* at_part = reinterpret_cast<const float4*>(part + (thread / kAcross + q * kSide) * kStride) +
                                part_float4(first_row(from + j * step), column, kWidth);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (q + i < count) v[j][i] = __ldcs(at_part + i * kSide * (kStride / 4));
      }
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        if (from + j * step >= pairs) break;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          float4& to = sum[j][i % kSumGroups];
          if (q + i < count) to = make_float4(to.x + v[j][i].x, to.y + v[j][i].y, to.z + v[j][i].z, to.w + v[j][i].w);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j)
#pragma unroll
      for (int i = 0; i < kSumGroups; ++i) shared.partial[j][i * kSumThreads + thread] = sum[j][i];
  }
  // A row's are of all threads.
  __device__ __forceinline__ void add_bias(int from) const {
    constexpr int kRowsOf = bias_rows(kWidth / kPanel);
    const int values = step * kRowsOf;
#pragma unroll 1
    for (int p = thread; p - thread < values; p += kSumThreads) {
      float b[2 * kPairs];
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i) {
        const int row = first_row(from + i / 2 * step) + i % 2 * 8;
        b[i] =
            p < values && row < at.n ? part[kWidth * kWidth + row + p / kRowsOf * kStride + p % kRowsOf * kWidth] : 0;
      }
      tile::warp_sum(b, 32);
      if (lane == 0)
#pragma unroll
        for (int i = 0; i < 2 * kPairs; ++i) {
          float& to = shared.bias[i / 2][i % 2][warp];
          to = p < kSumThreads ? b[i] : to + b[i];
        }
    }
  }
  __device__ __forceinline__ void finish(int from, const GradientRow<T>& of) const {
    const int row = my_row(from);
    if (row >= at.n) return;
    float dw[4] = {};
    if (2 * lane < kAcross)
      add_groups<kSlots / kAcross, kAcross>(
          dw, reinterpret_cast<const float2*>(shared.partial[warp / 2]) + 4 * lane + warp % 2);
    add_row(at, row, of, dw, lane);
    if (lane == 0 && at.db != nullptr) {
      float b = 0;
#pragma unroll 1
      for (int i = 0; i < kSumThreads / 32; ++i) b += shared.bias[warp / 2][warp % 2][i];
      at.db[row] = of.old_db + b;
    }
  }
  // `of` is load(first). On named barrier `barrier`.
  __device__ __forceinline__ void run(GradientRow<T> of, uint32_t barrier) const {
#pragma unroll 1
    for (int from = first; from < row_pairs(at.n); from += kPairs * step) {
      if (from != first) {
        of = load(from);
        ptx::barrier_sync(barrier, kSumThreads);
      }
      add_parts(from);
      if (at.db != nullptr) add_bias(from);
      ptx::barrier_sync(barrier, kSumThreads);
      finish(from, of);
    }
  }
};

}  // namespace ingot::cuda::layer_pipeline
