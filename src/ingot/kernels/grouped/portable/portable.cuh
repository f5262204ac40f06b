#pragma once
// The portable kernel: a block computes tiles of 256 rows of weights by kWidth rows of x, one after another (form.cuh).
// All threads bring stages of columns by cp.async: weight tiles as they are stored, and rows of x in a swizzle. Each of
// eight warps decodes the weight tiles of its row tiles into mma.sync's left operand, as Hopper's warps do, and
// multiplies by the rows of x. The first stages of the next tile are being copied while the sums of a tile are stored.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/grouped/portable/finish.cuh"
#include "ingot/kernels/grouped/portable/multiply.cuh"

namespace ingot::cuda::grouped_portable {

// The first warp finds the block's first tile. Tiles are assigned to the blocks in turn, or the blocks claim them.
template <WeightFormat F, int kWidth>
__device__ __forceinline__ void begin_walk(const Product& w, Memory<F, kWidth>& m) {
  const bool claims = w.claims != nullptr;
  Walk walk{w.groups <= kHeldGroups ? m.offsets : w.offsets,
            w.groups,
            kBands,
            (w.row_tiles + kBands - 1) / kBands,
            w.tile_rows,
            blockIdx.x,
            claims ? 0 : gridDim.x};
  uint32_t tiles = 0;
  if (claims)
    for (uint32_t g = threadIdx.x; g < w.groups; g += 32) tiles += walk.tiles_of(g);
  tiles = __reduce_add_sync(~0u, tiles);
  if (threadIdx.x != 0) return;
  Tile t;
  m.tile[0] = walk.next(t) ? t : Tile{};
  m.walk = walk;
  m.tiles = tiles;
}
// Thread 0 finds the block's next tile. Every block that has computed a tile claims another one, so there are as many
// claims as tiles, and the last of all claims resets the counter.
template <WeightFormat F, int kWidth>
__device__ __forceinline__ void find_next(const Product& w, Memory<F, kWidth>& m, Tile& next) {
  Walk walk = m.walk;
  if (w.claims != nullptr) {
    const uint32_t claim = ptx::fetch_add_relaxed(w.claims, 1);
    if (claim + 1 == m.tiles) ptx::store_relaxed(w.claims, 0);
    walk.next_tile = claimed_tile(claim, gridDim.x);
  }
  Tile t;
  next = walk.next(t) ? t : Tile{};
  m.walk = walk;
}

template <WeightFormat F, int kWidth, bool kGated>
__global__ void __launch_bounds__(kThreads, kWidth <= 48 ? 2 : 1)
    portable_grouped_kernel(const __grid_constant__ Arguments p) {
  using L = Form<F, kWidth>;
  auto& m = *tile::dynamic_shared<Memory<F, kWidth>>();
  const Product& w = p.product;
  if (w.groups <= kHeldGroups)
    for (uint32_t g = threadIdx.x; g <= w.groups; g += kThreads) m.offsets[g] = w.offsets[g];
  __syncthreads();
  if (threadIdx.x < 32) begin_walk(w, m);
  __syncthreads();
  if (m.tile[0].rows() == 0) return;
  uint32_t stage = 0;
  request_first(p, m, m.tile[0], stage);
  for (uint32_t at = 0;; at ^= 1) {
    const Tile& t = m.tile[at];
    Tile& next = m.tile[at ^ 1];
    float d[L::kBandsOfWarp][L::kRows / 2];
    const auto publish = [&] {
      if (threadIdx.x == 0) find_next(w, m, next);
    };
    ptx::cp_async_wait_group<L::kStages - 2>();
    __syncthreads();
    if (t.rows() > uint32_t(kWidth) - 16)
      multiply_tile<F, kWidth, true>(p, m, t, stage, d, publish);
    else
      multiply_tile<F, kWidth, false>(p, m, t, stage, d, publish);
    const bool more = next.rows() > 0;
    if (more) request_first(p, m, next, stage);
    const uint32_t warp = threadIdx.x / 32, first_row = t.row + warp % L::kAcross * L::kRows;
#pragma unroll
    for (int r = 0; r < L::kBandsOfWarp; ++r) {
      const uint32_t row_tile = t.row_tile + warp / L::kAcross * L::kBandsOfWarp + r;
      if (row_tile >= w.row_tiles) continue;
      const Ends ends = ends_of<F>(w, t, row_tile);
      if constexpr (kGated)
        finish_gated<L::kRows>(w, t, row_tile, ends, first_row, d[r]);
      else
        finish_plain<L::kRows>(w, t, row_tile, ends, first_row, d[r]);
    }
    if (!more) return;
  }
}

template <WeightFormat F, int kWidth> Kernel kernel_of_width(bool gated) {
  return {gated ? portable_grouped_kernel<F, kWidth, true> : portable_grouped_kernel<F, kWidth, false>,
          int64_t(sizeof(Memory<F, kWidth>))};
}
template <WeightFormat F> Kernel kernel_of(int width, bool gated) {
  constexpr int kWidest = portable_widest(F);
  if (width == kPortableWidths[0]) return kernel_of_width<F, kPortableWidths[0]>(gated);
  if (width == kPortableWidths[1]) return kernel_of_width<F, kPortableWidths[1]>(gated);
  if (width == kPortableWidths[2]) return kernel_of_width<F, kPortableWidths[2]>(gated);
  return kernel_of_width<F, kWidest>(gated);
}

}  // namespace ingot::cuda::grouped_portable
