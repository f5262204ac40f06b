#pragma once
// The gradients of all weights and biases: a block takes a square of one dW, over a part of the rows.
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"
#include "ingot/kernels/mlp/portable/elements.cuh"
#include "ingot/kernels/mlp/portable/portable.h"

namespace ingot::cuda {
namespace {

// Both operands of a stage: [rows][64] of dz and of the layer's input.
template <class T> constexpr int kGradRows = sizeof(T) == 2 ? 64 : 32;
template <class T> struct GradStage { T dz[kGradRows<T> * kGradTile], h[kGradRows<T> * kGradTile]; };
template <class T> struct GradMemory {
  GradStage<T> stage[kGradStages];
  float bias[4][kGradTile];
  bool last;
};
template <class T> __device__ inline int grad_at(int row, int col) {
  return sizeof(T) == 2 ? row * kGradTile + ((col / 8 ^ (row & 7)) * 8 + col % 8) : row * kGradTile + col;
}

template <class T> struct GradProduct {
  static constexpr int kPairs = 8;
  float acc[4][4];  // two tiles of 16 rows of dW by two of 8 columns per warp; warps 2 by 4
  __device__ static int n(int p) {
    return int(threadIdx.x / 128) * 32 + p / 4 * 16 + p % 2 * 8 + int(threadIdx.x % 32 / 4);
  }
  __device__ static int k(int p) { return int(threadIdx.x / 32 % 4) * 16 + p / 2 % 2 * 8 + int(threadIdx.x % 4) * 2; }
  __device__ float value(int p, int i) const { return acc[p / 2][p % 2 * 2 + i]; }
  __device__ void multiply(const GradStage<T>& stage) {
    const int lane = int(threadIdx.x % 32);
#pragma unroll
    for (int t = 0; t < kGradRows<T>; t += 16) {
      uint32_t a[2][4], b[4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        ptx::ldmatrix_trans(
            a[m], ptx::shared_address(stage.dz + grad_at<T>(t + lane / 16 * 8 + lane % 8,
                                                            int(threadIdx.x / 128) * 32 + m * 16 + lane / 8 % 2 * 8)));
      ptx::ldmatrix_trans(
          b, ptx::shared_address(stage.h + grad_at<T>(t + lane % 16, int(threadIdx.x / 32 % 4) * 16 + lane / 16 * 8)));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::mma_m16n8k16(T{}, acc[m * 2], a[m], {b[0], b[1]});
        ptx::mma_m16n8k16(T{}, acc[m * 2 + 1], a[m], {b[2], b[3]});
      }
    }
  }
};
template <> struct GradProduct<float> {
  static constexpr int kPairs = 8;
  float acc[4][4];
  __device__ static int n(int p) { return int(threadIdx.x / 16) * 4 + p / 2; }
  __device__ static int k(int p) { return int(threadIdx.x % 16) * 4 + p % 2 * 2; }
  __device__ float value(int p, int i) const { return acc[p / 2][p % 2 * 2 + i]; }
  __device__ void multiply(const GradStage<float>& stage) {
#pragma unroll 4
    for (int t = 0; t < kGradRows<float>; ++t) {
      const float4 a = *reinterpret_cast<const float4*>(stage.dz + t * kGradTile + n(0));
      const float4 b = *reinterpret_cast<const float4*>(stage.h + t * kGradTile + k(0));
      const float left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(left[i], right[j], acc[i][j]);
    }
  }
};

template <class T>
__device__ inline void load_grad_stage(const PortableGrad::Layer& l, int n0, int k0, int64_t row0, int64_t end,
                                       GradStage<T>& to) {
  constexpr int kChunks = kGradTile / kPer<T>;
  for (int i = int(threadIdx.x); i < kGradRows<T> * kChunks; i += kPortableThreads) {
    const int r = i / kChunks, c = i % kChunks * kPer<T>;
    const bool row_ok = row0 + r < end;
    const bool n_ok = row_ok && n0 + c < l.N, k_ok = row_ok && k0 + c < l.K;
    ptx::cp_async<16>(ptx::shared_address(to.dz + grad_at<T>(r, c)),
                      static_cast<const T*>(l.dz) + (n_ok ? (row0 + r) * l.dz_stride + n0 + c : 0), n_ok ? 16 : 0);
    ptx::cp_async<16>(ptx::shared_address(to.h + grad_at<T>(r, c)),
                      static_cast<const T*>(l.h) + (k_ok ? (row0 + r) * l.h_stride + k0 + c : 0), k_ok ? 16 : 0);
  }
}

// Sums of a block: its square of dW over its rows, and its part of db where the block owns this part. Every 128 or 64
// rows the running sum is added to a second sum, because short sums lose less to rounding.
template <class T> struct GradSums {
  float dw[GradProduct<T>::kPairs][2] = {};
  float db = 0;  // of column threadIdx.x % 64, every fourth row
};
template <class T>
__device__ inline void sum_rows(const PortableGrad& p, const PortableGrad::Layer& l, int n0, int k0, bool bias,
                                int64_t begin, int64_t end, GradMemory<T>& memory, GradSums<T>& sums) {
  const int64_t steps = (end - begin + kGradRows<T> - 1) / kGradRows<T>;
  const auto fetch = [&](int64_t s) {
    if (s < steps) load_grad_stage(l, n0, k0, begin + s * kGradRows<T>, end, memory.stage[s % kGradStages]);
    ptx::cp_async_commit_group();
  };
  for (int s = 0; s + 1 < kGradStages; ++s) fetch(s);
  GradProduct<T> product;
  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) product.acc[i][j] = 0;
  };
  clear();
  float db = 0;
  for (int64_t s = 0; s < steps; ++s) {
    ptx::cp_async_wait_group<kGradStages - 2>();
    __syncthreads();
    fetch(s + kGradStages - 1);
    const GradStage<T>& stage = memory.stage[s % kGradStages];
    product.multiply(stage);
    if (bias)
#pragma unroll 4
      for (int r = int(threadIdx.x / kGradTile); r < kGradRows<T>; r += kPortableThreads / kGradTile)
        db += tile::to_float(stage.dz[grad_at<T>(r, int(threadIdx.x % kGradTile))]);
    if (s % 2 == 0 && s + 1 < steps) continue;
    sums.db += db;
    db = 0;
#pragma unroll
    for (int i = 0; i < GradProduct<T>::kPairs; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) sums.dw[i][j] += product.value(i, j);
    clear();
  }
}

// True in the last of `count` blocks to arrive; the earlier writes of all blocks are visible to this block.
__device__ inline bool last_to_arrive(uint32_t* counter, int count, bool& shared_flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared_flag = atomicAdd(counter, 1u) == uint32_t(count - 1);
  __syncthreads();
  const bool last = shared_flag;
  __threadfence();
  return last;
}

// Adds the four partial sums of a bias' 64 columns in order, in the first 64 threads.
__device__ inline float sum_bias(float mine, float (&memory)[4][kGradTile]) {
  memory[threadIdx.x / kGradTile][threadIdx.x % kGradTile] = mine;
  __syncthreads();
  float sum = 0;
  if (threadIdx.x < kGradTile)
    for (int q = 0; q < 4; ++q) sum += memory[q][threadIdx.x];
  return sum;
}

// dv and dg of 64 rows of a weight from the whole dW, a warp per row.
template <class T> __device__ inline void weight_norm_rows(const PortableGrad::Layer& l, int n0) {
  for (int n = n0 + int(threadIdx.x / 32); n < min(n0 + kGradTile, l.N); n += kPortableThreads / 32) {
    const T* v = static_cast<const T*>(l.v) + int64_t(n) * l.K;
    const float* dw = l.whole + int64_t(n) * l.K;
    const float r = weight_inverse_norm(v, l.K);
    float along[1] = {};
    for (int k = int(threadIdx.x % 32); k < l.K; k += 32)
      along[0] = fmaf(__ldcg(dw + k), tile::to_float(v[k]), along[0]);
    tile::warp_sum(along, 32);
    along[0] *= r;
    const float scale = tile::to_float(static_cast<const T*>(l.g)[n]) * r, back = along[0] * r;
    if (l.dg != nullptr && threadIdx.x % 32 == 0) l.dg[n] += along[0];
    if (l.dw == nullptr) continue;
    for (int k = int(threadIdx.x % 32); k < l.K; k += 32)
      l.dw[int64_t(n) * l.K + k] += scale * (__ldcg(dw + k) - back * tile::to_float(v[k]));
  }
}

template <class T>
__global__ void __launch_bounds__(kPortableThreads, kPortableBlocks)
    mlp_portable_grad(const __grid_constant__ PortableGrad p) {
  GradMemory<T>& memory = *tile::dynamic_shared<GradMemory<T>>();
  const int tile = int(blockIdx.x) / p.splits, split = int(blockIdx.x) % p.splits;
  int index = 0;
  while (index + 1 < p.depth && tile >= p.layer[index + 1].first_tile) ++index;
  const PortableGrad::Layer& l = p.layer[index];
  const int across = (l.K + kGradTile - 1) / kGradTile, local = tile - l.first_tile;
  const int n0 = local / across * kGradTile, k0 = local % across * kGradTile, block = l.first_block + local / across;
  const bool normed = l.whole != nullptr, weight = l.dw != nullptr || l.dg != nullptr;
  const bool bias = l.db != nullptr && k0 == 0;
  if (!weight && !bias) return;

  GradSums<T> sums;
  const int64_t begin = split * p.rows_per_split, end = min(p.rows, begin + p.rows_per_split);
  sum_rows<T>(p, l, n0, k0, bias, begin, end, memory, sums);
  float db = bias ? sum_bias(sums.db, memory.bias) : 0;
  constexpr int kPairs = GradProduct<T>::kPairs;
  if (p.splits > 1) {
    // (tile, split, pair, thread): the last block's threads find the sums of their own elements.
    float2* partial = reinterpret_cast<float2*>(p.partial) + int64_t(tile) * p.splits * kPairs * kPortableThreads;
    float* bias_partial = p.bias_partial + int64_t(block) * p.splits * kGradTile;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      partial[(int64_t(split) * kPairs + i) * kPortableThreads + threadIdx.x] =
          make_float2(sums.dw[i][0], sums.dw[i][1]);
    if (bias && threadIdx.x < kGradTile) bias_partial[split * kGradTile + threadIdx.x] = db;
    if (!last_to_arrive(p.tile_counter + tile, p.splits, memory.last)) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) sums.dw[i][0] = sums.dw[i][1] = 0;
    db = 0;
    for (int s = 0; s < p.splits; ++s) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 v = __ldcg(partial + (int64_t(s) * kPairs + i) * kPortableThreads + threadIdx.x);
        sums.dw[i][0] += v.x, sums.dw[i][1] += v.y;
      }
      if (bias && threadIdx.x < kGradTile) db += __ldcg(bias_partial + s * kGradTile + threadIdx.x);
    }
  }
  if (bias && threadIdx.x < kGradTile && n0 + int(threadIdx.x) < l.N) l.db[n0 + threadIdx.x] += db;
  if (!weight) return;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int n = n0 + GradProduct<T>::n(i), k = k0 + GradProduct<T>::k(i);
    if (n >= l.N || k >= l.K) continue;
    float2* at = reinterpret_cast<float2*>((normed ? l.whole : l.dw) + int64_t(n) * l.K + k);
    const float2 before = normed ? make_float2(0, 0) : *at;
    *at = make_float2(before.x + sums.dw[i][0], before.y + sums.dw[i][1]);
  }
  if (normed && last_to_arrive(p.block_counter + block, across, memory.last)) weight_norm_rows<T>(l, n0);
}

}  // namespace
}  // namespace ingot::cuda
