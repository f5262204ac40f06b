#pragma once
// The forward pass of tensors larger than L2, in one type, rows one stride apart. Written lines should leave L2 before
// lines that are only read, so that stores reach memory early: loads carry the hint to keep their lines in L2. A block
// takes a row; where rows are short, each of its groups of up to 32 lanes takes a row.
//   kept: the row and its weights stay in registers, packed; where rows are narrow, a thread has a part of two rows.
//   read twice: with a residual, and rows that would fill the registers; the second time from L1.
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/keeping.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/rmsnorm/forward/rmsnorm_forward.h"
#include "ingot/kernels/rmsnorm/rmsnorm_device.cuh"

namespace ingot::cuda {

// The place of vector i of a row.
template <class X> __device__ inline const X* vector_at(const void* operand, int64_t stride, int64_t row, uint32_t i) {
  return static_cast<const X*>(operand) + row * stride + int64_t(i) * (16 / int(sizeof(X)));
}
template <class X> __device__ inline X* vector_at(void* operand, int64_t stride, int64_t row, uint32_t i) {
  return static_cast<X*>(operand) + row * stride + int64_t(i) * (16 / int(sizeof(X)));
}

struct LargeMemory {
  float of_warps[32];
};

__device__ inline void start(const LargeParams& p) {
  ptx::let_next_kernel_start();
  tile::ask_early<true>(p.early, p.x);
  tile::ask_early<true>(p.early, p.residual);
  ptx::wait_for_earlier_kernels();
}

// The place of a thread: vectors `lane`, lane + group, ... of its group's row. A warp's lanes are adjacent in memory.
// kWhole: one row per block.
template <bool kWhole> struct LargePlace {
  uint32_t lane;
  int64_t row;
  bool here;
  __device__ explicit LargePlace(const LargeParams& p) {
    const bool narrow = !kWhole && p.group <= 32;
    lane = narrow ? threadIdx.x & (p.group - 1) : threadIdx.x;
    const uint32_t rows = narrow ? blockDim.x >> p.group_bits : 1;  // of the block
    row = p.first_row + int64_t(blockIdx.x) * rows + (narrow ? threadIdx.x >> p.group_bits : 0);
    here = kWhole || row < p.rows;
  }
};

// The group's sum of its row.
__device__ inline float sum_over_group(uint32_t group, LargeMemory& memory, float sum) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t mask = 16; mask > 0; mask /= 2)
    if (mask < group) sum += __shfl_xor_sync(~0u, sum, int(mask));
  if (group <= 32) return sum;
  if (lane == 0) memory.of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = lane < blockDim.x / 32 ? memory.of_warps[lane] : 0;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  return sum;
}

template <class T, int N> __device__ inline float add_squares(const tile::Vec<T, N>& v, float sum) {
  float value[N];
  tile::to_float(v, value);
#pragma unroll
  for (int k = 0; k < N; ++k) sum += value[k] * value[k];
  return sum;
}

// y = s * factor * (w_offset + w) for vector i; w_offset is 1 where there is no w.
template <class X, class W, int N>
__device__ inline void write_vector(const LargeParams& p, int64_t row, uint32_t i, const tile::Vec<X, N>& s,
                                    const tile::Vec<W, N>& w, float factor) {
  float value[N], slope[N];
  tile::to_float(s, value);
  tile::to_float(w, slope);
#pragma unroll
  for (int k = 0; k < N; ++k) value[k] = value[k] * factor * (slope[k] + p.w_offset);
  tile::store(vector_at<X>(p.y, p.y_stride, row, i), tile::from_float<X>(value), false);
}

// --- V vectors a thread, without a residual --------------------------------------------------------------------------

// The number of blocks of kKeptThreads on an SM.
template <class X, class W, int V, bool kAgain> constexpr int kept_blocks() {
  if (sizeof(W) > sizeof(X)) return V == 2 ? 3 : 2;
  if (V == 3) return 3;
  return V == 2 ? 4 : kAgain && sizeof(X) == 2 ? 3 : 2;
}

// kAgain: x is read a second time instead of kept, with one row per block.
template <class X, class W, int V, bool kAgain>
__global__ void __launch_bounds__(kKeptThreads, (kept_blocks<X, W, V, kAgain>()))
    rmsnorm_kept(const __grid_constant__ LargeParams p) {
  constexpr int N = 16 / int(sizeof(X));
  auto& memory = tile::shared<LargeMemory>();
  start(p);
  const LargePlace<kAgain> at(p);
  tile::Vec<X, N> x[V];
  tile::Vec<W, N> w[V];
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (const uint32_t i = at.lane + v * p.group; at.here && i < p.vecs)
      tile::load_keeping(x[v], vector_at<X>(p.x, p.x_stride, at.row, i));
      // Weights are loaded together with the row and stay in L1: loading the weights after the sum costs 0.5 to 3 %.
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (const uint32_t i = at.lane + v * p.group; i < p.vecs && p.w != nullptr)
      tile::load_keeping(w[v], static_cast<const W*>(p.w) + int64_t(i) * N);
  float sum = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) sum = add_squares(x[v], sum);  // zeros where nothing was read
  const float rstd = rstd_of(sum_over_group(p.group, memory, sum), p.cols, p.eps), factor = rstd * p.scale;
  if (p.rstd != nullptr && at.lane == 0 && at.here) p.rstd[at.row] = rstd;
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (const uint32_t i = at.lane + v * p.group; at.here && i < p.vecs) {
      if constexpr (kAgain) ptx::load_dropping(vector_at<X>(p.x, p.x_stride, at.row, i), x[v].word[0]);
      write_vector(p, at.row, i, x[v], w[v], factor);
    }
}

// --- narrow rows: a thread has a vector of each of two rows --------------------------------------------------------

// The loads of a warp are adjacent in memory. If a thread held two vectors of the same row, each load would skip every
// second line. A block's rows lie in kRowPair runs, a group's rows at the same distance.
template <class X, class W>
__global__ void __launch_bounds__(kKeptThreads, (kept_blocks<X, W, 2, false>()))
    rmsnorm_row_pair(const __grid_constant__ LargeParams p) {
  constexpr int N = 16 / int(sizeof(X)), R = kRowPair;
  start(p);
  const uint32_t lane = threadIdx.x & (p.group - 1), groups = blockDim.x >> p.group_bits;
  const int64_t first = p.first_row + int64_t(blockIdx.x) * R * groups + (threadIdx.x >> p.group_bits);
  const auto has = [&](int r) { return lane < p.vecs && first + r * groups < p.rows; };
  tile::Vec<X, N> x[R];
  tile::Vec<W, N> w;
#pragma unroll
  for (int r = 0; r < R; ++r)
    if (has(r)) tile::load_keeping(x[r], vector_at<X>(p.x, p.x_stride, first + r * groups, lane));
  if (lane < p.vecs && p.w != nullptr) tile::load_keeping(w, static_cast<const W*>(p.w) + int64_t(lane) * N);
  float sum[R];
#pragma unroll
  for (int r = 0; r < R; ++r) sum[r] = add_squares(x[r], 0);  // zeros where nothing was read
  tile::warp_sum(sum, p.group);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t row = first + r * groups;
    const float rstd = rstd_of(sum[r], p.cols, p.eps);
    if (p.rstd != nullptr && lane == 0 && has(r)) p.rstd[row] = rstd;
    if (has(r)) write_vector(p, row, lane, x[r], w, rstd * p.scale);
  }
}

// --- read twice, s = x + residual ------------------------------------------------------------------------------------

// Vector i of a row of both operands.
template <class X> struct SumVector {
  static constexpr int N = 16 / int(sizeof(X));
  tile::Vec<X, N> x, residual;

  __device__ void load(const LargeParams& p, int64_t row, uint32_t i) {
    tile::load_keeping(x, vector_at<X>(p.x, p.x_stride, row, i));
    tile::load_keeping(residual, vector_at<X>(p.residual, p.residual_stride, row, i));
  }
  __device__ void load_again(const LargeParams& p, int64_t row, uint32_t i) {
    ptx::load_dropping(vector_at<X>(p.x, p.x_stride, row, i), x.word[0]);
    ptx::load_dropping(vector_at<X>(p.residual, p.residual_stride, row, i), residual.word[0]);
  }
  __device__ tile::Vec<X, N> sum() const {  // rounded to X, so that the backward pass sees the normalised sum
    float s[N], more[N];
    tile::to_float(x, s);
    tile::to_float(residual, more);
#pragma unroll
    for (int k = 0; k < N; ++k) s[k] += more[k];
    return tile::from_float<X>(s);
  }
};

template <class X, class W>
__global__ void __launch_bounds__(kRmsNormMaxThreads, 1) rmsnorm_residual(const __grid_constant__ LargeParams p) {
  constexpr int N = 16 / int(sizeof(X)), V = 2;
  auto& memory = tile::shared<LargeMemory>();
  start(p);
  const LargePlace<false> at(p);
  SumVector<X> read[V];
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (const uint32_t i = at.lane + v * p.group; at.here && i < p.vecs) read[v].load(p, at.row, i);
  float sum = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) sum = add_squares(read[v].sum(), sum);  // zeros where nothing was read
  const float rstd = rstd_of(sum_over_group(p.group, memory, sum), p.cols, p.eps), factor = rstd * p.scale;
  if (p.rstd != nullptr && at.lane == 0 && at.here) p.rstd[at.row] = rstd;
  tile::Vec<W, N> w[V];  // requested before any store
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (const uint32_t i = at.lane + v * p.group; i < p.vecs && p.w != nullptr)
      tile::load(w[v], static_cast<const W*>(p.w) + int64_t(i) * N);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const uint32_t i = at.lane + v * p.group;
    if (!at.here || i >= p.vecs) continue;
    SumVector<X> again;
    again.load_again(p, at.row, i);
    const tile::Vec<X, N> s = again.sum();
    tile::store(vector_at<X>(p.sum, p.sum_stride, at.row, i), s, false);
    write_vector(p, at.row, i, s, w[v], factor);
  }
}

template <class X> auto pick_rmsnorm_large(DType w, const RmsNormConfig& c, bool residual) -> void (*)(LargeParams) {
  const auto pick = [&](auto type) {
    using W = decltype(type);
    if (residual) return rmsnorm_residual<X, W>;
    if (c.reread) return rmsnorm_kept<X, W, 4, true>;
    if (c.rows_per_group == kRowPair) return rmsnorm_row_pair<X, W>;
    if (c.vecs_per_thread == 3) return rmsnorm_kept<X, W, 3, false>;
    return c.vecs_per_thread == 2 ? rmsnorm_kept<X, W, 2, false> : rmsnorm_kept<X, W, 4, false>;
  };
  return w == dtype_of<X> ? pick(X{}) : pick(float{});
}

}  // namespace ingot::cuda
