#pragma once
// The forward kernels that hold rows in registers, or go element by element. Each type of x has its instances in a
// generated file of its own (room.cmake), so that no file takes long to compile.
#include "ingot/core/check.h"
#include "ingot/core/dispatch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/keeping.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/rmsnorm/forward/rmsnorm_forward.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"
#include "ingot/kernels/rmsnorm/rmsnorm_device.cuh"

namespace ingot::cuda {

// A thread's vectors of R rows of an operand. Loads of large tensors carry the hint to stay in L2, so that written
// lines leave L2 first.
template <class X, int N, int V, int R>
__device__ inline void load_rows(tile::Vec<X, N> (&to)[R][V], const void* from, const RowMap& map, bool streaming,
                                 const bool (&row_ok)[R], const RowIndex (&at)[R], uint32_t first, uint32_t step,
                                 uint32_t vecs) {
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (const uint32_t i = first + v * step; row_ok[r] && i < vecs) {
        const X* const vector = static_cast<const X*>(from) + offset(map, at[r]) + int64_t(i) * N;
        if (streaming)
          tile::load_keeping_l2(to[r][v], vector);
        else
          tile::load(to[r][v], vector);
      }
}

// s += residual, rounded to X; stores it.
template <class X, int N, int V, int R>
__device__ inline void add_residual(const RmsNormParams& p, tile::Vec<X, N> (&s)[R][V], const bool (&row_ok)[R],
                                    const RowIndex (&at)[R], uint32_t first, uint32_t step) {
  tile::Vec<X, N> residual[R][V];
  load_rows<X>(residual, p.residual, p.residual_rows, p.streaming, row_ok, at, first, step, p.vecs);
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float value[N], more[N];
      tile::to_float(s[r][v], value);
      tile::to_float(residual[r][v], more);
#pragma unroll
      for (int k = 0; k < N; ++k) value[k] += more[k];
      s[r][v] = tile::from_float<X>(value);
      if (const uint32_t i = first + v * step; row_ok[r] && i < p.vecs)
        tile::store(static_cast<X*>(p.sum) + offset(p.sum_rows, at[r]) + int64_t(i) * N, s[r][v], p.streaming);
    }
}

// y = s * factor * w for vector v, number i of the row, of R rows.
template <class Y, class X, int N, int V, int R>
__device__ inline void write_vectors(const RmsNormParams& p, const tile::Vec<X, N> (&s)[R][V], int v,
                                     const float (&factor)[R], const bool (&row_ok)[R], const RowIndex (&at)[R],
                                     uint32_t i, const float (&w)[N]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (!row_ok[r]) continue;
    float value[N];
    tile::to_float(s[r][v], value);
#pragma unroll
    for (int k = 0; k < N; ++k) value[k] = value[k] * factor[r] * w[k];
    tile::store(static_cast<Y*>(p.y) + offset(p.y_rows, at[r]) + int64_t(i) * N, tile::from_float<Y>(value),
                p.streaming);
  }
}

// y = s * factor * (w_offset + w) for the vectors a thread holds of R rows.
template <class Y, class X, int N, int V, int R>
__device__ inline void write_rows(const RmsNormParams& p, const tile::Vec<X, N> (&s)[R][V], const float (&factor)[R],
                                  const bool (&row_ok)[R], const RowIndex (&at)[R], uint32_t first, uint32_t step) {
  const auto write = [&](int v, uint32_t i, const float(&w)[N]) {
    write_vectors<Y>(p, s, v, factor, row_ok, at, i, w);
  };
  if (p.w == nullptr) {
    float one[N];
#pragma unroll
    for (int k = 0; k < N; ++k) one[k] = 1;
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (const uint32_t i = first + v * step; i < p.vecs) write(v, i, one);
    return;
  }
  with_weight_type(p.w_dtype, [&](auto type) {
    using W = decltype(type);
    // As many weights are requested at once as the limit on registers allows, because no load may move above a store of
    // y.
    constexpr int kBytesAtOnce = V > 4 ? 32 : 64;
    constexpr int kAtOnce = kBytesAtOnce / tile::Vec<W, N>::kBytes < V ? kBytesAtOnce / tile::Vec<W, N>::kBytes : V;
#pragma unroll
    for (int v0 = 0; v0 < V; v0 += kAtOnce) {
      tile::Vec<W, N> packed[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (const uint32_t i = first + (v0 + k) * step; i < p.vecs)
          tile::load(packed[k], static_cast<const W*>(p.w) + int64_t(i) * N);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const uint32_t i = first + (v0 + k) * step;
        if (i >= p.vecs) continue;
        float w[N];
        tile::to_float(packed[k], w);
#pragma unroll
        for (int n = 0; n < N; ++n) w[n] += p.w_offset;
        write(v0 + k, i, w);
      }
    }
  });
}

// The factors of a thread's columns, loaded together with the row where registers suffice.
template <int N, int V>
__device__ inline void load_weights(const RmsNormParams& p, uint32_t first, uint32_t step, float (&w)[V][N]) {
  if (p.w == nullptr) {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k = 0; k < N; ++k) w[v][k] = 1;
    return;
  }
  with_weight_type(p.w_dtype, [&](auto type) {
    using W = decltype(type);
    tile::Vec<W, N> packed[V];
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (const uint32_t i = first + v * step; i < p.vecs)
        tile::load(packed[v], static_cast<const W*>(p.w) + int64_t(i) * N);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      tile::to_float(packed[v], w[v]);
#pragma unroll
      for (int k = 0; k < N; ++k) w[v][k] += p.w_offset;
    }
  });
}

// A block prefetches its rows into L2 while earlier kernels still run. All writes of the GPU pass through L2, so rows
// that those kernels change are up to date for this kernel, too.
template <class X, int R> __device__ inline void prefetch_rows(const RmsNormParams& p, int64_t row) {
  if (p.inner != 0 || row >= p.rows) return;
  const int64_t rows = p.rows - row < R ? p.rows - row : R;
  const auto prefetch = [&](const void* operand, const RowMap& map) {
    if (operand != nullptr && map.outer_stride == p.cols)
      ptx::prefetch_to_l2(static_cast<const X*>(operand) + row * p.cols, uint32_t(rows * p.cols * int(sizeof(X))));
  };
  prefetch(p.x, p.x_rows);
  prefetch(p.residual, p.residual_rows);
}

// A single pass: the rows stay in registers, packed, between the sum and the product. kResidual: s = x + residual,
// rounded to X as stored, so that the backward pass sees the normalised s.
template <class X, class Y, int V, int R, bool kResidual>
__global__ void __launch_bounds__(kRmsNormMaxThreads) rmsnorm_rows(const __grid_constant__ RmsNormParams p) {
  constexpr int N = 16 / int(sizeof(X));
  auto& group_memory = tile::shared<tile::GroupSumMemory<R, kRmsNormMaxThreads>>();
  auto& cluster_memory = tile::shared<tile::ClusterSumMemory>();
  ptx::let_next_kernel_start();
  const bool clustered = R == 1 && p.cluster > 1;
  if (clustered) ptx::cluster_arrive();
  const uint32_t rank = clustered ? ptx::cluster_rank() : 0, lane = threadIdx.x & (p.group - 1);
  const uint32_t first = rank * p.group + lane, step = p.cluster * p.group;
  const int64_t row_block = clustered ? blockIdx.x / p.cluster : blockIdx.x;
  const int64_t row = p.first_row + (row_block * (blockDim.x / p.group) + threadIdx.x / p.group) * R;
  if (blockIdx.x < p.early_blocks && first == 0) prefetch_rows<X, R>(p, row);
  ptx::wait_for_earlier_kernels();

  RowIndex at[R];
  bool row_ok[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    row_ok[r] = row + r < p.rows;
    at[r] = row_index(p.inner, row + r);
  }

  tile::Vec<X, N> s[R][V];
  load_rows<X>(s, p.x, p.x_rows, p.streaming, row_ok, at, first, step, p.vecs);
  constexpr bool kEarlyWeights = V * R <= 2;
  float w[kEarlyWeights ? V : 1][N];
  if constexpr (kEarlyWeights) load_weights<N, V>(p, first, step, w);
  if constexpr (kResidual) add_residual(p, s, row_ok, at, first, step);

  float sum[R] = {};
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float value[N];
      tile::to_float(s[r][v], value);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[r] += value[k] * value[k];
    }
  tile::group_sum(sum, p.group, group_memory);
  if (p.ahead_bytes != 0 && first == 0 && row + p.ahead < p.rows)
    ptx::prefetch_to_l2(static_cast<const X*>(p.x) + offset(p.x_rows, row_index(p.inner, row + p.ahead)),
                        p.ahead_bytes);
  if (clustered) sum[0] = tile::cluster_sum(sum[0], p.cluster, cluster_memory);

  float factor[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float rstd = rstd_of(sum[r], float(p.cols), p.eps);
    factor[r] = rstd * p.scale;
    if (p.rstd != nullptr && first == 0 && row_ok[r]) p.rstd[row + r] = rstd;
  }
  if constexpr (kEarlyWeights) {
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (const uint32_t i = first + v * step; i < p.vecs) write_vectors<Y>(p, s, v, factor, row_ok, at, i, w[v]);
  } else {
    write_rows<Y>(p, s, factor, row_ok, at, first, step);
  }
}

// Any alignment, any length: a block per row, element by element, the second pass mostly from L1 and L2.
template <class X, class Y>
__global__ void __launch_bounds__(kRmsNormElementThreads) rmsnorm_elements(const __grid_constant__ RmsNormParams p) {
  auto& memory = tile::shared<tile::GroupSumMemory<1, kRmsNormElementThreads>>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const int64_t row = p.first_row + blockIdx.x;
  const RowIndex at = row_index(p.inner, row);
  const X* x = static_cast<const X*>(p.x) + offset(p.x_rows, at);
  if (p.residual != nullptr) {
    const X* residual = static_cast<const X*>(p.residual) + offset(p.residual_rows, at);
    X* s = static_cast<X*>(p.sum) + offset(p.sum_rows, at);
#pragma unroll 4
    for (int64_t c = threadIdx.x; c < p.cols; c += blockDim.x)
      s[c] = tile::from_float<X>(tile::to_float(x[c]) + tile::to_float(residual[c]));
    x = s;  // each thread reads back only its own values
  }
  float sum[1] = {};
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < p.cols; c += blockDim.x) {
    const float value = tile::to_float(x[c]);
    sum[0] += value * value;
  }
  tile::group_sum(sum, blockDim.x, memory);
  const float rstd = rstd_of(sum[0], float(p.cols), p.eps), factor = rstd * p.scale;
  if (p.rstd != nullptr && threadIdx.x == 0) p.rstd[row] = rstd;

  Y* y = static_cast<Y*>(p.y) + offset(p.y_rows, at);
  if (p.w == nullptr) {
#pragma unroll 4
    for (int64_t c = threadIdx.x; c < p.cols; c += blockDim.x)
      y[c] = tile::from_float<Y>(tile::to_float(x[c]) * factor);
    return;
  }
  with_weight_type(p.w_dtype, [&](auto type) {
    const auto* w = static_cast<const decltype(type)*>(p.w);
#pragma unroll 4
    for (int64_t c = threadIdx.x; c < p.cols; c += blockDim.x)
      y[c] = tile::from_float<Y>(tile::to_float(x[c]) * factor * (p.w_offset + tile::to_float(w[c])));
  });
}

template <class X, class Y> auto pick_rows(const RmsNormConfig& c, bool residual) -> void (*)(RmsNormParams) {
  if (!c.vectors) return rmsnorm_elements<X, Y>;
  switch (c.vecs_per_thread * 10 + c.rows_per_group) {
    case 11: return residual ? rmsnorm_rows<X, Y, 1, 1, true> : rmsnorm_rows<X, Y, 1, 1, false>;
    case 21: return residual ? rmsnorm_rows<X, Y, 2, 1, true> : rmsnorm_rows<X, Y, 2, 1, false>;
    case 14: return residual ? rmsnorm_rows<X, Y, 1, 4, true> : rmsnorm_rows<X, Y, 1, 4, false>;
    case 22: return residual ? rmsnorm_rows<X, Y, 2, 2, true> : rmsnorm_rows<X, Y, 2, 2, false>;
    case 41: return residual ? rmsnorm_rows<X, Y, 4, 1, true> : rmsnorm_rows<X, Y, 4, 1, false>;
    case 81:
      if (!residual) return rmsnorm_rows<X, Y, 8, 1, false>;
  }
  fail(ErrorCode::unsupported, "rmsnorm: found ", c.vecs_per_thread, " vectors of ", c.rows_per_group,
       " rows a thread, expected 1 x 1, 2 x 1, 1 x 4, 2 x 2, 4 x 1 or, without a residual, 8 x 1");
}

template <class X> auto pick_rmsnorm(DType y, const RmsNormConfig& c, bool residual) -> void (*)(RmsNormParams) {
  return with_cuda_float_type("rmsnorm", y, [&](auto type) { return pick_rows<X, decltype(type)>(c, residual); });
}

}  // namespace ingot::cuda
