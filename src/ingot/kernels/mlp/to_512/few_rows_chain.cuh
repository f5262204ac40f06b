#pragma once
// The chain of gradients of few rows where layers are up to 512 wide:  dz_{l-1} = (dz_l W_l) . f'(z_{l-1})  from the
// top layer down, and dx. A cluster's blocks go through all layers together, as cluster_tile.cuh describes. h, from
// which slopes are computed, comes through the ring after the W of its product.
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/kernels/mlp/parts/block_pair.cuh"
#include "ingot/kernels/mlp/parts/slopes.cuh"
#include "ingot/kernels/mlp/to_512/cluster_tile.cuh"
#include "ingot/kernels/mlp/to_512/few_rows_backward.h"

namespace ingot::cuda::to_512_few_rows_backward {

using namespace mlp_parts;
using to_512_cluster::kColumns;
using to_512_cluster::kPanels;
using to_512_cluster::Memory;
using to_512_cluster::Share;
using to_512_cluster::slices_of;
using to_512_cluster::Slot;

// Fills a warpgroup's part of the ring; called by a single thread.
__device__ __forceinline__ void fill_ring(Memory& s, const MlpChainMaps& maps, const Chain& a, const Share& of,
                                          uint32_t tile) {
  Slot at(of);
  const uint32_t column = of.panel() * kColumns, row = tile * to_512_cluster::kRows;
  const int top = a.layers - 1;
  if (a.activate_last && of.has(uint32_t(a.layer[top].n))) to_512_cluster::load_slice(s, at, maps.h[top], column, row);
  for (int l = top; l >= a.lowest; --l) {
    if (!of.has(uint32_t(a.layer[l].k))) continue;
    const uint32_t slices = slices_of(uint32_t(a.layer[l].n));
    for (uint32_t i = 0; i < slices; ++i)
      to_512_cluster::load_slice(s, at, maps.w[l], column, of.slice(i, slices) * kMlpPanel);
    if (l > 0) to_512_cluster::load_slice(s, at, maps.h[l - 1], column, row);
  }
}

template <class T, Slope kSlope> struct ChainGroup {
  Memory& s;
  const MlpChainMaps& maps;
  const Chain& a;
  const Share of;
  const uint32_t tile;
  Slot at;
  int step = 0;  // the source of the panels
  const uint32_t lane = threadIdx.x % 32;

  // Where this lane's ldmatrix and stmatrix find 16 columns of its warp's 16 rows: columns 16 i of a panel.
  __device__ __forceinline__ uint32_t place(const char* panel, uint32_t i) const {
    const uint32_t row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    return (ptx::shared_address(panel) + tile::swizzled<Swizzle::b128>(row, lane / 16 * 16)) ^ (i * 32);
  }
  // sums = dz W of the panel.
  __device__ __forceinline__ void multiply(float (&sums)[kColumns / 2], int l) {
    const uint32_t slices = slices_of(uint32_t(a.layer[l].n));
    uint32_t before = 0;
    ptx::fence_registers(sums);
#pragma unroll 1
    for (uint32_t i = 0; i < slices; ++i) {
      const uint32_t slice = of.slice(i, slices);
      to_512_cluster::wait_for_panel(s, step, slice);
      tile::wait_warp_or_trap(&s.w_full[at.number], at.phase);
      const uint32_t dz = ptx::shared_address(s.rows[step % 2][slice]), w = ptx::shared_address(s.w[at.number]);
      ptx::wgmma_fence();
#pragma unroll
      for (uint32_t k = 0; k < uint32_t(kMlpPanel); k += 16)
        ptx::wgmma<T, kColumns, Major::k, Major::mn>(sums, operand<Major::k, Swizzle::b128>(dz, k),
                                                     operand<Major::mn, Swizzle::b128>(w, k), i + k > 0);
      ptx::wgmma_commit_group();
      if (i > 0) {
        ptx::wgmma_wait_group<1>();
        to_512_cluster::release(s, before);
      }
      before = at.number;
      at.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(sums);
    to_512_cluster::release(s, before);
  }
  __device__ __forceinline__ void wait_for_panels(uint32_t first) const {
    for (uint32_t i = first; i < kPanels; ++i) to_512_cluster::wait_for_panel(s, step, i);
  }
  __device__ __forceinline__ void take_values(uint32_t (&h)[4][4]) {
    tile::wait_warp_or_trap(&s.w_full[at.number], at.phase);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) ptx::ldmatrix(h[i], place(s.w[at.number], i));
    ptx::fence_proxy_async_shared();
    __syncwarp();
    to_512_cluster::release(s, at.number);
    at.advance();
  }
  // Waits until the copy engine has read this group's data of two steps ago.
  __device__ __forceinline__ void claim_panel() const {
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_group_read<0>();
    to_512_cluster::sync_group(of);
  }
  // The panel is in its place in this block; copies the panel to all blocks of the cluster, if a product will read it,
  // and to memory.
  __device__ __forceinline__ void hand_on(const CUtensorMap* memory, bool is_read) {
    ptx::fence_proxy_async_shared();
    char* const panel = s.rows[(step + 1) % 2][of.panel()];
    if (is_read)
      to_512_cluster::announce(s, of, step, to_512_cluster::kPanelBytes);
    else
      to_512_cluster::sync_group(of);
    if (memory != nullptr && threadIdx.x % 128 == 0) {
      ptx::tensor_store(memory, int(of.panel() * kColumns), int(tile * to_512_cluster::kRows), panel);
      ptx::bulk_commit_group();
    }
  }
  // The destination of dz of layer l, or of dx.
  __device__ __forceinline__ const CUtensorMap* destination(int l) const {
    if (l < 0) return &maps.dx;
    return a.layer[l].keeps_dz ? &maps.dz[l] : nullptr;
  }
  // Turns dy into dz of the top layer, which is activated.
  __device__ __forceinline__ void enter() {
    const int top = a.layers - 1;
    const bool is_read = a.lowest < a.layers;
    wait_for_panels(0);
    if (!of.has(uint32_t(a.layer[top].n))) {
      if (is_read) to_512_cluster::announce(s, of, step, 0);
      ++step;
      return;
    }
    uint32_t h[4][4];
    take_values(h);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      uint32_t dz[4];
      ptx::ldmatrix(dz, place(s.rows[step % 2][of.panel()], i));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float d[2], slope[2];
        ptx::unpack(T{}, dz[e], d[0], d[1]);
        slopes_at<T, kSlope>(h[i][e], a.number, slope);
        dz[e] = ptx::pack(T{}, d[0] * slope[0], d[1] * slope[1]);
      }
      ptx::stmatrix(place(s.rows[(step + 1) % 2][of.panel()], i), dz);
    }
    hand_on(destination(top), is_read);
    ++step;
  }
  template <bool kSlopes> __device__ __forceinline__ void pass_layer(int l) {
    const bool is_read = l > a.lowest;
    if (!of.has(uint32_t(a.layer[l].k))) {
      wait_for_panels(0);
      if (is_read) to_512_cluster::announce(s, of, step, 0);
      ++step;
      return;
    }
    float sums[kColumns / 2];
    multiply(sums, l);
    wait_for_panels(slices_of(uint32_t(a.layer[l].n)));
    uint32_t h[4][4];
    if constexpr (kSlopes) take_values(h);
    claim_panel();
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      uint32_t dz[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float slope[2] = {1, 1};
        if constexpr (kSlopes) slopes_at<T, kSlope>(h[i][e], a.number, slope);
        const uint32_t j = 8 * i + 2 * uint32_t(e);
        dz[e] = ptx::pack(T{}, sums[j] * slope[0], sums[j + 1] * slope[1]);
      }
      ptx::stmatrix(place(s.rows[(step + 1) % 2][of.panel()], i), dz);
    }
    hand_on(destination(l - 1), is_read);
    ++step;
  }
  __device__ __forceinline__ void run() {
    if (a.activate_last) enter();
#pragma unroll 1
    for (int l = a.layers - 1; l >= a.lowest; --l) {
      if (l > 0)
        pass_layer<true>(l);
      else
        pass_layer<false>(l);
    }
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_group<0>();
  }
};

template <class T, Slope kSlope>
__global__ void __launch_bounds__(to_512_cluster::kMostThreads, 1)
    chain_kernel(const __grid_constant__ MlpChainMaps maps, const __grid_constant__ Chain a) {
  extern __shared__ __align__(1024) char shared[];
  Memory& s = *reinterpret_cast<Memory*>(shared);
  const uint32_t warp = warp_of_block(), groups = blockDim.x / 128 - 1;
  Share of{warp / 4, groups, ptx::cluster_rank(), ptx::cluster_size()};
  const uint32_t tile = ptx::cluster_index();
  if (threadIdx.x == 0) to_512_cluster::prepare(s);
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  ptx::cluster_wait();
  if (warp < 4 * groups) {
    ChainGroup<T, kSlope>{s, maps, a, of, tile, Slot(of)}.run();
  } else if (threadIdx.x % 32 == 0) {
    of.group = warp - 4 * groups;
    if (of.group == 0) to_512_cluster::load_rows(s, of, maps.dy, uint32_t(a.layer[a.layers - 1].n), tile);
    if (of.group < groups) fill_ring(s, maps, a, of, tile);
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();  // further blocks may still send to this block, or read its data
  ptx::cluster_wait();
}

template <class T> void launch_chain(const MlpChainMaps& maps, const Chain& a, const ChainLaunch& at, Stream stream) {
  with_slope_kind(at.slope, [&](auto slope) {
    gpu::launch("mlp_backward", chain_kernel<T, slope()>,
                {.grid = int64_t(at.tiles) * at.cluster,
                 .block = 128 * (int(kPanels) / at.cluster + 1),
                 .smem = sizeof(Memory),
                 .cluster = at.cluster,
                 .overlap = true,
                 .device = at.device},
                stream, maps, a);
  });
}

}  // namespace ingot::cuda::to_512_few_rows_backward
