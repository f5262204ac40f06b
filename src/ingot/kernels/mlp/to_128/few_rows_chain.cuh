#pragma once
// The chain of gradients of few rows:  dz_{l-1} = (dz_l W_l) . f'(z_{l-1})  from the top layer down, and dx. A block
// takes kRows rows through all layers. Products are transposed, (features x features) (features x kRows), so that few
// rows fill the tensor cores. A dz lies in shared memory row by row, in panels of 64 columns.
#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/mlp/parts/slopes.cuh"
#include "ingot/kernels/mlp/to_128/few_rows_backward.h"
#include "ingot/kernels/mlp/to_128/few_rows_tile.cuh"

namespace ingot::cuda::to_128_few_rows_backward {

using namespace to_128_few_rows;

template <int kPanels, int kRows> struct ChainMemory {
  static constexpr int kWidth = kPanel * kPanels;
  static constexpr uint32_t kTileBytes = kPanels * kRows * 128;
  struct Stage {
    uint8_t w[kPanels][kWidth * 128];  // panels of inputs
    uint8_t h[kPanels][kRows * 128];
  };
  uint64_t full[kMlpMaxLayers], normed[kMlpMaxLayers], dy_full, formed, stored;
  float gain[kMlpMaxLayers][kWidth];
  alignas(1024) uint8_t dz[2][kPanels][kRows * 128];
  Stage stage[1];  // more follow: a stage per layer, or as many as fit
};

template <class T, int kPanels, int kRows, bool kNorm> struct ChainBlock {
  using Memory = ChainMemory<kPanels, kRows>;
  static constexpr int kWidth = Memory::kWidth, kWarps = 4 * kPanels;
  static constexpr int kSums = kRows / 2;  // a thread's: two features, 8 apart, of two rows of every 8

  Memory& s;
  const MlpChainMaps& maps;
  const Chain& a;
  const uint32_t warp = warp_of_block(), lane = threadIdx.x % 32;
  const int row = int(blockIdx.x) * kRows;
  const uint32_t fragment = tile_fragment<kRows>(warp, lane);

  __device__ int layer_of(int step) const { return a.layers - 1 - step; }
  __device__ int steps() const { return a.layers - a.lowest; }

  // The operands of a step, except for the dz of the step before. The slowest to arrive are requested first.
  __device__ void load(int step) {
    const int l = layer_of(step), slot = step % a.stages;
    if (l > 0)
      load_tile(s.stage[slot].h, maps.h[l - 1], row, &s.full[slot]);
    else
      ptx::mbarrier_arrive(&s.full[slot]);
    load_tile(s.stage[slot].w, maps.w[l], 0, &s.full[slot]);
  }
  // Role::copy. Each function is called by a single thread.
  __device__ void start_loading() {
    load_tile(s.dz[0], maps.dy, row, &s.dy_full);
    if (a.activate_last)  // values that determine f'
      load_tile(s.dz[1], maps.h[a.layers - 1], row, &s.dy_full);
    else
      ptx::mbarrier_arrive(&s.dy_full);
    for (int step = 0; step < a.stages && step < steps(); ++step) load(step);
  }
  __device__ void store_and_reload() {
    if (a.activate_last && a.layer[a.layers - 1].keeps_dz) store_tile(maps.dz[a.layers - 1], row, s.dz[0]);
    ptx::bulk_commit_group();
    ptx::bulk_wait_group_read<0>();
    ptx::mbarrier_arrive(&s.stored);
    for (int step = 0; step < steps(); ++step) {
      const int l = layer_of(step);
      tile::wait_or_trap(&s.formed, step & 1);
      if (l == 0)
        store_tile(maps.dx, row, s.dz[(step + 1) & 1]);
      else if (a.layer[l - 1].keeps_dz)
        store_tile(maps.dz[l - 1], row, s.dz[(step + 1) & 1]);
      ptx::bulk_commit_group();
      if (step + a.stages < steps()) load(step + a.stages);
      ptx::bulk_wait_group_read<0>();
      ptx::mbarrier_arrive(&s.stored);
    }
    ptx::bulk_wait_group<0>();
  }

  // dz = dy . f' of the top layer, in place. Called by all threads.
  __device__ void apply_top_slope() {
    const uint32_t to = ptx::shared_address(s.dz[0]), h = ptx::shared_address(s.dz[1]);
    with_slope(
        a.act,
        [&](auto f) {
          for (uint32_t i = threadIdx.x * 16; i < Memory::kTileBytes; i += blockDim.x * 16) {
            uint32_t v[4], at[4];
            ptx::load_shared(v, to + i);
            ptx::load_shared(at, h + i);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              float d[2], slope[2];
              slopes_of<decltype(f), T>(at[k], slope);
              ptx::unpack(T{}, v[k], d[0], d[1]);
              v[k] = ptx::pack(T{}, d[0] * slope[0], d[1] * slope[1]);
            }
            ptx::store_shared(to + i, v);
          }
        },
        Activations{});
    ptx::fence_proxy_async_shared();
    __syncthreads();
  }

  __device__ __forceinline__ void find_slopes(float (&slope)[kSums], uint32_t h) {
    uint32_t v[kRows / 16][4];
#pragma unroll
    for (int j = 0; j < kRows / 16; ++j) ptx::ldmatrix_trans(v[j], h + fragment + j * 16 * 128);
    with_slope(
        a.act,
        [&](auto f) {
#pragma unroll
          for (int i = 0; i < kRows / 4; ++i) {
            float two[2];
            slopes_of<decltype(f), T>(v[i / 4][i % 4], two);
            slope[2 * i] = two[0], slope[2 * i + 1] = two[1];
          }
        },
        Activations{});
  }
  // Starts sums = (W^T dz^T) of this warpgroup's 64 features.
  __device__ __forceinline__ void multiply(float (&sums)[kSums], uint32_t w, uint32_t dz) {
    const uint32_t panel = w + warp / 4 * kWidth * 128;
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t k = 0; k < kWidth; k += 16)
      ptx::wgmma<T, kRows, Major::mn, Major::k>(sums, operand<Major::mn, Swizzle::b128>(panel, k),
                                                operand<Major::k, Swizzle::b128>(dz, k, kRows * 128), k > 0);
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void store_dz(const float (&sums)[kSums], const float (&slope)[kSums], bool has_slopes,
                                           uint32_t to) {
#pragma unroll
    for (int j = 0; j < kRows / 16; ++j) {
      uint32_t v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 8 * j + 2 * i;
        v[i] = has_slopes ? ptx::pack(T{}, sums[at] * slope[at], sums[at + 1] * slope[at + 1])
                          : ptx::pack(T{}, sums[at], sums[at + 1]);
      }
      ptx::stmatrix_trans(to + fragment + j * 16 * 128, v);
    }
  }

  __device__ __forceinline__ void compute_step(int step) {
    const int l = layer_of(step), slot = step % a.stages;
    const bool has_slopes = l > 0;  // below layer 0 the result is dx, which has no slopes
    const uint32_t w = ptx::shared_address(s.stage[slot].w), h = ptx::shared_address(s.stage[slot].h);
    float sums[kSums], slope[kSums];
    wait_warp_or_trap(&s.full[slot], step / a.stages & 1);
    if (kNorm && a.layer[l].g != nullptr) {
      if (step == 0) normalise<T, kPanels>(w, s.gain[l], &s.normed[0], warp, kWarps);  // no earlier work
      wait_warp_or_trap(&s.normed[slot], step / a.stages & 1);
    }
    if (step > 0)
      wait_warp_or_trap(&s.formed, (step - 1) & 1);
    else if (!a.activate_last)
      wait_warp_or_trap(&s.dy_full, 0);
    multiply(sums, w, ptx::shared_address(s.dz[step & 1]));
    if (has_slopes) find_slopes(slope, h);
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(sums);
    store_dz(sums, slope, has_slopes, ptx::shared_address(s.dz[(step + 1) & 1]));
    ptx::fence_proxy_async_shared();
    // The next step overwrites data whose copy to memory began before this step.
    wait_warp_or_trap(&s.stored, step & 1);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&s.formed);
    __syncwarp();
  }
  // Called by a single thread.
  __device__ void init_barriers() {
    for (uint64_t& full : s.full) ptx::mbarrier_init(&full, 2);
    if constexpr (kNorm)
      for (uint64_t& normed : s.normed) ptx::mbarrier_init(&normed, kNormArrivals<kPanels>);
    ptx::mbarrier_init(&s.dy_full, 2);
    ptx::mbarrier_init(&s.formed, kWarps);
    ptx::mbarrier_init(&s.stored, 1);
    ptx::fence_mbarrier_init();
  }
  __device__ void prefetch_maps() const {
    ptx::prefetch_tensor_map(&maps.dy);
    for (int l = a.lowest; l < a.layers; ++l) {
      ptx::prefetch_tensor_map(&maps.w[l]);
      if (l > 0) ptx::prefetch_tensor_map(&maps.h[l - 1]);
      if (l > 0 && a.layer[l - 1].keeps_dz) ptx::prefetch_tensor_map(&maps.dz[l - 1]);
    }
    if (a.lowest == 0) ptx::prefetch_tensor_map(&maps.dx);
  }
  // Role::form_weights: the weights of the normalised layers after the first step, whose weights compute_step() forms.
  __device__ void form_weights() {
    for (int step = 1; step < steps(); ++step) {
      const int l = layer_of(step), slot = step % a.stages;
      if (a.layer[l].g == nullptr) continue;
      wait_warp_or_trap(&s.full[slot], step / a.stages & 1);
      normalise<T, kPanels>(ptx::shared_address(s.stage[slot].w), s.gain[l], &s.normed[slot], warp - kWarps - 1,
                            kFormers / 32);
    }
  }
  __device__ void load_gains() {
    for (uint32_t i = threadIdx.x; i < uint32_t(a.layers) * kWidth; i += blockDim.x) {
      const ChainLayer& layer = a.layer[i / kWidth];
      s.gain[i / kWidth][i % kWidth] = layer.g != nullptr && int(i % kWidth) < layer.n
                                           ? tile::to_float(static_cast<const T*>(layer.g)[i % kWidth])
                                           : 0.f;
    }
    __syncthreads();
  }
};

template <class T, int kPanels, int kRows, bool kNorm>
__global__ void __launch_bounds__(threads<kPanels>(kNorm), 1)
    chain_kernel(const __grid_constant__ MlpChainMaps maps, const __grid_constant__ Chain a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  ChainBlock<T, kPanels, kRows, kNorm> block{*reinterpret_cast<ChainMemory<kPanels, kRows>*>(memory), maps, a};
  if (threadIdx.x == 0) block.init_barriers(), block.prefetch_maps();
  __syncwarp();
  __syncthreads();
  ptx::wait_for_earlier_kernels();
  // This call must come after the wait: the next kernel does not wait for this kernel, and reads results of the kernels
  // before this one.
  ptx::let_next_kernel_start();
  const Role role = role_of<kPanels>(block.warp);
  const bool copies = role == Role::copy && block.lane == 0;
  if (copies) block.start_loading();
  __syncwarp();
  if constexpr (kNorm) block.load_gains();
  if (a.activate_last) {
    wait_warp_or_trap(&block.s.dy_full, 0);
    block.apply_top_slope();
  }
  if (role == Role::multiply)
    for (int step = 0; step < block.steps(); ++step) block.compute_step(step);
  else if (kNorm && role == Role::form_weights)
    block.form_weights();
  else if (copies)
    block.store_and_reload();
}

template <class T, int kPanels, int kRows, bool kNorm>
void launch_chain_of(const MlpChainMaps& maps, const Chain& a, int64_t rows, int device, Stream stream) {
  using Memory = ChainMemory<kPanels, kRows>;
  const int64_t blocks = (rows + kRows - 1) / kRows;
  gpu::launch("mlp_backward", chain_kernel<T, kPanels, kRows, kNorm>,
              {.grid = blocks,
               .block = threads<kPanels>(kNorm),
               .smem = int64_t(sizeof(Memory)) + (a.stages - 1) * int64_t(sizeof(typename Memory::Stage)),
               .overlap = true,
               .device = device},
              stream, maps, a);
}

template <class T> void launch_chain(const MlpChainMaps& maps, const Chain& a, const ChainLaunch& at, Stream stream) {
  const auto with_rows = [&](auto panels, auto norm) {
    constexpr int kPanels = decltype(panels)::value;
    constexpr bool kNorm = decltype(norm)::value;
    if (at.block_rows == 16) return launch_chain_of<T, kPanels, 16, kNorm>(maps, a, at.rows, at.device, stream);
    if (at.block_rows == 32) return launch_chain_of<T, kPanels, 32, kNorm>(maps, a, at.rows, at.device, stream);
    launch_chain_of<T, kPanels, 64, kNorm>(maps, a, at.rows, at.device, stream);
  };
  const auto with_panels = [&](auto panels) {
    a.has_gain ? with_rows(panels, std::true_type()) : with_rows(panels, std::false_type());
  };
  at.panels == 2 ? with_panels(std::integral_constant<int, 2>()) : with_panels(std::integral_constant<int, 1>());
}

}  // namespace ingot::cuda::to_128_few_rows_backward
