#pragma once
// The forward variant up to 128 wide for few rows, where only latency counts. A block takes kRows rows through the
// whole network. It requests all weights at once, and starts when the first layer's have arrived. Products are
// transposed, features by rows, so that few rows fill the tensor cores; between layers the activations lie in shared
// memory.
#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/mlp/parts/forward_params.h"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"
#include "ingot/kernels/mlp/to_128/few_rows_maps.h"
#include "ingot/kernels/mlp/to_128/few_rows_tile.cuh"

namespace ingot::cuda::to_128_few_rows {

struct Params {
  MlpForwardParams network;
  int stages;
};
template <int kPanels, int kRows, bool kSavesArgument> struct Memory {
  static constexpr int kWidth = kPanel * kPanels;
  using Tile = uint8_t[kPanels][kRows * 128];
  struct Stage {
    uint8_t w[kPanels][kWidth * 128];  // panels of inputs
  };
  uint64_t full[kMlpMaxLayers], normed[kMlpMaxLayers], x_full, formed, stored;
  float bias[kMlpMaxLayers][kWidth], gain[kMlpMaxLayers][kWidth];
  alignas(1024) Tile h[2];
  Tile z[kSavesArgument ? 2 : 1];  // before the activation
  alignas(1024) Stage stage[1];    // more follow: a stage per layer, or as many as fit
};

// An element of the bias: zero without a bias, and beyond the last column.
template <class T> __device__ __forceinline__ float bias_element(const MlpLayerParams& layer, uint32_t n) {
  return layer.b != nullptr && n < layer.n ? tile::to_float(static_cast<const T*>(layer.b)[n]) : 0.f;
}

// kNorm: with weight norm. A separate instance, because its warps and code would cost networks without weight norm
// registers and time.
template <class T, class F, int kPanels, int kRows, bool kNorm> struct Block {
  static constexpr bool kSavesArgument = !has_slope_from_value<F>;
  using Shared = Memory<kPanels, kRows, kSavesArgument>;
  static constexpr int kWidth = Shared::kWidth, kWarps = 4 * kPanels;
  static constexpr int kSums = kRows / 2;  // a thread's: features `feature` and + 8, two rows of every 8

  Shared& s;
  const Maps& maps;
  const Params& a;
  const MlpForwardParams& p = a.network;
  const uint32_t warp = warp_of_block(), lane = threadIdx.x % 32;
  const int64_t row = int64_t(blockIdx.x) * kRows;
  const uint32_t feature = warp * 16 + lane / 4;
  const uint32_t fragment = tile_fragment<kRows>(warp, lane);

  __device__ void load(int l) {
    const int slot = l % a.stages;
    load_tile(s.stage[slot].w, maps.w[l], 0, &s.full[slot]);
  }
  // Role::copy. Each function is called by a single thread.
  __device__ void start_loading() {
    load_tile(s.h[0], maps.x, int(row), &s.x_full);
    for (int l = 0; l < a.stages && l < p.layers; ++l) load(l);
  }
  __device__ void store_and_reload() {
    for (int l = 0; l < p.layers; ++l) {
      tile::wait_or_trap(&s.formed, l & 1);
      const auto& h = s.h[(l + 1) & 1];
      if (p.layer[l].saved != nullptr && !p.saved_f32) {
        if constexpr (kSavesArgument)
          store_tile(maps.saved[l], int(row), s.z[l & 1]);
        else
          store_tile(maps.saved[l], int(row), h);
      }
      if (l + 1 == p.layers) store_tile(maps.y, int(row), h);
      ptx::bulk_commit_group();
      if (l + a.stages < p.layers) load(l + a.stages);
      ptx::bulk_wait_group_read<0>();
      ptx::mbarrier_arrive(&s.stored);
    }
    ptx::bulk_wait_group<0>();
  }
  // Called by a single thread.
  __device__ void prepare() {
    for (uint64_t& full : s.full) ptx::mbarrier_init(&full, 1);
    if constexpr (kNorm)
      for (uint64_t& normed : s.normed) ptx::mbarrier_init(&normed, kNormArrivals<kPanels>);
    ptx::mbarrier_init(&s.x_full, 1);
    ptx::mbarrier_init(&s.formed, kWarps);
    ptx::mbarrier_init(&s.stored, 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&maps.x);
    ptx::prefetch_tensor_map(&maps.y);
    for (int l = 0; l < p.layers; ++l) {
      ptx::prefetch_tensor_map(&maps.w[l]);
      if (p.layer[l].saved != nullptr && !p.saved_f32) ptx::prefetch_tensor_map(&maps.saved[l]);
    }
  }
  __device__ void load_vectors() {
    for (uint32_t i = threadIdx.x; i < uint32_t(p.layers) * kWidth; i += blockDim.x) {
      const MlpLayerParams& layer = p.layer[i / kWidth];
      const uint32_t n = i % kWidth;
      s.bias[i / kWidth][n] = bias_element<T>(layer, n);
      s.gain[i / kWidth][n] =
          layer.g != nullptr && n < layer.n ? tile::to_float(static_cast<const T*>(layer.g)[n]) : 0.f;
    }
    __syncthreads();
  }

  // Starts sums = W h^T of this warpgroup's 64 features.
  __device__ __forceinline__ void multiply(float (&sums)[kSums], uint32_t w, uint32_t h) {
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t k = 0; k < kWidth; k += 16)
      ptx::wgmma<T, kRows, Major::k, Major::k>(
          sums, operand<Major::k, Swizzle::b128>(w + warp / 4 * 64 * 128, k, kWidth * 128),
          operand<Major::k, Swizzle::b128>(h, k, kRows * 128), k > 0);
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void add_bias(float (&sums)[kSums], int l) {
    const float bias[2] = {s.bias[l][feature], s.bias[l][feature + 8]};
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] += bias[i / 2 % 2];
  }
  __device__ __forceinline__ void save_f32(const float (&v)[kSums], int l) {
    const MlpLayerParams& layer = p.layer[l];
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const uint32_t n = feature + i / 2 % 2 * 8;
      const int64_t t = row + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (n < layer.n && t < p.rows) static_cast<float*>(layer.saved)[t * layer.n + n] = v[i];
    }
  }
  __device__ __forceinline__ void put(const float (&sums)[kSums], uint32_t to) {
#pragma unroll
    for (int j = 0; j < kRows / 16; ++j) {
      uint32_t v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = ptx::pack(T{}, sums[8 * j + 2 * i], sums[8 * j + 2 * i + 1]);
      ptx::stmatrix_trans(to + fragment + j * 16 * 128, v);
    }
  }

  __device__ __forceinline__ void run(int l) {
    const int slot = l % a.stages;
    const MlpLayerParams& layer = p.layer[l];
    const bool active = l + 1 < p.layers || p.activate_last, saves = layer.saved != nullptr;
    const uint32_t w = ptx::shared_address(s.stage[slot].w);
    const bool norms = kNorm && layer.g != nullptr;
    if (l == 0 && norms) {  // no earlier work
      wait_warp_or_trap(&s.full[0], 0);
      normalise<T, kPanels>(w, s.gain[0], &s.normed[0], warp, kWarps);
    }
    wait_warp_or_trap(norms ? &s.normed[slot] : &s.full[slot], l / a.stages & 1);
    wait_warp_or_trap(l > 0 ? &s.formed : &s.x_full, l > 0 ? (l - 1) & 1 : 0);
    float sums[kSums];
    multiply(sums, w, ptx::shared_address(s.h[l & 1]));
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(sums);
    if (p.has_bias) add_bias(sums, l);
    if (active) {
      if constexpr (kSavesArgument)
        if (saves) p.saved_f32 ? save_f32(sums, l) : put(sums, ptx::shared_address(s.z[l & 1]));
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = act_value<F, T>(sums[i], p.number);
      if constexpr (!kSavesArgument)
        if (saves && p.saved_f32) save_f32(sums, l);
    }
    put(sums, ptx::shared_address(s.h[(l + 1) & 1]));
    ptx::fence_proxy_async_shared();
    if (l > 0)
      wait_warp_or_trap(&s.stored, (l - 1) & 1);  // the next layer overwrites data whose copy to memory began then
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&s.formed);
    __syncwarp();
  }
  // Role::form_weights: of normalised layers above the first.
  __device__ void form_weights() {
    for (int l = 1; l < p.layers; ++l) {
      if (p.layer[l].g == nullptr) continue;
      const int slot = l % a.stages;
      wait_warp_or_trap(&s.full[slot], l / a.stages & 1);
      normalise<T, kPanels>(ptx::shared_address(s.stage[slot].w), s.gain[l], &s.normed[slot], warp - kWarps - 1,
                            kFormers / 32);
    }
  }
};

template <class T, class F, int kPanels, int kRows, bool kNorm>
__global__ void __launch_bounds__(threads<kPanels>(kNorm), 1)
    mlp_to_128_few_rows_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Params a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  using This = Block<T, F, kPanels, kRows, kNorm>;
  This block{*reinterpret_cast<typename This::Shared*>(memory), maps, a};
  if (threadIdx.x == 0) block.prepare();
  __syncwarp();
  __syncthreads();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const Role role = role_of<kPanels>(block.warp);
  const bool copies = role == Role::copy && block.lane == 0;
  if (copies) block.start_loading();
  __syncwarp();
  if (kNorm || a.network.has_bias) block.load_vectors();
  if (role == Role::multiply)
    for (int l = 0; l < a.network.layers; ++l) block.run(l);
  else if (kNorm && role == Role::form_weights)
    block.form_weights();
  else if (copies)
    block.store_and_reload();
}

template <class T, class F, int kPanels, int kRows, bool kNorm> void launch_as(const Mlp& m, Stream stream) {
  using Shared = typename Block<T, F, kPanels, kRows, kNorm>::Shared;
  Params a{.network = mlp_forward_params(m)};
  const int64_t blocks = (m.x.rows() + kRows - 1) / kRows;
  // Few blocks, on up to about half of the SMs, are launched in clusters of eight. Such blocks lie side by side, so
  // that whole groups of SMs stay free for the clusters of a backward pass that starts next. The blocks of a cluster
  // share nothing, and blocks beyond the last row have no work.
  const int together = blocks <= 64 ? 8 : 1;
  const int64_t stage = sizeof(typename Shared::Stage), rest = sizeof(Shared) - stage;
  a.stages = int(std::min<int64_t>(a.network.layers, (kMlpSharedBytes - rest) / stage));
  gpu::launch("mlp", mlp_to_128_few_rows_kernel<T, F, kPanels, kRows, kNorm>,
              {.grid = (blocks + together - 1) / together * together,
               .block = threads<kPanels>(kNorm),
               .smem = rest + a.stages * stage,
               .cluster = together,
               .overlap = true,
               .device = m.x.device.index},
              stream, make_maps(m, a.network, kRows, kPanels), a);
}

}  // namespace ingot::cuda::to_128_few_rows

namespace ingot::cuda {

template <class T, bool kNorm> void launch_mlp_to_128_few_rows(const Mlp& m, Stream stream) {
  if (m.x.rows() == 0) return;
  with_formula(m.act, [&](auto f) {
    using F = decltype(f);
    const auto launch = [&](auto panels) {
      constexpr int kPanels = decltype(panels)::value;
      if (m.x.rows() <= to_128_few_rows::kFewest)
        return to_128_few_rows::launch_as<T, F, kPanels, 16, kNorm>(m, stream);
      to_128_few_rows::launch_as<T, F, kPanels, 32, kNorm>(m, stream);
    };
    if (mlp_panels(m) == 1) return launch(std::integral_constant<int, 1>());
    launch(std::integral_constant<int, 2>());
  });
}

}  // namespace ingot::cuda
