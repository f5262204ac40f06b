#pragma once
// The chain of gradients: a block takes the gradients of a tile of rows from the last layer down to x.
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/mlp/portable/elements.cuh"
#include "ingot/kernels/mlp/portable/forward.cuh"
#include "ingot/kernels/mlp/portable/portable.h"
#include "ingot/kernels/mlp/portable/product.cuh"
#include "ingot/kernels/mlp/portable/weights.cuh"

namespace ingot::cuda {
namespace {

// Recomputes a layer's input from the saved values, where dW needs the input and memory has no copy in T.
template <class T, int kRows> __device__ inline void form_inputs(const PortableRows& p, int64_t row0) {
  for (int l = 1; l < p.depth; ++l) {
    if (p.layer[l].input == nullptr) continue;
    const PortableLayer& below = p.layer[l - 1];
    const int pairs = below.N / 2;
    with_act(p.act, [&](auto f) {
      for (int i = int(threadIdx.x); i < kRows * pairs; i += kPortableThreads) {
        const int64_t row = row0 + i / pairs;
        const int col = i % pairs * 2;
        if (row >= p.rows) break;
        float v[2];
        load_saved<T>(p, below, row, col, v);
        store_pair(static_cast<T*>(p.layer[l].input) + row * below.N + col, act_value_from_saved<decltype(f), T>(v[0]),
                   act_value_from_saved<decltype(f), T>(v[1]));
      }
    });
  }
}

// dz of the last layer into shared memory: dy, times the slope where the last layer is activated.
template <class T, int kRows> __device__ inline void first_gradient(const PortableRows& p, int64_t row0, T* d) {
  const PortableLayer& layer = p.layer[p.depth - 1];
  load_rows(p.dy, p.dy_stride, layer.N, row0, p.rows, d, p.stride, kRows);
  if (!p.activate_last) return;
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  const int pairs = layer.N / 2;
  with_act(p.act, [&](auto f) {
    for (int i = int(threadIdx.x); i < kRows * pairs; i += kPortableThreads) {
      const int64_t row = row0 + i / pairs;
      const int col = i % pairs * 2;
      if (row >= p.rows) break;
      float g[2], v[2];
      T* at = d + i / pairs * p.stride + col;
      load_pair(at, g);
      load_saved<T>(p, layer, row, col, v);
#pragma unroll
      for (int j = 0; j < 2; ++j) g[j] *= act_slope_from_saved<decltype(f), T>(v[j]);
      store_pair(at, g[0], g[1]);
      store_pair(static_cast<T*>(layer.dz) + row * layer.N + col, g[0], g[1]);
    }
  });
}

// 128 columns of dh = dz W: multiplied by the slope of the layer below and kept, or written as dx.
template <class T, int kRows>
__device__ inline void finish_backward(const PortableRows& p, int l, int out0, int64_t row0, Product<T, kRows>& sum,
                                       T* d) {
  constexpr int kPairs = Product<T, kRows>::kPairs;
  const int width = p.layer[l].K;
  if (l > 0) {
    const PortableLayer& below = p.layer[l - 1];
    with_act(p.act, [&](auto f) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int64_t row = row0 + sum.row(i);
        const int col = out0 + sum.col(i);
        if (row >= p.rows || col >= width) continue;
        float v[2];
        load_saved<T>(p, below, row, col, v);
#pragma unroll
        for (int j = 0; j < 2; ++j) sum.value(i, j) *= act_slope_from_saved<decltype(f), T>(v[j]);
      }
    });
  }
  T* out = static_cast<T*>(l > 0 ? p.layer[l - 1].dz : p.dx);
  const int64_t out_stride = l > 0 ? width : p.dx_stride;
  const int padded = (width + 15) / 16 * 16;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t row = row0 + sum.row(i);
    const int col = out0 + sum.col(i);
    if (row < p.rows && col < width) store_pair(out + row * out_stride + col, sum.value(i, 0), sum.value(i, 1));
    if (l > 0 && col < padded) store_pair(d + sum.row(i) * p.stride + col, sum.value(i, 0), sum.value(i, 1));
  }
}

template <class T, int kRows, int kRed>
__global__ void __launch_bounds__(kPortableThreads, portable_blocks(kRows, int(sizeof(T))))
    mlp_portable_chain(const __grid_constant__ PortableRows p) {
  const Smem<T, kRed> smem(tile::dynamic_shared<T>(), p, kRows);
  for (int i = int(blockIdx.x) * kPortableThreads + int(threadIdx.x); i < p.counter_count;
       i += int(gridDim.x) * kPortableThreads)
    p.counters[i] = 0;
  form_scales<T>(p, smem.scales);
  __syncthreads();
  // The products through layers depth - 1 to `lowest`; the last product gives dx where requested.
  const int lowest = p.dx != nullptr ? 0 : p.first + 1;
  for (int tile = int(blockIdx.x); int64_t(tile) * kRows < p.rows; tile += int(gridDim.x)) {
    const int64_t row0 = int64_t(tile) * kRows;
    if (p.recomputed > 0) {
      WeightStream<T, false, kRed> weights(p, smem.scales, smem.ring, 0, p.recomputed);
      load_rows(p.x, p.x_stride, p.layer[0].K, row0, p.rows, smem.h(0), p.stride, kRows);
      forward_tile<T, kRows, kRed, false>(p, p.recomputed, row0, smem, 0, weights);
      __syncthreads();  // threads read parts of `saved` written by different threads
    }
    form_inputs<T, kRows>(p, row0);
    WeightStream<T, true, kRed> weights(p, smem.scales, smem.ring, p.depth - 1, min(lowest, p.depth) - 1);
    first_gradient<T, kRows>(p, row0, smem.h(0));
    Product<T, kRows> sum;
    for (int l = p.depth - 1; l >= lowest; --l) {
      const int turn = p.depth - 1 - l;
      for (int out0 = 0; out0 < p.layer[l].K; out0 += kPortableOut) {
        sum.clear();
        for (int red0 = 0; red0 < p.layer[l].N; red0 += kRed)
          sum.template multiply<true, kRed>(smem.h(turn), p.stride, red0, min(kRed, p.layer[l].N - red0),
                                            weights.next());
        finish_backward<T, kRows>(p, l, out0, row0, sum, smem.h(turn + 1));
      }
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace ingot::cuda
