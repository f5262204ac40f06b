#pragma once
// The copies of a tile's weights and rows of x into the ring: all threads, by cp.async. A step is one stage's columns.
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/kernels/grouped/portable/form.cuh"

namespace ingot::cuda::grouped_portable {

template <WeightFormat F, int kWidth> __device__ __forceinline__ uint32_t steps_of(const Product& w) {
  return w.weight_tiles * (64 / Form<F, kWidth>::kColumns);
}

// Requests a step of tile t, if there is one, as one group of copies. Row tiles beyond the end of the matrix are copies
// of its last row tile, and rows of x beyond the end of the tile are not copied; their sums are never stored. Columns
// beyond the end of a row are zeros.
template <WeightFormat F, int kWidth>
__device__ __forceinline__ void request(const Arguments& p, Memory<F, kWidth>& m, const Tile& t, uint32_t step,
                                        uint32_t stage) {
  using L = Form<F, kWidth>;
  constexpr uint32_t kChunks = L::kBand / 16, kRowChunks = L::kRowBytes / 16;  // of a row tile, and of a row of x
  constexpr uint32_t kAtOnce = kThreads / kRowChunks;                          // rows
  const Product& w = p.product;
  if (step < steps_of<F, kWidth>(w)) {
    // The sums leave no registers for addresses. Without settle() the compiler would keep all addresses that depend
    // only on the thread's number.
    uint32_t thread = threadIdx.x;
    ptx::settle(thread);
    const uint32_t band = thread / 16, in_band = thread % 16 * 16;
    const uint32_t to_a = ptx::shared_address(m.a[0]) + stage * L::kA + band * L::kBand + in_band;
    const uint8_t* const weights = w.w + t.group * w.matrix_bytes +
                                   min(t.row_tile + band, w.row_tiles - 1) * w.row_tile_bytes + step * L::kBand +
                                   in_band;
#pragma unroll
    for (uint32_t j = 0; j < (kChunks + 15) / 16; ++j)
      if (16 * (j + 1) <= kChunks || thread % 16 < kChunks % 16) ptx::cp_async<16>(to_a + j * 256, weights + j * 256);
    const uint32_t row = thread / kRowChunks, chunk = thread % kRowChunks, column = step * L::kColumns + chunk * 8;
    const uint32_t to_b = ptx::shared_address(m.b[0]) + stage * L::kB + tile::swizzled<L::kSwizzle>(row, chunk * 16);
    const int rows = int(min(t.rows(), uint32_t(kWidth))) - int(row);
    const char* from = p.x.data + int64_t(t.row + row) * p.x.stride + column * 2;
    const auto copy_rows = [&](auto&& copy) {
#pragma unroll
      for (uint32_t first = 0; first < kWidth; first += kAtOnce, from += kAtOnce * p.x.stride)
        if (int(first) < rows) copy(to_b + first * L::kRowBytes, from);
    };
    if ((step + 1) * L::kColumns <= p.x.columns) {
      copy_rows([](uint32_t to, const char* chunk_of_row) { ptx::cp_async<16>(to, chunk_of_row); });
    } else {
      const uint32_t valid = column < p.x.columns ? min(16u, 2 * (p.x.columns - column)) : 0;
      copy_rows([valid](uint32_t to, const char* chunk_of_row) { ptx::cp_async<16>(to, chunk_of_row, valid); });
    }
  }
  ptx::cp_async_commit_group();
}

// Requests the first steps of a tile, from a stage on.
template <WeightFormat F, int kWidth>
__device__ __forceinline__ void request_first(const Arguments& p, Memory<F, kWidth>& m, const Tile& t, uint32_t stage) {
  for (uint32_t step = 0; step + 1 < Form<F, kWidth>::kStages; ++step, stage = next_stage<F, kWidth>(stage))
    request(p, m, t, step, stage);
}

}  // namespace ingot::cuda::grouped_portable
