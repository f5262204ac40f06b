#pragma once
// The forward pass of tensors larger than L2. A block takes kRows neighbouring rows (or each of its groups of up to 32
// lanes does, where rows are short) and reads them twice: the second
// time from L1, and L2 learns that they may go. Nothing but sums lives in registers in between, so that an SM holds
// 2048 threads; and what was only read leaves L2 before what was written, which then goes to memory in longer runs.
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_device.cuh"

namespace ingot::cuda {

struct RereadParams {
  const void *x, *residual, *w;
  void *sum, *y;
  float* rstd;
  int64_t x_stride, residual_stride, sum_stride, y_stride;
  int64_t first_row, rows;
  uint32_t vecs, group, group_bits;  // group: the whole block, or a power of two up to a warp, 1 << group_bits
  float cols, eps, scale, w_offset;
};

// X everywhere but for w.
template <class X_, class W_, int kVecs_, int kRows_, bool kResidual_> struct RereadWork {
  using X = X_;
  using W = W_;
  static constexpr int kVecs = kVecs_, kRows = kRows_, N = 16 / int(sizeof(X));
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
  float of_warps[2][32];
};

// Where a thread works: vectors `lane`, lane + group, ... of rows first, first + apart, ... A warp's lanes lie side by
// side in memory.
template <class Work> struct RereadPlace {
  uint32_t lane, apart;
  int64_t first;
  __device__ explicit RereadPlace(const RereadParams& p) {
    const bool narrow = p.group <= 32;
    lane = narrow ? threadIdx.x & (p.group - 1) : threadIdx.x;
    apart = narrow ? blockDim.x >> p.group_bits : 1;
    first = p.first_row + int64_t(blockIdx.x) * apart * Work::kRows + (narrow ? threadIdx.x >> p.group_bits : 0);
  }
  __device__ int64_t row(int r) const { return first + r * apart; }
};

// The group's sums of its rows.
template <int R> __device__ inline void sum_over_group(uint32_t group, RereadMemory& memory, float (&sum)[R]) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (uint32_t mask = 16; mask > 0; mask /= 2) {
      const float other = __shfl_xor_sync(~0u, sum[r], int(mask));
      if (mask < group) sum[r] += other;
    }
    if (group > 32 && lane == 0) memory.of_warps[r][threadIdx.x / 32] = sum[r];
  }
  if (group <= 32) return;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < R; ++r) {
    sum[r] = lane < blockDim.x / 32 ? memory.of_warps[r][lane] : 0;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], mask);
  }
}

template <class Work>
__device__ inline void sum_squares(const RereadParams& p, const RereadPlace<Work>& at, float (&sum)[Work::kRows]) {
  RereadVectors<Work> read[Work::kRows][Work::kVecs];
#pragma unroll
  for (int r = 0; r < Work::kRows; ++r)
#pragma unroll
    for (int v = 0; v < Work::kVecs; ++v)
      if (const uint32_t i = at.lane + v * p.group; at.row(r) < p.rows && i < p.vecs)
        read[r][v].template load<false>(p, at.row(r), i);
#pragma unroll
  for (int r = 0; r < Work::kRows; ++r) {
    sum[r] = 0;
#pragma unroll
    for (int v = 0; v < Work::kVecs; ++v) {
      float value[Work::N];
      read[r][v].values(value);  // zeros where nothing was read
#pragma unroll
      for (int k = 0; k < Work::N; ++k) sum[r] += value[k] * value[k];
    }
  }
}

// Vector i of the group's rows, the second time.
template <class Work>
__device__ inline void write_vectors(const RereadParams& p, const RereadPlace<Work>& at, uint32_t i,
                                     const float (&factor)[Work::kRows],
                                     const tile::Vec<typename Work::W, Work::N>& w) {
  using X = typename Work::X;
  constexpr int N = Work::N;
  RereadVectors<Work> read[Work::kRows];
#pragma unroll
  for (int r = 0; r < Work::kRows; ++r)
    if (at.row(r) < p.rows) read[r].template load<true>(p, at.row(r), i);
  float slope[N];
  tile::to_float(w, slope);
#pragma unroll
  for (int k = 0; k < N; ++k) slope[k] = p.w != nullptr ? slope[k] + p.w_offset : 1.f;
#pragma unroll
  for (int r = 0; r < Work::kRows; ++r) {
    if (at.row(r) >= p.rows) continue;
    float s[N];
    read[r].values(s);
    if constexpr (Work::kResidual)
      tile::store(static_cast<X*>(p.sum) + at.row(r) * p.sum_stride + int64_t(i) * N, tile::from_float<X>(s), false);
#pragma unroll
    for (int k = 0; k < N; ++k) s[k] = s[k] * factor[r] * slope[k];
    tile::store(static_cast<X*>(p.y) + at.row(r) * p.y_stride + int64_t(i) * N, tile::from_float<X>(s), false);
  }
}

template <class Work> __device__ inline void reread_rows(const RereadParams& p, RereadMemory& memory) {
  const RereadPlace<Work> at(p);
  float factor[Work::kRows];
  sum_squares(p, at, factor);
  sum_over_group(p.group, memory, factor);
#pragma unroll
  for (int r = 0; r < Work::kRows; ++r) {
    const float rstd = __frsqrt_rn(__fdiv_rn(factor[r], p.cols) + p.eps);
    if (p.rstd != nullptr && at.lane == 0 && at.row(r) < p.rows) p.rstd[at.row(r)] = rstd;
    factor[r] = rstd * p.scale;
  }
  tile::Vec<typename Work::W, Work::N> w[Work::kVecs];  // asked for before anything is written
#pragma unroll
  for (int v = 0; v < Work::kVecs; ++v)
    if (const uint32_t i = at.lane + v * p.group; i < p.vecs && p.w != nullptr)
      tile::load(w[v], static_cast<const typename Work::W*>(p.w) + int64_t(i) * Work::N);
#pragma unroll
  for (int v = 0; v < Work::kVecs; ++v)
    if (const uint32_t i = at.lane + v * p.group; i < p.vecs) write_vectors(p, at, i, factor, w[v]);
}

}  // namespace ingot::cuda
