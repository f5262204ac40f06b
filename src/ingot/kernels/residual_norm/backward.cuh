#pragma once
// The backward pass: a warp computes the gradients of a row at a time, and keeps the sums over tokens of its columns in
// registers until its last row.
#include <cstdint>

#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/residual/columns.cuh"
#include "ingot/kernels/residual_norm/row_vectors.cuh"

namespace ingot::cuda::residual_norm_kernels {

template <class T> struct BackwardParams {
  Rows<T> dy, m, dsum, x, x0, dx0, dx, more, branch, dbranch;
  Channels scale, a, b, dscale, da, db;
  const float* rstd;
  int64_t rows;
  int cols;
  float norm_scale;
  residual::Walk walk;  // of the sums
};

// Sums over tokens: da, db and dscale where present.
template <bool kMix, bool kBranch> struct AddSums {
  static constexpr int kSums = (kMix ? 2 : 0) + (kBranch ? 1 : 0);
  Channels da, db, dscale;
  __device__ void finish(int64_t c, const double* total) const {
    if constexpr (kMix) da.add(c, total[0]), db.add(c, total[1]);
    if constexpr (kBranch) dscale.add(c, total[kMix ? 2 : 0]);
  }
};

// The operand `more`: left out; or given beside dsum; or given without dsum, and then loaded in place of dsum.
enum class More { none, beside, alone };

// Stores the block's sums for each column: the sums of its warps, added in the order of the warps.
template <class Params, int kSums, int V>
__device__ inline void store_sums(const Params& p, const float (&sums)[kSums][V][kVector]) {
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  struct Memory {
    float of_warps[kWarps][V * 32 * kVector];
  };
  Memory& memory = tile::shared<Memory>();
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k = 0; k < kVector; ++k) memory.of_warps[warp][column_of(lane, v) + k] = sums[s][v][k];
    __syncthreads();
    for (int c = int(threadIdx.x); c < p.cols; c += kThreads) {
      float sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += memory.of_warps[w][c];
      p.walk.partial[(int64_t(blockIdx.x) * kSums + s) * p.cols + c] = sum;
    }
  }
}

// kFrozen: no sums over tokens are computed, and operands that only these sums and the gradient of the first rows need
// are not read.
template <class T, int V, bool kFactor, bool kBranch, bool kFrozen, More kMore>
__global__ void __launch_bounds__(kThreads) residual_norm_back(const __grid_constant__ BackwardParams<T> p) {
  constexpr bool kMix = kFactor && !kFrozen;
  constexpr int kSums = kFrozen ? 0 : AddSums<kMix, kBranch>::kSums, kHeld = kSums > 0 ? kSums : 1;
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  Factors<kBranch ? V : 1> scale;
  Factors<kFactor ? V : 1> a;
  Factors<kMix ? V : 1> b;
  if constexpr (kBranch) scale.load(p.scale, p.cols);
  if constexpr (kFactor) a.load(p.a, p.cols);
  if constexpr (kMix) b.load(p.b, p.cols);
  float sums[kHeld][V][kVector] = {};
  const int64_t apart = int64_t(gridDim.x) * kWarps;
  for (int64_t row = int64_t(blockIdx.x) * kWarps + warp; row < p.rows; row += apart) {
    tile::Vec<T, kVector> dy[V], m[V], dsum[V], x0[kMix ? V : 1], dx0[kMix ? V : 1], branch[kBranch ? V : 1];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = column_of(lane, v);
      if (c >= p.cols) continue;
      p.dy.load(row, c, dy[v]);
      (kMix ? p.x : p.m).load(row, c, m[v]);
      (kMore == More::alone ? p.more : p.dsum).load(row, c, dsum[v]);
      if constexpr (kMix) p.x0.load(row, c, x0[v]), p.dx0.load(row, c, dx0[v]);
      if constexpr (kBranch && !kFrozen) p.branch.load(row, c, branch[v]);
    }
    // Registers that hold `more` until its use would halve the number of blocks on a multiprocessor.
    if (kMore == More::beside && lane == 0)
      ptx::prefetch_to_l2(p.more.data + row * p.more.stride, uint32_t(p.cols * sizeof(T)));
    const float rstd = p.rstd[row];
    // The normalised input: stored, or mixed as in the forward pass.
    const auto normed = [&](int v, float(&n)[kVector]) {
      tile::to_float(m[v], n);
      if constexpr (kMix) {
        float first[kVector];
        tile::to_float(x0[v], first);
#pragma unroll
        for (int k = 0; k < kVector; ++k) n[k] = residual::mixed(a.of[v][k], n[k], b.of[v][k], first[k]);
        rounded<T>(n);
      }
#pragma unroll
      for (float& value : n) value *= rstd;
    };
    float along[1] = {0};
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float g[kVector], n[kVector];
      tile::to_float(dy[v], g);
      normed(v, n);
#pragma unroll
      for (int k = 0; k < kVector; ++k) along[0] += g[k] * n[k];
    }
    tile::warp_sum(along, 32);
    const float mean = along[0] * p.norm_scale / float(p.cols);
    // Stores the gradient of the branch, where d is the gradient of the sum, and adds to the sums for dscale.
    const auto store_branch = [&](int v, int c, float(&d)[kVector]) {
      if constexpr (!kFrozen) {
        float x[kVector];
        tile::to_float(branch[v], x);
#pragma unroll
        for (int k = 0; k < kVector; ++k) sums[kSums - 1][v][k] += x[k] * d[k];
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) d[k] *= scale.of[v][k];
      p.dbranch.store(row, c, tile::from_float<T>(d));
    };
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int c = column_of(lane, v);
      if (c >= p.cols) continue;
      float g[kVector], n[kVector], d[kVector] = {};
      tile::to_float(dy[v], g);
      if constexpr (kMore != More::alone) tile::to_float(dsum[v], d);
      normed(v, n);
#pragma unroll
      for (int k = 0; k < kVector; ++k) d[k] += rstd * (g[k] * p.norm_scale - n[k] * mean);
      auto dx = rounded<T>(d);
      if constexpr (kMix) {
        float x[kVector], first[kVector], more[kVector];
        tile::to_float(m[v], x), tile::to_float(x0[v], first), tile::to_float(dx0[v], more);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          sums[0][v][k] += x[k] * d[k];
          sums[1][v][k] += first[k] * d[k];
          more[k] += b.of[v][k] * d[k];
          d[k] *= a.of[v][k];
        }
        p.dx0.store(row, c, tile::from_float<T>(more));
        dx = rounded<T>(d);
      } else if constexpr (kFactor) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) d[k] *= a.of[v][k];
        dx = rounded<T>(d);
      }
      if constexpr (kMore != More::none) {
        if constexpr (kMore == More::beside) p.more.load(row, c, dsum[v]);
        float more[kVector];
        tile::to_float(dsum[v], more);
#pragma unroll
        for (int k = 0; k < kVector; ++k) d[k] += more[k];
        dx = tile::from_float<T>(d);
      }
      p.dx.store(row, c, dx);
      if constexpr (kBranch) store_branch(v, c, d);
    }
  }
  if constexpr (kSums > 0) store_sums(p, sums);
}

}  // namespace ingot::cuda::residual_norm_kernels
