#include <bit>
#include <mutex>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"
#include "ingot/kernels/rmsnorm/rmsnorm_device.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_reread.cuh"

namespace ingot::cuda {
namespace {

constexpr int64_t kMaxRows = 0xffffffff;
constexpr int kMaxResident = 2048;  // threads of an SM

struct Params {
  const void *x, *residual, *w;
  void *sum, *y;
  float* rstd;
  RowMap x_rows, residual_rows, sum_rows, y_rows;
  int64_t first_row, rows, cols;
  uint32_t inner;  // rows per outer index; 0: one stride reaches all rows
  uint32_t vecs, group, cluster;
  float eps, scale, w_offset;
  uint32_t early_blocks;  // may start while an earlier kernel ends
  DType w_dtype;
  bool streaming;
};

template <class T, int N> __device__ inline void load_once(tile::Vec<T, N>& v, const T* p, bool streaming) {
  if (streaming)
    tile::load_streaming(v, p);
  else
    tile::load(v, p);
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
        load_once(residual[r][v], static_cast<const X*>(p.residual) + offset(p.residual_rows, at[r]) + int64_t(i) * N,
                  p.streaming);
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
__device__ inline void write_vectors(const Params& p, const tile::Vec<X, N> (&s)[R][V], int v, const float (&factor)[R],
                                     const bool (&row_ok)[R], const RowIndex (&at)[R], uint32_t i,
                                     const float (&w)[N]) {
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
__device__ inline void write_rows(const Params& p, const tile::Vec<X, N> (&s)[R][V], const float (&factor)[R],
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

// The factors of a thread's columns, asked for together with the row where registers allow it.
template <int N, int V>
__device__ inline void load_weights(const Params& p, uint32_t first, uint32_t step, float (&w)[V][N]) {
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

// What a block reads is asked for while earlier kernels still run: L2 is where everybody's writes meet, so what they
// change there is changed for this kernel too.
template <class X, int R> __device__ inline void prefetch_rows(const Params& p, int64_t row) {
  if (p.inner != 0 || row >= p.rows) return;
  const int64_t rows = p.rows - row < R ? p.rows - row : R;
  const auto prefetch = [&](const void* operand, const RowMap& map) {
    if (operand != nullptr && map.outer_stride == p.cols)
      ptx::prefetch_to_l2(static_cast<const X*>(operand) + row * p.cols, uint32_t(rows * p.cols * int(sizeof(X))));
  };
  prefetch(p.x, p.x_rows);
  prefetch(p.residual, p.residual_rows);
}

// One pass: the rows stay in registers, packed, between the sum and the product. kResidual: s = x + residual, rounded
// to X as stored, so that the backward pass sees the s that was normalised.
template <class X, class Y, int V, int R, bool kResidual>
__global__ void __launch_bounds__(kRmsNormMaxThreads) rmsnorm_rows(const __grid_constant__ Params p) {
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
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (const uint32_t i = first + v * step; row_ok[r] && i < p.vecs)
        load_once(s[r][v], static_cast<const X*>(p.x) + offset(p.x_rows, at[r]) + int64_t(i) * N, p.streaming);

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
  if (clustered) sum[0] = tile::cluster_sum(sum[0], p.cluster, cluster_memory);

  float factor[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float rstd = rstd_of(sum[r], p.cols, p.eps);
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

template <class Work>
__global__ void __launch_bounds__(kRmsNormMaxThreads,
                                  Work::kResidual || sizeof(typename Work::W) > sizeof(typename Work::X) ? 1 : 2)
    rmsnorm_reread(const __grid_constant__ RereadParams p) {
  auto& memory = tile::shared<RereadMemory>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  reread_rows<Work>(p, memory);
}

// Any alignment, any length: one block per row, element by element, the second pass mostly from L1 and L2.
template <class X, class Y>
__global__ void __launch_bounds__(kRmsNormElementThreads) rmsnorm_elements(const __grid_constant__ Params p) {
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
    x = s;  // each thread reads back only what it wrote
  }
  float sum[1] = {};
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < p.cols; c += blockDim.x) {
    const float value = tile::to_float(x[c]);
    sum[0] += value * value;
  }
  tile::group_sum(sum, blockDim.x, memory);
  const float rstd = rstd_of(sum[0], p.cols, p.eps), factor = rstd * p.scale;
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

RmsNormShape shape_of(const RmsNorm& a) {
  const int64_t per_vec = 16 / size_of(a.x.dtype);
  const bool aligned = rows_aligned(a.x, per_vec) && rows_aligned(a.residual, per_vec) &&
                       rows_aligned(a.sum, per_vec) && rows_aligned(a.y, per_vec) && rows_aligned(a.w, per_vec);
  const bool one_type = a.y.dtype == a.x.dtype && (!a.w || a.w.dtype == a.x.dtype || a.w.dtype == DType::f32);
  return {.rows = a.x.rows(),
          .cols = a.x.cols(),
          .dtype = a.x.dtype,
          .aligned = aligned,
          .residual = bool(a.residual),
          .plain = one_type && merge_rows<4>("rmsnorm", {a.x, a.residual, a.sum, a.y}).inner == 0};
}

using Kernel = void (*)(Params);

template <class X, class Y> Kernel pick_kernel(const RmsNormConfig& c, bool residual) {
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

#ifdef INGOT_EMULATE
SmLimits ask_limits(int) { return {.sms = 3}; }
#else
SmLimits ask_limits(int device) {
  const gpu::DeviceGuard guard(device);
  SmLimits limits;
  cudaFuncAttributes loaded;
  gpu::check_cuda(cudaFuncGetAttributes(&loaded, rmsnorm_elements<float, float>), "rmsnorm: the loaded code");
  limits.hopper = loaded.ptxVersion >= 90;
  gpu::check_cuda(cudaDeviceGetAttribute(&limits.sms, cudaDevAttrMultiProcessorCount, device), "rmsnorm: SMs");
  gpu::check_cuda(cudaDeviceGetAttribute(&limits.smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                  "rmsnorm: shared memory");
  if (limits.hopper) ask_resident_clusters(limits);
  return limits;
}
#endif

void check_config(const RmsNormConfig& c, int64_t vecs) {
  if (!c.vectors) return;
  const bool pow2 = round_up_pow2(c.group) == c.group;
  INGOT_CHECK(c.group <= c.threads && (pow2 || (c.reread && c.group == c.threads)) &&
                  (c.cluster == 1 || (c.group == c.threads && c.rows_per_group == 1)),
              "rmsnorm: found a group of ", c.group, " in blocks of ", c.threads, " and clusters of ", c.cluster,
              ", expected it to fit, and clusters only with one row per block");
  INGOT_CHECK(!c.reread || c.group == c.threads || (pow2 && c.group <= 32), "rmsnorm: found groups of ", c.group,
              " in blocks of ", c.threads, ", expected lanes of a warp or the whole block");
  INGOT_CHECK(int64_t(c.group) * c.vecs_per_thread * c.cluster >= vecs, "rmsnorm: found room for ",
              c.group * c.vecs_per_thread * c.cluster, " vectors, expected ", vecs);
}

using RereadKernel = void (*)(RereadParams);
template <class X, class W> RereadKernel pick_reread(bool residual) {
  return residual ? rmsnorm_reread<RereadWork<X, W, 2, 1, true>> : rmsnorm_reread<RereadWork<X, W, 2, 1, false>>;
}
RereadKernel pick_reread(DType x, DType w, bool residual) {
  return with_cuda_float_type("rmsnorm", x, [&](auto type) {
    using X = decltype(type);
    return w == x ? pick_reread<X, X>(residual) : pick_reread<X, float>(residual);
  });
}

void launch_reread(const RmsNorm& a, const RmsNormTuning& tuning, bool overlap, Stream stream) {
  const RmsNormConfig& c = tuning.config;
  const RowMaps<4> rows = merge_rows<4>("rmsnorm", {a.x, a.residual, a.sum, a.y});
  RereadParams p{.x = a.x.data,
                 .residual = a.residual ? a.residual.data : nullptr,
                 .w = a.w ? a.w.data : nullptr,
                 .sum = a.sum ? a.sum.data : nullptr,
                 .y = a.y.data,
                 .rstd = a.rstd ? static_cast<float*>(a.rstd.data) : nullptr,
                 .x_stride = rows.of[0].outer_stride,
                 .residual_stride = rows.of[1].outer_stride,
                 .sum_stride = rows.of[2].outer_stride,
                 .y_stride = rows.of[3].outer_stride,
                 .first_row = 0,
                 .rows = a.x.rows(),
                 .vecs = uint32_t(a.x.cols() * size_of(a.x.dtype) / 16),
                 .group = uint32_t(c.group),
                 .group_bits = uint32_t(std::bit_width(unsigned(c.group)) - 1),
                 .cols = float(a.x.cols()),
                 .eps = float(a.eps),
                 .scale = float(a.scale),
                 .w_offset = a.unit_offset ? 1.f : 0.f};
  const RereadKernel kernel = pick_reread(a.x.dtype, a.w ? a.w.dtype : a.x.dtype, bool(a.residual));
  const int64_t per_block = c.rows_per_block(), most = (int64_t(1) << 30) * per_block;  // of one launch
  for (; p.first_row < p.rows; p.first_row += most)
    gpu::launch("rmsnorm", kernel,
                {.grid = (std::min(most, p.rows - p.first_row) + per_block - 1) / per_block,
                 .block = c.threads,
                 .overlap = overlap,
                 .device = a.x.device.index},
                stream, p);
}

}  // namespace

SmLimits rmsnorm_limits(int device) {
  constexpr int kDevices = 64;
  static SmLimits known[kDevices];
  static std::once_flag asked[kDevices];
  INGOT_CHECK(device >= 0 && device < kDevices, "rmsnorm: found device ", device, ", expected 0 to ", kDevices - 1);
  std::call_once(asked[device], [&] { known[device] = ask_limits(device); });
  return known[device];
}

RmsNormTuning default_rmsnorm_tuning(const RmsNorm& a) {
  return {.config = pick_rmsnorm_config(shape_of(a), rmsnorm_limits(a.x.device.index))};
}

void rmsnorm(const RmsNorm& a, Stream stream) { rmsnorm_with(a, default_rmsnorm_tuning(a), stream); }

void rmsnorm_with(const RmsNorm& a, const RmsNormTuning& tuning, Stream stream) {
  const int64_t rows = a.x.rows(), cols = a.x.cols(), vecs = cols * size_of(a.x.dtype) / 16;
  if (a.w) with_cuda_float_type("rmsnorm", a.w.dtype, [](auto) { return 0; });
  INGOT_CHECK(!a.residual || (a.residual.dtype == a.x.dtype && a.sum.dtype == a.x.dtype), "rmsnorm: found residual ",
              a.residual.dtype, " and sum ", a.sum.dtype, ", expected x's ", a.x.dtype, " on a GPU");
  INGOT_CHECK(!a.rstd || a.rstd.dtype == DType::f32, "rmsnorm: found rstd ", a.rstd.dtype, ", expected f32");
  if (rows > kMaxRows)
    fail(ErrorCode::unsupported, "rmsnorm: found ", rows, " rows, expected at most ", kMaxRows, " on a GPU");
  if (rows == 0 || cols == 0) return;
  const RmsNormConfig& c = tuning.config;
  check_config(c, vecs);
  const SmLimits limits = rmsnorm_limits(a.x.device.index);
  const bool overlap = tuning.overlap && limits.hopper;

  if (c.reread) return launch_reread(a, tuning, overlap, stream);

  const Kernel kernel = with_cuda_float_type("rmsnorm", a.x.dtype, [&](auto x) {
    return with_cuda_float_type("rmsnorm", a.y.dtype, [&](auto y) {
      return pick_kernel<decltype(x), decltype(y)>(tuning.config, bool(a.residual));
    });
  });
  const RowMaps<4> rows_of = merge_rows<4>("rmsnorm", {a.x, a.residual, a.sum, a.y});
  Params p{.x = a.x.data,
           .residual = a.residual ? a.residual.data : nullptr,
           .w = a.w ? a.w.data : nullptr,
           .sum = a.sum ? a.sum.data : nullptr,
           .y = a.y.data,
           .rstd = a.rstd ? static_cast<float*>(a.rstd.data) : nullptr,
           .x_rows = rows_of.of[0],
           .residual_rows = rows_of.of[1],
           .sum_rows = rows_of.of[2],
           .y_rows = rows_of.of[3],
           .first_row = 0,
           .rows = rows,
           .cols = cols,
           .inner = uint32_t(rows_of.inner),
           .vecs = uint32_t(vecs),
           .group = uint32_t(c.group),
           .cluster = uint32_t(c.cluster),
           .eps = float(a.eps),
           .scale = float(a.scale),
           .w_offset = a.unit_offset ? 1.f : 0.f,
           .early_blocks =
               overlap && tuning.prefetch && !c.streaming ? uint32_t(limits.sms * (kMaxResident / c.threads)) : 0,
           .w_dtype = a.w ? a.w.dtype : DType::f32,
           .streaming = c.streaming};
  // More rows than a grid may have blocks for go in several launches.
  const int64_t per_block = c.rows_per_block(), most = (int64_t(1) << 30) / c.cluster * per_block;
  for (; p.first_row < rows; p.first_row += most) {
    const int64_t now = std::min(most, rows - p.first_row);
    gpu::launch("rmsnorm", kernel,
                {.grid = (now + per_block - 1) / per_block * c.cluster,
                 .block = c.threads,
                 .cluster = c.cluster,
                 .overlap = overlap,
                 .device = a.x.device.index},
                stream, p);
  }
}

}  // namespace ingot::cuda
