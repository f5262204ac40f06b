#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"

namespace ingot::cuda {
namespace {

// From here on nothing of y can still be in L2 when it is read next (50 to 60 MB on Hopper, shared with x).
constexpr int64_t kEvictFirstBytes = int64_t(64) << 20;

// Largest blocks an SM must hold at once: caps a thread at 64 registers, so that 64 KB of loads are in flight on each
// SM.
constexpr int kBlocksPerSm = 2;
constexpr int64_t kMaxRows = 0xffffffff;

// Where a row lies. Rows are numbered over (outer, inner) when the leading dimensions do not collapse into one.
struct RowMap {
  int64_t outer_stride = 0, inner_stride = 0;
};  // in elements

struct Params {
  const void *x, *residual, *w;
  void *sum, *y;
  float* rstd;
  RowMap x_rows, residual_rows, sum_rows, y_rows;
  int64_t first_row, rows, cols;
  uint32_t inner;  // rows per outer index; 0: one stride reaches all rows
  uint32_t vecs, group, cluster;
  float eps, scale, w_offset;
  DType w_dtype;
  bool evict_first;
};

struct RowIndex {
  uint32_t outer, inner;
};

__device__ inline RowIndex row_index(const Params& p, int64_t row) {
  if (p.inner == 0) return {uint32_t(row), 0};
  return {uint32_t(row) / p.inner, uint32_t(row) % p.inner};
}
__device__ inline int64_t offset(const RowMap& map, RowIndex at) {
  return at.outer * map.outer_stride + at.inner * map.inner_stride;
}

// Calls use(T{}) with the weight's type. Uniform over the grid; cheaper than three times as many kernels.
template <class Use> __device__ inline void with_weight_type(DType t, Use&& use) {
  if (t == DType::f32)
    use(float{});
  else if (t == DType::bf16)
    use(bf16{});
  else
    use(f16{});
}

__device__ inline float rstd_of(float sum_of_squares, const Params& p) {
  return __frsqrt_rn(__fdiv_rn(sum_of_squares, float(p.cols)) + p.eps);
}

// s += residual, rounded to X; stores it.
template <class X, int N, int V, int R>
__device__ inline void add_residual(const Params& p, tile::Vec<X, N> (&s)[R][V], const bool (&row_ok)[R],
                                    const RowIndex (&at)[R], uint32_t first, uint32_t step) {
  tile::Vec<X, N> residual[R][V];
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (const uint32_t i = first + v * step; row_ok[r] && i < p.vecs)
        tile::load_streaming(residual[r][v],
                             static_cast<const X*>(p.residual) + offset(p.residual_rows, at[r]) + int64_t(i) * N);
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
        tile::store(static_cast<X*>(p.sum) + offset(p.sum_rows, at[r]) + int64_t(i) * N, s[r][v], p.evict_first);
    }
}

// y = s * factor * (w_offset + w) for the vectors a thread holds of R rows.
template <class Y, class X, int N, int V, int R>
__device__ inline void write_rows(const Params& p, const tile::Vec<X, N> (&s)[R][V], const float (&factor)[R],
                                  const bool (&row_ok)[R], const RowIndex (&at)[R], uint32_t first, uint32_t step) {
  const auto write = [&](int v, uint32_t i, const float(&w)[N]) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (!row_ok[r]) continue;
      float value[N];
      tile::to_float(s[r][v], value);
#pragma unroll
      for (int k = 0; k < N; ++k) value[k] = value[k] * factor[r] * w[k];
      tile::store(static_cast<Y*>(p.y) + offset(p.y_rows, at[r]) + int64_t(i) * N, tile::from_float<Y>(value),
                  p.evict_first);
    }
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
    // As many weights are asked for at once as the cap on registers allows: no load may move above a store of y.
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

// One pass: the rows stay in registers, packed, between the sum and the product. kResidual: s = x + residual, rounded
// to X as stored, so that the backward pass sees the s that was normalised.
template <class X, class Y, int V, int R, bool kResidual>
__global__ void __launch_bounds__(kRmsNormMaxThreads, kBlocksPerSm) rmsnorm_rows(const __grid_constant__ Params p) {
  constexpr int N = 16 / int(sizeof(X));
  __shared__ tile::GroupSumMemory<R, kRmsNormMaxThreads> group_memory;
  __shared__ tile::ClusterSumMemory cluster_memory;
  ptx::let_next_kernel_start();
  const bool clustered = R == 1 && p.cluster > 1;
  if (clustered) ptx::cluster_arrive();
  ptx::wait_for_earlier_kernels();

  const uint32_t rank = clustered ? ptx::cluster_rank() : 0, lane = threadIdx.x & (p.group - 1);
  const uint32_t first = rank * p.group + lane, step = p.cluster * p.group;
  const int64_t row_block = clustered ? blockIdx.x / p.cluster : blockIdx.x;
  const int64_t row = p.first_row + (row_block * (blockDim.x / p.group) + threadIdx.x / p.group) * R;
  RowIndex at[R];
  bool row_ok[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    row_ok[r] = row + r < p.rows;
    at[r] = row_index(p, row + r);
  }

  tile::Vec<X, N> s[R][V];
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (const uint32_t i = first + v * step; row_ok[r] && i < p.vecs)
        tile::load_streaming(s[r][v], static_cast<const X*>(p.x) + offset(p.x_rows, at[r]) + int64_t(i) * N);
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
  if (clustered) sum[0] = tile::cluster_sum(sum[0], p.cluster, cluster_memory);

  float factor[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float rstd = rstd_of(sum[r], p);
    factor[r] = rstd * p.scale;
    if (p.rstd != nullptr && first == 0 && row_ok[r]) p.rstd[row + r] = rstd;
  }
  write_rows<Y>(p, s, factor, row_ok, at, first, step);
}

// Any alignment, any length: one block per row, element by element, the second pass mostly from L1 and L2.
template <class X, class Y>
__global__ void __launch_bounds__(kRmsNormMaxThreads) rmsnorm_elements(const __grid_constant__ Params p) {
  __shared__ tile::GroupSumMemory<1, kRmsNormMaxThreads> memory;
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const int64_t row = p.first_row + blockIdx.x;
  const RowIndex at = row_index(p, row);
  const X* x = static_cast<const X*>(p.x) + offset(p.x_rows, at);
  if (p.residual != nullptr) {
    const X* residual = static_cast<const X*>(p.residual) + offset(p.residual_rows, at);
    X* s = static_cast<X*>(p.sum) + offset(p.sum_rows, at);
#pragma unroll 4
    for (int64_t c = threadIdx.x; c < p.cols; c += blockDim.x)
      s[c] = tile::from_float<X>(tile::to_float(x[c]) + tile::to_float(residual[c]));
    x = s;  // each thread reads back only what it wrote
  }
  float sum[1] = {};
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < p.cols; c += blockDim.x) {
    const float value = tile::to_float(x[c]);
    sum[0] += value * value;
  }
  tile::group_sum(sum, blockDim.x, memory);
  const float rstd = rstd_of(sum[0], p), factor = rstd * p.scale;
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

// --- host
// --------------------------------------------------------------------------------------------------------------

// The leading dimensions of all operands, merged where one stride serves them in every operand: at most (outer, inner).
struct RowDims {
  int64_t inner = 0;
  RowMap map[4];  // x, residual, sum, y
};

RowDims row_dims(const RmsNorm& a) {
  const Tensor* operand[4] = {&a.x, a.residual ? &a.residual : nullptr, a.sum ? &a.sum : nullptr, &a.y};
  // A dimension of one row has no stride that matters.
  int kept[kMaxRank], n = 0;
  for (int d = 0; d + 1 < a.x.rank(); ++d)
    if (a.x.shape.dim[d] != 1) kept[n++] = d;
  int64_t size[kMaxRank] = {}, stride[4][kMaxRank] = {};
  int groups = 0;
  for (int k = 0; k < n; ++k) {
    const int d = kept[k];
    bool merge = groups > 0;
    for (int o = 0; o < 4 && merge; ++o)
      if (operand[o] != nullptr) merge = stride[o][groups - 1] == operand[o]->stride[d] * a.x.shape.dim[d];
    if (merge) --groups;
    size[groups] = (merge ? size[groups] : 1) * a.x.shape.dim[d];
    for (int o = 0; o < 4; ++o)
      if (operand[o] != nullptr) stride[o][groups] = operand[o]->stride[d];
    ++groups;
  }
  if (groups > 2)
    fail(ErrorCode::unsupported, "rmsnorm: found rows of shape ", a.x.shape,
         " whose leading dimensions need three strides, expected at most two on a GPU");
  RowDims dims;
  dims.inner = groups == 2 ? size[1] : 0;
  for (int o = 0; o < 4; ++o)
    dims.map[o] = groups == 2 ? RowMap{stride[o][0], stride[o][1]} : RowMap{groups == 1 ? stride[o][0] : 0, 0};
  return dims;
}

// Whether vectors of `per_vec` elements can be moved at the start of every row.
bool rows_aligned(const Tensor& t, int64_t per_vec) {
  if (!t) return true;
  const int64_t width = std::min<int64_t>(16, per_vec * size_of(t.dtype));
  if (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(width) != 0) return false;
  for (int d = 0; d + 1 < t.rank(); ++d)
    if (t.shape.dim[d] > 1 && t.stride[d] * size_of(t.dtype) % width != 0) return false;
  return true;
}

RmsNormShape shape_of(const RmsNorm& a) {
  const int64_t per_vec = 16 / size_of(a.x.dtype);
  const bool aligned = rows_aligned(a.x, per_vec) && rows_aligned(a.residual, per_vec) &&
                       rows_aligned(a.sum, per_vec) && rows_aligned(a.y, per_vec) && rows_aligned(a.w, per_vec);
  return {.rows = a.x.rows(), .cols = a.x.cols(), .dtype = a.x.dtype, .aligned = aligned, .residual = bool(a.residual)};
}

using Kernel = void (*)(Params);

template <class X, class Y> Kernel pick_kernel(const RmsNormConfig& c, bool residual) {
  if (!c.vectors) return rmsnorm_elements<X, Y>;
  switch (c.vecs_per_thread * 10 + c.rows_per_group) {
    case 14: return residual ? rmsnorm_rows<X, Y, 1, 4, true> : rmsnorm_rows<X, Y, 1, 4, false>;
    case 22: return residual ? rmsnorm_rows<X, Y, 2, 2, true> : rmsnorm_rows<X, Y, 2, 2, false>;
    case 41: return residual ? rmsnorm_rows<X, Y, 4, 1, true> : rmsnorm_rows<X, Y, 4, 1, false>;
    case 81:
      if (!residual) return rmsnorm_rows<X, Y, 8, 1, false>;
  }
  fail(ErrorCode::unsupported, "rmsnorm: found ", c.vecs_per_thread, " vectors of ", c.rows_per_group,
       " rows a thread, expected 1 x 4, 2 x 2, 4 x 1 or, without a residual, 8 x 1");
}

template <class Use> auto with_cuda_float_type(DType t, Use&& use) {
  switch (t) {
    case DType::f32: return use(float{});
    case DType::bf16: return use(bf16{});
    case DType::f16: return use(f16{});
    default: fail(ErrorCode::unsupported, "rmsnorm: found dtype ", t, " on a GPU, expected f32, bf16 or f16");
  }
}

void check_config(const RmsNormConfig& c, int64_t vecs) {
  INGOT_CHECK(
      !c.vectors || (c.group <= c.threads && (c.cluster == 1 || (c.group == c.threads && c.rows_per_group == 1))),
      "rmsnorm: found a group of ", c.group, " in blocks of ", c.threads, " and clusters of ", c.cluster,
      ", expected it to fit, and clusters only with one row per block");
  INGOT_CHECK(!c.vectors || int64_t(c.group) * c.vecs_per_thread * c.cluster >= vecs, "rmsnorm: found room for ",
              c.group * c.vecs_per_thread * c.cluster, " vectors, expected ", vecs);
}

[[noreturn]] void no_backward(Device device) {
  fail(ErrorCode::unsupported, "rmsnorm_backward: found a tensor on ", device,
       ", but only the forward pass has a CUDA kernel yet; expected cpu");
}

}  // namespace

RmsNormTuning default_rmsnorm_tuning(const RmsNorm& a) { return {.config = pick_rmsnorm_config(shape_of(a))}; }

void rmsnorm(const RmsNorm& a, Stream stream) { rmsnorm_with(a, default_rmsnorm_tuning(a), stream); }

void rmsnorm_with(const RmsNorm& a, const RmsNormTuning& tuning, Stream stream) {
  const int64_t rows = a.x.rows(), cols = a.x.cols(), vecs = cols * size_of(a.x.dtype) / 16;
  const Kernel kernel = with_cuda_float_type(a.x.dtype, [&](auto x) {
    return with_cuda_float_type(
        a.y.dtype, [&](auto y) { return pick_kernel<decltype(x), decltype(y)>(tuning.config, bool(a.residual)); });
  });
  if (a.w) with_cuda_float_type(a.w.dtype, [](auto) { return 0; });
  INGOT_CHECK(!a.residual || (a.residual.dtype == a.x.dtype && a.sum.dtype == a.x.dtype), "rmsnorm: found residual ",
              a.residual.dtype, " and sum ", a.sum.dtype, ", expected x's ", a.x.dtype, " on a GPU");
  INGOT_CHECK(!a.rstd || a.rstd.dtype == DType::f32, "rmsnorm: found rstd ", a.rstd.dtype, ", expected f32");
  if (rows > kMaxRows)
    fail(ErrorCode::unsupported, "rmsnorm: found ", rows, " rows, expected at most ", kMaxRows, " on a GPU");
  if (rows == 0 || cols == 0) return;
  const RmsNormConfig& c = tuning.config;
  check_config(c, vecs);

  const RowDims dims = row_dims(a);
  const bool evict_first =
      tuning.evict_first < 0 ? rows * cols * size_of(a.y.dtype) > kEvictFirstBytes : tuning.evict_first > 0;
  Params p{.x = a.x.data,
           .residual = a.residual ? a.residual.data : nullptr,
           .w = a.w ? a.w.data : nullptr,
           .sum = a.sum ? a.sum.data : nullptr,
           .y = a.y.data,
           .rstd = a.rstd ? static_cast<float*>(a.rstd.data) : nullptr,
           .x_rows = dims.map[0],
           .residual_rows = dims.map[1],
           .sum_rows = dims.map[2],
           .y_rows = dims.map[3],
           .first_row = 0,
           .rows = rows,
           .cols = cols,
           .inner = uint32_t(dims.inner),
           .vecs = uint32_t(vecs),
           .group = uint32_t(c.group),
           .cluster = uint32_t(c.cluster),
           .eps = float(a.eps),
           .scale = float(a.scale),
           .w_offset = a.unit_offset ? 1.f : 0.f,
           .w_dtype = a.w ? a.w.dtype : DType::f32,
           .evict_first = evict_first};
  // More rows than a grid may have blocks for go in several launches.
  const int64_t per_block = c.rows_per_block(), most = (int64_t(1) << 30) / c.cluster * per_block;
  for (; p.first_row < rows; p.first_row += most) {
    const int64_t now = std::min(most, rows - p.first_row);
    gpu::launch("rmsnorm", kernel,
                {.grid = (now + per_block - 1) / per_block * c.cluster,
                 .block = c.threads,
                 .cluster = c.cluster,
                 .overlap = tuning.overlap,
                 .device = a.x.device.index},
                stream, p);
  }
}

void rmsnorm_backward(const RmsNormBackward& a, Stream) { no_backward(a.s.device); }
int64_t rmsnorm_backward_workspace_bytes(int64_t, int64_t, DType, Device device) { no_backward(device); }

}  // namespace ingot::cuda
