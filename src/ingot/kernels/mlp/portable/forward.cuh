#pragma once
// The forward pass: a block takes a tile of rows through all layers.
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/mlp/portable/elements.cuh"
#include "ingot/kernels/mlp/portable/portable.h"
#include "ingot/kernels/mlp/portable/product.cuh"
#include "ingot/kernels/mlp/portable/weights.cuh"

namespace ingot::cuda {
namespace {

// Starts to copy rows of a global matrix into shared memory, zeros beyond the last row and up to the next multiple of
// 16 columns; WeightStream::next() waits for the copies.
template <class T>
__device__ inline void load_rows(const void* from, int64_t from_stride, int width, int64_t row0, int64_t rows, T* to,
                                 int stride, int tile_rows) {
  const int chunks = (width + 15) / 16 * 16 / kPer<T>;
  for (int i = int(threadIdx.x); i < tile_rows * chunks; i += kPortableThreads) {
    const int r = i / chunks, c = i % chunks * kPer<T>;
    const bool inside = row0 + r < rows && c < width;
    ptx::cp_async<16>(ptx::shared_address(to + r * stride + c),
                      static_cast<const T*>(from) + (inside ? (row0 + r) * from_stride + c : 0), inside ? 16 : 0);
  }
  ptx::cp_async_commit_group();
}

__device__ inline bool active(const PortableRows& p, int l) { return p.activate_last || l + 1 < p.depth; }

template <class T>
__device__ inline void store_saved(const PortableRows& p, const PortableLayer& l, int64_t row, int col, float a,
                                   float b) {
  const int64_t at = l.saved_at + row * l.N + col;
  if (p.saved_f32)
    store_pair(static_cast<float*>(p.saved) + at, a, b);
  else
    store_pair(static_cast<T*>(p.saved) + at, a, b);
}
template <class T>
__device__ inline void load_saved(const PortableRows& p, const PortableLayer& l, int64_t row, int col, float (&v)[2]) {
  const int64_t at = l.saved_at + row * l.N + col;
  if (p.saved_f32)
    load_pair(static_cast<const float*>(p.saved) + at, v);
  else
    load_pair(static_cast<const T*>(p.saved) + at, v);
}

// 128 columns of a layer: bias, activation, the values saved for backward, and the place of the result.
template <class T, int kRows>
__device__ inline void finish_forward(const PortableRows& p, int l, int out0, int64_t row0, const float* scales,
                                      Product<T, kRows>& sum, T* h, bool to_y) {
  const PortableLayer& layer = p.layer[l];
  constexpr int kPairs = Product<T, kRows>::kPairs;
  const bool saves = p.saved != nullptr && active(p, l);
  const auto each_inside = [&](auto&& use) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int col = out0 + sum.col(i);
      const int64_t row = row0 + sum.row(i);
      if (col < layer.N && row < p.rows) use(row, col, sum.value(i, 0), sum.value(i, 1));
    }
  };
  if (layer.g != nullptr) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int n = min(out0 + sum.col(i), layer.N - 2);
      sum.value(i, 0) *= scales[layer.scale_at + n], sum.value(i, 1) *= scales[layer.scale_at + n + 1];
    }
  }
  if (layer.b != nullptr) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int col = out0 + sum.col(i);
      if (col >= layer.N) continue;
      float b[2];
      load_pair(static_cast<const T*>(layer.b) + col, b);
      sum.value(i, 0) += b[0], sum.value(i, 1) += b[1];
    }
  }
  if (saves && !p.saves_value)
    each_inside([&](int64_t row, int col, float a, float b) { store_saved<T>(p, layer, row, col, a, b); });
  if (active(p, l))
    with_act(p.act, [&](auto f) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) sum.value(i, j) = act_value<decltype(f), T>(sum.value(i, j));
    });
  if (saves && p.saves_value)
    each_inside([&](int64_t row, int col, float a, float b) { store_saved<T>(p, layer, row, col, a, b); });
  if (to_y)
    each_inside([&](int64_t row, int col, float a, float b) {
      store_pair(static_cast<T*>(p.y) + row * p.y_stride + col, a, b);
    });
  if (h == nullptr) return;
  const int padded = (layer.N + 15) / 16 * 16;
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    if (const int col = out0 + sum.col(i); col < padded)
      store_pair(h + sum.row(i) * p.stride + col, sum.value(i, 0), sum.value(i, 1));
}

// Layers 0 to depth - 1 of a tile, from x in buffer `turn`, to y or for `saved` alone.
template <class T, int kRows, int kRed, bool kToY, class Weights>
__device__ inline void forward_tile(const PortableRows& p, int depth, int64_t row0, const Smem<T, kRed>& smem, int turn,
                                    Weights& weights) {
  Product<T, kRows> sum;
  for (int l = 0; l < depth; ++l) {
    const PortableLayer& layer = p.layer[l];
    const bool last = l + 1 == depth;
    for (int out0 = 0; out0 < layer.N; out0 += kPortableOut) {
      sum.clear();
      for (int red0 = 0; red0 < layer.K; red0 += kRed)
        sum.template multiply<false, kRed>(smem.h(turn + l), p.stride, red0, min(kRed, layer.K - red0), weights.next());
      finish_forward<T, kRows>(p, l, out0, row0, smem.scales, sum, last ? nullptr : smem.h(turn + l + 1), kToY && last);
    }
  }
}

template <class T, int kRows, int kRed>
__global__ void __launch_bounds__(kPortableThreads, portable_blocks(kRows, int(sizeof(T))))
    mlp_portable_forward(const __grid_constant__ PortableRows p) {
  const Smem<T, kRed> smem(tile::dynamic_shared<T>(), p, kRows);
  const int tiles = int((p.rows + kRows - 1) / kRows);
  WeightStream<T, false, kRed, false> weights(p, smem.scales, smem.ring, 0, p.depth);
  form_scales<T>(p, smem.scales);
  int turn = 0;
  for (int tile = int(blockIdx.x); tile < tiles; tile += int(gridDim.x)) {
    // The copies go into the buffer that slower warps do not read: these may still compute the last layer of the
    // preceding tile.
    load_rows(p.x, p.x_stride, p.layer[0].K, int64_t(tile) * kRows, p.rows, smem.h(turn), p.stride, kRows);
    forward_tile<T, kRows, kRed, true>(p, p.depth, int64_t(tile) * kRows, smem, turn, weights);
    turn ^= p.depth & 1;
  }
  ptx::cp_async_wait_group<0>();  // waits for one more tile, which the stream has fetched and no product uses
}

}  // namespace
}  // namespace ingot::cuda
