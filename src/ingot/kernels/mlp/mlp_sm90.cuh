#pragma once
// The body of the many-rows form, instantiated by mlp_sm90_f16.cu, mlp_sm90_f16_training.cu and so on.
// docs/mlp-megakernel.md tells it as a whole.
//
// One block per SM holds all weights in shared memory. Each of its warpgroups takes 64 rows through the whole network
// by itself: x from memory straight into the registers that wgmma reads A from, every layer's sums turned in place into
// the next layer's A, y from registers to memory. After the weights have arrived no barrier and no shared memory is in
// the way.
//
// What makes that possible is one permutation p of the features, used for the rows and columns of every weight matrix
// in shared memory: with it, the 8 features that a thread holds of a row in 4 adjacent column groups of an accumulator
// are adjacent in memory, 16 bytes. Column 32 i + 8 j + 2 q + e of a product (thread q of four, group j, element e)
// stands for feature 32 i + 8 q + 2 j + e.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/kernels/mlp/mlp_forward.cuh"

namespace ingot::cuda::mlp_sm90_detail {

using Params = MlpForwardParams;
using LayerParams = MlpLayerParams;

constexpr uint32_t kTileRows = 64;                // what one warpgroup takes at a time
constexpr uint32_t kMaxSharedBytes = 227 * 1024;  // of a block
template <int kWidth> constexpr int kMostLayers = kWidth == 64 ? kMlpMaxLayers : 6;

// The most warpgroups whose share of the register file holds a tile; some formulas take much of it.
template <class F, int kWidth> constexpr int most_warpgroups() {
  if (F::name == Gelu::name || (F::name == Sigmoid::name && kWidth == 128)) return 2;
  return kWidth == 64 ? 4 : 3;
}

template <int kWidth> constexpr uint32_t weight_bytes() { return kWidth * kWidth * 2; }
template <int kWidth> constexpr uint32_t panel_bytes() { return kWidth * 128; }  // 64 of the columns
// Weights, then x of every warpgroup, then the biases.
template <int kWidth> constexpr uint32_t shared_bytes(int layers, int groups) {
  return uint32_t(layers) * (weight_bytes<kWidth>() + kWidth * uint32_t(sizeof(float))) +
         uint32_t(groups) * kTileRows * kWidth * 2;
}

// One warpgroup's 64 rows in the layout of A: step k / 16, then the four registers of a step.
template <int kWidth> using Rows = uint32_t[kWidth / 16][4];
template <int kWidth> using Sums = float[kWidth / 2];

// Where this thread's part of a (rows, cols) matrix lies: 16 bytes at column 32 i + 8 q of rows `row` and `row` + 8.
struct Place {
  int64_t row;
  uint32_t q;
};
__device__ inline Place place_in(uint32_t tile) {
  const uint32_t thread = threadIdx.x % 128;
  return {int64_t(tile) * kTileRows + thread / 32 * 16 + thread % 32 / 4, thread % 4};
}

// x of a warpgroup's next tile on its way. Every thread copies to shared memory what it will itself read from there, so
// its own wait suffices; held in registers instead, x would leave too few of them.
template <int kWidth> struct ArrivingRows {
  static constexpr uint32_t kBytes = kTileRows * kWidth * 2, kStep = 128 * 16;
  char* mine;  // the thread's first 16 bytes; the next are kStep further

  __device__ __forceinline__ void load(const Params& p, Place at) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = at.row + 8 * half;
      const char* from = static_cast<const char*>(p.x) + row * p.x_stride_bytes + at.q * 16;
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i)
        ptx::cp_async<16>(ptx::shared_address(mine) + (half * (kWidth / 32) + i) * kStep, from + 64 * i,
                          row < p.rows && 32 * i + 8 * at.q < p.in() ? 16 : 0);
    }
    ptx::cp_async_commit_group();
  }
  __device__ __forceinline__ void take(Rows<kWidth>& a) const {
    ptx::cp_async_wait_group<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kWidth / 32; ++i) {
        const uint4 w = *reinterpret_cast<const uint4*>(mine + (half * (kWidth / 32) + i) * kStep);
        a[2 * i][half] = w.x, a[2 * i][2 + half] = w.y, a[2 * i + 1][half] = w.z, a[2 * i + 1][2 + half] = w.w;
      }
  }
};

// The 16-bit words of column block i in one row, as they lie in memory.
template <int kWidth>
__device__ __forceinline__ void words_of(uint32_t (&w)[4], const Rows<kWidth>& a, int i, int half) {
#pragma unroll
  for (int j = 0; j < 4; ++j) w[j] = a[2 * i + j / 2][2 * (j % 2) + half];
}

template <int kWidth> __device__ __forceinline__ void store_rows(const Rows<kWidth>& a, const Params& p, Place at) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = at.row + 8 * half;
    if (row >= p.rows) continue;
    char* line = static_cast<char*>(p.y) + row * p.y_stride_bytes + at.q * 16;
#pragma unroll
    for (int i = 0; i < kWidth / 32; ++i) {
      uint32_t w[4];
      words_of<kWidth>(w, a, i, half);
      if (32 * i + 8 * at.q < p.out()) ptx::store_streaming(line + 64 * i, w);
    }
  }
}

// The weights of one layer, in flight from memory: 16 bytes of a row a thread, a row in kWidth / 8 neighbouring lanes.
template <class T, int kWidth, int kThreads> struct WeightPieces {
  static constexpr int kRowLanes = kWidth / 8;
  static constexpr int kRowsAtOnce = kThreads / kRowLanes;
  static constexpr int kSteps = (kWidth + kRowsAtOnce - 1) / kRowsAtOnce;
  WeightChunk<T> chunk[kSteps];
  T g[kSteps];

  __device__ __forceinline__ void load(const LayerParams& layer) {
    const uint32_t piece = threadIdx.x % kRowLanes;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32_t n = threadIdx.x / kRowLanes + s * kRowsAtOnce;
      ptx::load_cached_or_zero(static_cast<const T*>(layer.w) + n * layer.k + piece * 8,
                               n < layer.n && piece * 8 < layer.k, chunk[s].word[0]);
      if (layer.g != nullptr && n < layer.n) g[s] = static_cast<const T*>(layer.g)[n];
    }
  }

  // Every chunk becomes that of W; all rows' sums at once, as each step of a sum takes long.
  __device__ __forceinline__ void normalise() {
    float sum[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) sum[s] = squares(chunk[s]);
    tile::warp_sum(sum, kRowLanes);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) chunk[s] = scaled(chunk[s], tile::to_float(g[s]) * inverse_norm(sum[s]));
  }

  // Rows and columns go where the permutation puts them, in panels of 64 columns swizzled by 128 bytes.
  __device__ __forceinline__ void store(const LayerParams& layer, char* weights) {
    const uint32_t piece = threadIdx.x % kRowLanes, i = piece / 4, q = piece % 4;
    if (layer.g != nullptr) normalise();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32_t n = threadIdx.x / kRowLanes + s * kRowsAtOnce;
      if (n >= kWidth) continue;
      const uint32_t row = n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t byte = i % 2 * 64 + j * 16 + q * 4;
        *reinterpret_cast<uint32_t*>(weights + i / 2 * panel_bytes<kWidth>() +
                                     tile::swizzled<tile::Swizzle::b128>(row, byte)) = chunk[s].word[0][j];
      }
    }
  }
};

template <class T, int kWidth, int kThreads>
__device__ __forceinline__ void load_network(const Params& p, char* weights, float* bias) {
  WeightPieces<T, kWidth, kThreads> even, odd;  // two layers in flight
  even.load(p.layer[0]);
  for (int l = 0; l < p.layers; l += 2) {
    if (l + 1 < p.layers) odd.load(p.layer[l + 1]);
    even.store(p.layer[l], weights + l * weight_bytes<kWidth>());
    if (l + 2 < p.layers) even.load(p.layer[l + 2]);
    if (l + 1 < p.layers) odd.store(p.layer[l + 1], weights + (l + 1) * weight_bytes<kWidth>());
  }
  if (!p.has_bias) return;
  for (uint32_t i = threadIdx.x; i < uint32_t(p.layers) * kWidth; i += kThreads) {
    const LayerParams& layer = p.layer[i / kWidth];
    const uint32_t n = i % kWidth;
    bias[i] = bias_element<T>(layer, n);
  }
}

template <int kWidth> __device__ __forceinline__ void start_from_bias(Sums<kWidth>& d, const float* bias) {
  const float* from = bias + threadIdx.x % 4 * 8;
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 b = *reinterpret_cast<const float2*>(from + 32 * i + 2 * j);
      d[4 * (4 * i + j)] = d[4 * (4 * i + j) + 2] = b.x;
      d[4 * (4 * i + j) + 1] = d[4 * (4 * i + j) + 3] = b.y;
    }
}

// d = a W^T (+ bias), issued and not waited for.
template <class T, int kWidth>
__device__ __forceinline__ void multiply(Sums<kWidth>& d, const Rows<kWidth>& a, uint64_t weights, bool accumulate) {
  using tile::Swizzle;
  ptx::fence_registers(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k)
    ptx::wgmma<T, kWidth>(d, a[k],
                          weights + tile::descriptor_step<tile::Major::k, Swizzle::b128>(16 * k, panel_bytes<kWidth>()),
                          k > 0 || accumulate);
  ptx::wgmma_commit_group();
}
template <int kWidth> __device__ __forceinline__ void wait(Sums<kWidth>& d, Rows<kWidth>& a) {
  ptx::wgmma_wait_group<0>();
  ptx::fence_registers(d);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) ptx::fence_registers(a[k]);
}

// Column block i of the sums to 16 bits, in the layout of A.
template <class T, int kWidth>
__device__ __forceinline__ void pack_block(Rows<kWidth>& a, const Sums<kWidth>& d, int i) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * (4 * i + j) + 2 * half;
      a[2 * i + j / 2][2 * (j % 2) + half] = ptx::pack(T{}, d[at], d[at + 1]);
    }
}

// Where what backward needs of a layer goes: the thread's two rows, or null beyond the last row.
struct SavedRows {
  char* line[2];
  uint32_t cols;

  __device__ __forceinline__ SavedRows(const Params& p, int l, Place at) : cols(p.layer[l].n) {
    const int64_t shift = p.saved_f32 ? 2 : 1, bytes = int64_t(cols) << shift;
    char* const first = static_cast<char*>(p.layer[l].saved) + at.row * bytes + (at.q * 8 << shift);
    line[0] = at.row < p.rows ? first : nullptr;
    line[1] = at.row + 8 < p.rows ? first + 8 * bytes : nullptr;
  }
  // Column block i, from the sums or, in 16 bits, from the layout of A.
  template <int kWidth>
  __device__ __forceinline__ void store(const Rows<kWidth>& a, const Sums<kWidth>& d, bool f32, int i,
                                        uint32_t q) const {
    if (32 * i + 8 * q >= cols) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (line[half] == nullptr) continue;
      uint32_t w[4];
      if (!f32) {
        words_of<kWidth>(w, a, i, half);
        ptx::store_streaming(line[half] + 64 * i, w);
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const int from = 4 * (4 * i + j) + 2 * half;
        w[0] = __float_as_uint(d[from]), w[1] = __float_as_uint(d[from + 1]);
        w[2] = __float_as_uint(d[from + 4]), w[3] = __float_as_uint(d[from + 5]);
        ptx::store_streaming(line[half] + 128 * i + 8 * j, w);
      }
    }
  }
};

template <class T, class F, int kWidth> __device__ __forceinline__ void activate_block(Sums<kWidth>& d, int i) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    d[16 * i + j] = act_value<F, T>(d[16 * i + j]);
    // Without this the compiler weaves the formulas of all elements into each other, and no registers are left.
    if constexpr (F::name == Gelu::name) asm volatile("" : "+f"(d[16 * i + j])::"memory");
  }
}

// Layer l's sums become its outputs, packed as the next layer's A.
template <class T, class F, int kWidth> __device__ __forceinline__ void activate(Sums<kWidth>& d, Rows<kWidth>& a) {
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i) {
    activate_block<T, F, kWidth>(d, i);
    pack_block<T, kWidth>(a, d, i);
  }
}
// The same, and what backward needs goes to memory.
template <class T, class F, int kWidth>
__device__ __forceinline__ void activate_and_save(Sums<kWidth>& d, Rows<kWidth>& a, const Params& p, int l, Place at) {
  const SavedRows saved(p, l, at);
#pragma unroll
  for (int i = 0; i < kWidth / 32; ++i) {
    if constexpr (!has_slope_from_value<F>) {
      pack_block<T, kWidth>(a, d, i);
      saved.store<kWidth>(a, d, p.saved_f32, i, at.q);
    }
    activate_block<T, F, kWidth>(d, i);
    pack_block<T, kWidth>(a, d, i);
    if constexpr (has_slope_from_value<F>) saved.store<kWidth>(a, d, p.saved_f32, i, at.q);
  }
}

template <class T, class F, int kWidth, int kGroups, bool kSave>
__global__ void __launch_bounds__(128 * kGroups, 1) mlp_sm90_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  char* const arriving = shared + p.layers * weight_bytes<kWidth>();
  float* const bias = reinterpret_cast<float*>(arriving + kGroups * ArrivingRows<kWidth>::kBytes);
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  // The same in all lanes, and known to be: the loop below must not diverge.
  const uint32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const uint32_t tiles = uint32_t((p.rows + kTileRows - 1) / kTileRows), step = gridDim.x * kGroups;
  uint32_t tile = blockIdx.x + gridDim.x * warpgroup;

  const ArrivingRows<kWidth> x{arriving + warpgroup * ArrivingRows<kWidth>::kBytes + threadIdx.x % 128 * 16};
  Rows<kWidth> a;
  x.load(p, place_in(tile));
  load_network<T, kWidth, 128 * kGroups>(p, shared, bias);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  const uint64_t weights = tile::operand_descriptor<tile::Major::k, tile::Swizzle::b128>(ptx::shared_address(shared));
  constexpr uint64_t kLayerStep = weight_bytes<kWidth>() >> 4;

  Sums<kWidth> d;
  const auto apply = [&](int l, Place at) {
    if constexpr (kSave)
      activate_and_save<T, F, kWidth>(d, a, p, l, at);
    else
      activate<T, F, kWidth>(d, a);
  };
  for (; tile < tiles; tile += step) {
    const Place at = place_in(tile);
    x.take(a);
    for (int l = 0;; ++l) {
      if (p.has_bias) start_from_bias<kWidth>(d, bias + l * kWidth);
      multiply<T, kWidth>(d, a, weights + l * kLayerStep, p.has_bias);
      wait<kWidth>(d, a);
      if (l == 0) x.load(p, place_in(tile + step));
      const bool last = l + 1 == p.layers;
      if (!last || p.activate_last)
        apply(l, at);
      else
#pragma unroll
        for (int i = 0; i < kWidth / 32; ++i) pack_block<T, kWidth>(a, d, i);
      if (last) break;
    }
    store_rows<kWidth>(a, p, at);
  }
}

template <class T, class F, int kWidth, bool kSave> void launch_as(const Params& p, int device, Stream stream) {
  const auto launch = [&](auto groups) {
    constexpr int kGroups = decltype(groups)::value;
    gpu::launch("mlp", mlp_sm90_kernel<T, F, kWidth, kGroups, kSave>,
                {.grid = std::min<int64_t>((p.rows + kTileRows - 1) / kTileRows, sm_count(device)),
                 .block = 128 * kGroups,
                 .smem = shared_bytes<kWidth>(p.layers, kGroups),
                 .overlap = true,
                 .device = device},
                stream, p);
  };
  constexpr int kMost = most_warpgroups<F, kWidth>();
  if constexpr (kMost > 2 && shared_bytes<kWidth>(kMostLayers<kWidth>, kMost) > kMaxSharedBytes)
    if (shared_bytes<kWidth>(p.layers, kMost) > kMaxSharedBytes) return launch(std::integral_constant<int, 2>());
  launch(std::integral_constant<int, kMost>());
}

}  // namespace ingot::cuda::mlp_sm90_detail

namespace ingot::cuda {

template <class T, bool kSave> void launch_mlp_sm90(const Mlp& m, Stream stream) {
  using namespace mlp_sm90_detail;
  if (m.x.rows() == 0) return;
  const MlpForwardParams p = mlp_forward_params(m);
  const int device = m.x.device.index;
  with_activation(m.act, [&](auto f) {
    using F = decltype(f);
    mlp_widest(m) <= 64 ? launch_as<T, F, 64, kSave>(p, device, stream)
                        : launch_as<T, F, 128, kSave>(p, device, stream);
  });
}

}  // namespace ingot::cuda
