#pragma once
// The body of the few-rows form. A block takes 16 rows at a time through the whole network; warp w owns 16 columns of
// every layer and keeps their weights in registers, asked for all at once before anything else happens, so that one
// memory latency is paid for the network. Between layers the activations pass through a small tile of shared memory.
//
// Weights, x and activations are read 16 bytes a thread by a permutation of k that both operands of a product share:
// position 16 (2 s + t) + 8 h + 2 q + e of a product's k stands for feature 32 s + 8 q + 4 t + 2 h + e. Rows of the
// weights are permuted too, so that a thread's sums are four neighbouring columns.
#include <algorithm>
#include <cstdint>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/kernels/mlp/mlp_forward.cuh"

namespace ingot::cuda::few_rows {

using Params = MlpForwardParams;
constexpr int kTile = 16;     // rows of one product
constexpr int kMaxTiles = 4;  // that a block takes through a layer between two barriers

template <int kWidth> constexpr int threads() { return kWidth / 16 * 32; }

template <int kWidth> struct SharedMemory {
  alignas(16) uint32_t h[2][kMaxTiles * kTile * kWidth / 2];
  float bias[kMlpMaxLayers * kWidth];
};

// 16-byte chunk c of a row lies at chunk c ^ spread(row): readers take 4 chunks of 2 rows at once, writers 2 of 4.
__device__ inline uint32_t spread(uint32_t row) { return (row & 1) * 4 + (row & 2); }
template <int kWidth> __device__ inline uint32_t word_of(uint32_t row, uint32_t chunk) {
  return row * (kWidth / 2) + (chunk ^ spread(row)) * 4;
}

// This thread's part of one layer's weights: both column groups, step k / 16, two registers a step.
template <class T, int kWidth> struct Weights {
  WeightChunk<T> chunk[2][kWidth / 32];  // column group, then 32 of the k
  T g[2];

  __device__ __forceinline__ void load(const MlpLayerParams& layer) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t n = row(j), k = threadIdx.x % 4 * 8;
      if (layer.g != nullptr && n < layer.n) g[j] = static_cast<const T*>(layer.g)[n];
      const T* from = static_cast<const T*>(layer.w) + n * layer.k + k;
#pragma unroll
      for (int s = 0; s < kWidth / 32; ++s) {
        ptx::load_cached_or_zero(from + 32 * s, n < layer.n && 32 * s + k < layer.k, chunk[j][s].word[0]);
      }
    }
  }
  __device__ __forceinline__ void normalise(const MlpLayerParams& layer) {
    if (layer.g == nullptr) return;
    float sum[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float part[kWidth / 32];
#pragma unroll
      for (int s = 0; s < kWidth / 32; ++s) part[s] = squares(chunk[j][s]);
#pragma unroll
      for (int bit = kWidth / 64; bit > 0; bit /= 2)
#pragma unroll
        for (int s = 0; s < bit; ++s) part[s] += part[s + bit];
      sum[j] = part[0];
    }
    tile::warp_sum(sum, 4);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int s = 0; s < kWidth / 32; ++s)
        chunk[j][s] = scaled(chunk[j][s], tile::to_float(g[j]) * inverse_norm(sum[j]));
  }
  // B of step k / 16 for one column group.
  __device__ __forceinline__ void operand(uint32_t (&b)[2], int j, int step) const {
    b[0] = chunk[j][step / 2].word[0][step % 2 * 2];
    b[1] = chunk[j][step / 2].word[0][step % 2 * 2 + 1];
  }

 private:
  static __device__ uint32_t row(int j) {
    const uint32_t c = threadIdx.x % 32 / 4;
    return threadIdx.x / 32 * 16 + c / 2 * 4 + j * 2 + c % 2;
  }
};

// x of the block's tiles, rows beyond the last and columns beyond `in` as zeros.
template <int kWidth>
__device__ __forceinline__ void load_x(uint32_t* to, const Params& p, int64_t first_row, int tiles, int64_t tile_step) {
  constexpr uint32_t kChunks = kWidth / 8;
  for (uint32_t i = threadIdx.x; i < tiles * kTile * kChunks; i += threads<kWidth>()) {
    const uint32_t local = i / kChunks, chunk = i % kChunks;
    const int64_t row = first_row + local / kTile * tile_step + local % kTile;
    const bool there = row < p.rows && chunk * 8 < p.in();
    const char* from = static_cast<const char*>(p.x) + (there ? row * p.x_stride_bytes + chunk * 16 : 0);
    ptx::cp_async<16>(ptx::shared_address(to + word_of<kWidth>(local, chunk)), from, there ? 16 : 0);
  }
  ptx::cp_async_commit_group();
}

// d: rows g and g + 8 of the tile, this thread's four columns, = h W^T.
template <class T, int kWidth>
__device__ __forceinline__ void multiply(float (&d)[2][4], const uint32_t* h, const Weights<T, kWidth>& w) {
  const uint32_t g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  float part[2][2][4] = {};  // column group, parity of the step: four chains, as each product takes long
#pragma unroll
  for (int s = 0; s < kWidth / 32; ++s) {
    const uint4 low = *reinterpret_cast<const uint4*>(h + word_of<kWidth>(g, 4 * s + q));
    const uint4 high = *reinterpret_cast<const uint4*>(h + word_of<kWidth>(g + 8, 4 * s + q));
    const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t b[2];
        w.operand(b, j, 2 * s + t);
        ptx::mma_m16n8k16(T{}, part[j][t], a[t], b);
      }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) d[half][2 * j + e] = part[j][0][2 * half + e] + part[j][1][2 * half + e];
}

template <class T>
__device__ __forceinline__ void save(const Params& p, int l, const float (&v)[4], int64_t row, uint32_t column) {
  const MlpLayerParams& layer = p.layer[l];
  if (column >= layer.n) return;
  if (p.saved_f32) {
    const uint32_t w[4] = {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
    ptx::store_streaming(static_cast<float*>(layer.saved) + row * layer.n + column, w);
  } else {
    const uint32_t w[2] = {ptx::pack(T{}, v[0], v[1]), ptx::pack(T{}, v[2], v[3])};
    ptx::store_streaming(static_cast<T*>(layer.saved) + row * layer.n + column, w);
  }
}

// One layer of one tile: from h to next_h, or to y where the layer is the last.
template <class T, class F, int kWidth>
__device__ __forceinline__ void run_layer(const Params& p, int l, const Weights<T, kWidth>& w, const uint32_t* h,
                                          uint32_t* next_h, const float* bias, int64_t first_row) {
  const uint32_t g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, warp = threadIdx.x / 32;
  const uint32_t column = warp * 16 + q * 4;
  const bool last = l + 1 == p.layers;
  float d[2][4];
  multiply<T, kWidth>(d, h, w);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t local = g + 8 * half;
    const int64_t row = first_row + local;
    float(&v)[4] = d[half];
    if (p.has_bias) {
      const float4 b = *reinterpret_cast<const float4*>(bias + l * kWidth + column);
      v[0] += b.x, v[1] += b.y, v[2] += b.z, v[3] += b.w;
    }
    const bool saves = p.layer[l].saved != nullptr && row < p.rows;
    if (!last || p.activate_last) {
      if (!has_slope_from_value<F> && saves) save<T>(p, l, v, row, column);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = act_value<F, T>(v[i]);
      if (has_slope_from_value<F> && saves) save<T>(p, l, v, row, column);
    }
    const uint32_t packed[2] = {ptx::pack(T{}, v[0], v[1]), ptx::pack(T{}, v[2], v[3])};
    if (!last)
      *reinterpret_cast<uint2*>(next_h + word_of<kWidth>(local, warp * 2 + q / 2) + q % 2 * 2) =
          make_uint2(packed[0], packed[1]);
    else if (row < p.rows && column < p.out())
      ptx::store_streaming(static_cast<char*>(p.y) + row * p.y_stride_bytes + column * 2, packed);
  }
}

// kLayers: the most that this instance holds.
template <class T, class F, int kWidth, int kLayers>
__global__ void __launch_bounds__(threads<kWidth>(), 1) mlp_few_rows_kernel(const __grid_constant__ Params p) {
  __shared__ SharedMemory<kWidth> shared;
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const int64_t tiles = (p.rows + kTile - 1) / kTile, step = int64_t(gridDim.x) * kTile;
  const auto tiles_from = [&](int64_t tile) {
    const int64_t left = (tiles - tile + gridDim.x - 1) / gridDim.x;
    return left < kMaxTiles ? int(left) : kMaxTiles;
  };

  int64_t tile = blockIdx.x;
  int here = tiles_from(tile);
  load_x<kWidth>(shared.h[0], p, tile * kTile, here, step);
  Weights<T, kWidth> w[kLayers];
#pragma unroll
  for (int l = 0; l < kLayers; ++l)
    if (l < p.layers) w[l].load(p.layer[l]);
  if (p.has_bias)
    for (uint32_t i = threadIdx.x; i < uint32_t(p.layers) * kWidth; i += threads<kWidth>())
      shared.bias[i] = bias_element<T>(p.layer[i / kWidth], i % kWidth);
#pragma unroll
  for (int l = 0; l < kLayers; ++l)
    if (l < p.layers) w[l].normalise(p.layer[l]);

  while (true) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();
#pragma unroll
    for (int l = 0; l < kLayers; ++l) {
      if (l >= p.layers) break;
#pragma unroll 1
      for (int i = 0; i < here; ++i) {
        constexpr int kTileWords = kTile * kWidth / 2;
        run_layer<T, F, kWidth>(p, l, w[l], shared.h[l % 2] + i * kTileWords, shared.h[(l + 1) % 2] + i * kTileWords,
                                shared.bias, tile * kTile + i * step);
      }
      __syncthreads();
    }
    tile += int64_t(here) * gridDim.x;
    if (tile >= tiles) break;
    here = tiles_from(tile);
    load_x<kWidth>(shared.h[0], p, tile * kTile, here, step);
  }
}

template <class T, class F, int kWidth, int kLayers> void launch_as(const Params& p, int device, Stream stream) {
  const int64_t tiles = (p.rows + kTile - 1) / kTile;
  gpu::launch("mlp", mlp_few_rows_kernel<T, F, kWidth, kLayers>,
              {.grid = std::min<int64_t>(tiles, sm_count(device)),
               .block = threads<kWidth>(),
               .overlap = true,
               .device = device},
              stream, p);
}

}  // namespace ingot::cuda::few_rows

namespace ingot::cuda {

template <class T> void launch_mlp_few_rows(const Mlp& m, Stream stream) {
  if (m.x.rows() == 0) return;
  const MlpForwardParams p = mlp_forward_params(m);
  const int device = m.x.device.index;
  with_activation(m.act, [&](auto f) {
    using F = decltype(f);
    if (mlp_widest(m) <= 64)
      few_rows::launch_as<T, F, 64, 8>(p, device, stream);
    else
      few_rows::launch_as<T, F, 128, 6>(p, device, stream);
  });
}

}  // namespace ingot::cuda
