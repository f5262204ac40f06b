#pragma once
// The forward pass: a warp adds, mixes and normalises a row at a time, and stores every result that later code reads.
#include <cstdint>

#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/residual/columns.cuh"
#include "ingot/kernels/residual_norm/row_vectors.cuh"

namespace ingot::cuda::residual_norm_kernels {

template <class T> struct ForwardParams {
  Rows<T> x, branch, sum, x0, mixed, y;
  Channels scale, a, b;
  float* rstd;
  int64_t rows;
  int cols;
  float eps, norm_scale;
};

template <class T, int V, bool kBranch, bool kMix>
__global__ void __launch_bounds__(kThreads) residual_norm_forward(const __grid_constant__ ForwardParams<T> p) {
  const int lane = int(threadIdx.x % 32);
  Factors<kBranch ? V : 1> scale;
  Factors<kMix ? V : 1> a, b;
  if constexpr (kBranch) scale.load(p.scale, p.cols);
  if constexpr (kMix) a.load(p.a, p.cols), b.load(p.b, p.cols);
  const int64_t apart = int64_t(gridDim.x) * kWarps;
  for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; row < p.rows; row += apart) {
    tile::Vec<T, kVector> x[V], branch[kBranch ? V : 1], x0[kMix ? V : 1];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = column_of(lane, v);
      if (c >= p.cols) continue;
      p.x.load(row, c, x[v]);
      if constexpr (kBranch) p.branch.load(row, c, branch[v]);
      if constexpr (kMix) p.x0.load(row, c, x0[v]);
    }
    float m[V][kVector], squares[1] = {0};
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = column_of(lane, v);
      tile::to_float(x[v], m[v]);
      float more[kVector];
      if constexpr (kBranch) {
        tile::to_float(branch[v], more);
#pragma unroll
        for (int k = 0; k < kVector; ++k) m[v][k] = residual::added(m[v][k], scale.of[v][k], more[k]);
        const auto s = rounded<T>(m[v]);
        if (c < p.cols) p.sum.store(row, c, s);
      }
      if constexpr (kMix) {
        tile::to_float(x0[v], more);
#pragma unroll
        for (int k = 0; k < kVector; ++k) m[v][k] = residual::mixed(a.of[v][k], m[v][k], b.of[v][k], more[k]);
        const auto s = rounded<T>(m[v]);
        if (c < p.cols) p.mixed.store(row, c, s);
      }
      if (c < p.cols)
#pragma unroll
        for (int k = 0; k < kVector; ++k) squares[0] += m[v][k] * m[v][k];
    }
    tile::warp_sum(squares, 32);
    const float rstd = 1 / sqrtf(squares[0] / float(p.cols) + p.eps), factor = rstd * p.norm_scale;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = column_of(lane, v);
#pragma unroll
      for (float& value : m[v]) value *= factor;
      if (c < p.cols) p.y.store(row, c, tile::from_float<T>(m[v]));
    }
    if (p.rstd != nullptr && lane == 0) p.rstd[row] = rstd;
  }
}

}  // namespace ingot::cuda::residual_norm_kernels
