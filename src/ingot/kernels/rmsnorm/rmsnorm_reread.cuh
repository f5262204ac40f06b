#pragma once
// The forward pass of tensors larger than L2. A block takes a row (or each of its groups of up to 32 lanes does, where
// rows are short) and reads it twice: the second time from L1, and L2 learns that it may go. Nothing but sums lives in
// registers in between, so that an SM holds 2048 threads; and what was only read leaves L2 before what was written,
// which then goes to memory in longer runs.
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_device.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_forward.h"

namespace ingot::cuda {

// X everywhere but for w.
template <class X_, class W_, bool kResidual_> struct RereadWork {
  using X = X_;
  using W = W_;
  static constexpr int N = 16 / int(sizeof(X));
  static constexpr bool kResidual = kResidual_;
};

template <class X> __device__ inline const X* row_of(const void* operand, int64_t stride, int64_t row) {
  return static_cast<const X*>(operand) + row * stride;
}

// Vector i of a row of every operand that is read.
template <class Work> struct RereadVectors {
  using X = typename Work::X;
  static constexpr int N = Work::N;
  tile::Vec<X, N> x, residual;

  template <bool kAgain> __device__ void load(const RereadParams& p, int64_t row, uint32_t i) {
    load_one<kAgain>(row_of<X>(p.x, p.x_stride, row) + int64_t(i) * N, x);
    if constexpr (Work::kResidual)
      load_one<kAgain>(row_of<X>(p.residual, p.residual_stride, row) + int64_t(i) * N, residual);
  }
  // x + residual, rounded to X.
  __device__ void values(float (&s)[N]) const {
    tile::to_float(x, s);
    if constexpr (Work::kResidual) {
      float more[N];
      tile::to_float(residual, more);
#pragma unroll
      for (int k = 0; k < N; ++k) s[k] += more[k];
      tile::to_float(tile::from_float<X>(s), s);
    }
  }

 private:
  template <bool kAgain> __device__ static void load_one(const X* from, tile::Vec<X, N>& to) {
    if constexpr (kAgain)
      ptx::load_dropping(from, to.word[0]);
    else
      ptx::load_keeping(from, to.word[0]);
  }
};

struct RereadMemory {
  float of_warps[32];
};

// Where a thread works: vectors `lane`, lane + group, ... of its group's row. A warp's lanes lie side by side in
// memory.
struct RereadPlace {
  uint32_t lane;
  int64_t row;
  __device__ explicit RereadPlace(const RereadParams& p) {
    const bool narrow = p.group <= 32;
    lane = narrow ? threadIdx.x & (p.group - 1) : threadIdx.x;
    const uint32_t rows = narrow ? blockDim.x >> p.group_bits : 1;  // of the block
    row = p.first_row + int64_t(blockIdx.x) * rows + (narrow ? threadIdx.x >> p.group_bits : 0);
  }
};

// The group's sum of its row.
__device__ inline float sum_over_group(uint32_t group, RereadMemory& memory, float sum) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t mask = 16; mask > 0; mask /= 2) {
    const float other = __shfl_xor_sync(~0u, sum, int(mask));
    if (mask < group) sum += other;
  }
  if (group > 32 && lane == 0) memory.of_warps[threadIdx.x / 32] = sum;
  if (group <= 32) return sum;
  __syncthreads();
  sum = lane < blockDim.x / 32 ? memory.of_warps[lane] : 0;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  return sum;
}

template <class Work> __device__ inline float sum_squares(const RereadParams& p, const RereadPlace& at) {
  RereadVectors<Work> read[kRereadVecs];
#pragma unroll
  for (int v = 0; v < kRereadVecs; ++v)
    if (const uint32_t i = at.lane + v * p.group; at.row < p.rows && i < p.vecs)
      read[v].template load<false>(p, at.row, i);
  float sum = 0;
#pragma unroll
  for (int v = 0; v < kRereadVecs; ++v) {
    float value[Work::N];
    read[v].values(value);  // zeros where nothing was read
#pragma unroll
    for (int k = 0; k < Work::N; ++k) sum += value[k] * value[k];
  }
  return sum;
}

// Vector i of the row, the second time.
template <class Work>
__device__ inline void write_again(const RereadParams& p, int64_t row, uint32_t i, float factor,
                                   const tile::Vec<typename Work::W, Work::N>& w) {
  using X = typename Work::X;
  constexpr int N = Work::N;
  RereadVectors<Work> read;
  if (row < p.rows) read.template load<true>(p, row, i);
  float slope[N];
  tile::to_float(w, slope);
#pragma unroll
  for (int k = 0; k < N; ++k) slope[k] = p.w != nullptr ? slope[k] + p.w_offset : 1.f;
  if (row >= p.rows) return;
  float s[N];
  read.values(s);
  if constexpr (Work::kResidual)
    tile::store(static_cast<X*>(p.sum) + row * p.sum_stride + int64_t(i) * N, tile::from_float<X>(s), false);
#pragma unroll
  for (int k = 0; k < N; ++k) s[k] = s[k] * factor * slope[k];
  tile::store(static_cast<X*>(p.y) + row * p.y_stride + int64_t(i) * N, tile::from_float<X>(s), false);
}

template <class Work> __device__ inline void reread_rows(const RereadParams& p, RereadMemory& memory) {
  const RereadPlace at(p);
  const float rstd = rstd_of(sum_over_group(p.group, memory, sum_squares<Work>(p, at)), p.cols, p.eps),
              factor = rstd * p.scale;
  if (p.rstd != nullptr && at.lane == 0 && at.row < p.rows) p.rstd[at.row] = rstd;
  tile::Vec<typename Work::W, Work::N> w[kRereadVecs];  // asked for before anything is written
#pragma unroll
  for (int v = 0; v < kRereadVecs; ++v)
    if (const uint32_t i = at.lane + v * p.group; i < p.vecs && p.w != nullptr)
      tile::load(w[v], static_cast<const typename Work::W*>(p.w) + int64_t(i) * Work::N);
#pragma unroll
  for (int v = 0; v < kRereadVecs; ++v)
    if (const uint32_t i = at.lane + v * p.group; i < p.vecs) write_again<Work>(p, at.row, i, factor, w[v]);
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

template <class X> auto pick_rmsnorm_reread(DType w, bool residual) -> void (*)(RereadParams) {
  const auto pick = [&](auto type) {
    using W = decltype(type);
    return residual ? rmsnorm_reread<RereadWork<X, W, true>> : rmsnorm_reread<RereadWork<X, W, false>>;
  };
  return w == dtype_of<X> ? pick(X{}) : pick(float{});
}

}  // namespace ingot::cuda
