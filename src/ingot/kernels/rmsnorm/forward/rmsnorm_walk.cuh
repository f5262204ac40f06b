#pragma once
// The forward pass for fp32 rows too wide for the registers of an SM: persistent clusters of blocks walk over rows, and
// load the next row while the current row is summed and written. No residual, rows one stride apart.
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/rmsnorm/forward/rmsnorm_forward.h"
#include "ingot/kernels/rmsnorm/parts/row_ring.cuh"

namespace ingot::cuda {

class ForwardWalk {
 public:
  static constexpr int N = 4, V = kWalkVecs;
  using Vec = tile::Vec<float, N>;
  using Pieces = OwnPieces<V>;
  using Sums = tile::RoundSums<1>;

  __device__ explicit ForwardWalk(const LargeParams& p)
      : lane_(ptx::cluster_rank() * p.group + threadIdx.x),
        step_(p.cluster * p.group),
        row_(p.first_row + blockIdx.x / p.cluster),
        apart_(gridDim.x / p.cluster) {}

  __device__ void run(const LargeParams& p, Sums::Memory& memory, uint4* pieces) {
    Sums sums(memory, p.group, p.cluster);
    const Pieces ring(pieces);
    for (uint32_t k = 0; k < kWalkStages; ++k)  // columns beyond the row are never copied
#pragma unroll
      for (int v = 0; v < V; ++v)
        if (!has(p, v)) *ring.after(k)[v] = make_uint4(0, 0, 0, 0);
    ptx::cluster_arrive();  // no write to a neighbour before its barrier is ready
    ptx::cluster_wait();
    ptx::wait_for_earlier_kernels();
    int64_t ahead = row_;
    for (uint32_t k = 0; k < kWalkStages; ++k, ahead += apart_) fetch(p, ahead, ring.after(k));
    load_factors(p);
    uint32_t stage = 0;
    for (uint32_t round = 1; row_ < p.rows; ++round, row_ += apart_, ahead += apart_) {
      const Pieces here = ring.after(stage);
      ptx::cp_async_wait_group<kWalkStages - 1>();
      Vec x[V];
#pragma unroll
      for (int v = 0; v < V; ++v) read_vector(x[v], here[v]);
      fetch(p, ahead, here);  // the row is in registers by now
      float sum[1] = {squares(x)};
      sums(sum, 1, round);
      write(p, x, rstd_of(sum[0], p.cols, p.eps));
      stage = stage + 1 == kWalkStages ? 0 : stage + 1;
    }
  }

 private:
  __device__ uint32_t vector(int v) const { return lane_ + v * step_; }
  __device__ bool has(const LargeParams& p, int v) const { return vector(v) < p.vecs; }

  __device__ void fetch(const LargeParams& p, int64_t row, const Pieces& to) const {
    const float* x = static_cast<const float*>(p.x) + row * p.x_stride;
#pragma unroll
    for (int v = 0; v < V; ++v)
      if (row < p.rows && has(p, v)) ptx::cp_async_keeping(ptx::shared_address(to[v]), x + int64_t(vector(v)) * N);
    ptx::cp_async_commit_group();
  }

  // scale * (w_offset + w); w_offset is 1 where there is no w.
  __device__ void load_factors(const LargeParams& p) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      Vec w;
      if (p.w != nullptr && has(p, v)) tile::load(w, static_cast<const float*>(p.w) + int64_t(vector(v)) * N);
      tile::to_float(w, factor_[v]);
#pragma unroll
      for (int k = 0; k < N; ++k) factor_[v][k] = (factor_[v][k] + p.w_offset) * p.scale;
    }
  }

  __device__ static float squares(const Vec (&x)[V]) {
    float even = 0, odd = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float value[N];
      tile::to_float(x[v], value);
#pragma unroll
      for (int k = 0; k < N; k += 2) even += value[k] * value[k], odd += value[k + 1] * value[k + 1];
    }
    return even + odd;
  }

  __device__ void write(const LargeParams& p, const Vec (&x)[V], float rstd) const {
    if (p.rstd != nullptr && lane_ == 0) p.rstd[row_] = rstd;
    float* y = static_cast<float*>(p.y) + row_ * p.y_stride;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!has(p, v)) continue;
      float value[N];
      tile::to_float(x[v], value);
#pragma unroll
      for (int k = 0; k < N; ++k) value[k] = value[k] * rstd * factor_[v][k];
      tile::store(y + int64_t(vector(v)) * N, tile::from_float<float>(value), true);
    }
  }

  uint32_t lane_, step_;
  int64_t row_, apart_;
  float factor_[V][N];
};

__global__ void __launch_bounds__(kWalkThreads, 2) rmsnorm_walk(const __grid_constant__ LargeParams p) {
  auto& memory = tile::shared<ForwardWalk::Sums::Memory>();
  ptx::let_next_kernel_start();
  ForwardWalk(p).run(p, memory, tile::dynamic_shared<uint4>());
}

}  // namespace ingot::cuda
