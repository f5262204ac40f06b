#pragma once
// The end of the backward pass: for rows of a layer's dW and for its db, adds the clusters' parts in an order given by
// their number, applies the backward pass of weight norm, and adds the result to the old gradient.
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"
#include "ingot/kernels/mlp/to_128/layer_pipeline_layout.cuh"

namespace ingot::cuda::layer_pipeline {

// Columns 4 * lane .. of a row of a gradient, and the further operands of its sums. The loads are issued before the
// sums have arrived, and their results are used only afterwards.
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
// dW of this row: plain, or through the weight norm, W = g r v.
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

// Adds the sums of kGroups groups of threads in order. The kAcross float4 of each group hold two columns of a pair of
// rows; `of_row` is the place of the lane's row in the first group.
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

}  // namespace ingot::cuda::layer_pipeline
