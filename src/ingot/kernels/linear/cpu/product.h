#pragma once
// product(): a matrix product on the CPU, of operands of any layout, on the threads of the pool.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/linear/cpu/linear.simd.h"
#include "ingot/kernels/linear/cpu/product_cut.h"
#include "ingot/kernels/linear/cpu/simd_calls.h"

namespace ingot::linear_cpu {

template <class Body> void run_tasks(bool serial, int64_t tasks, Body&& body) {
  if (!serial) return parallel_tasks(tasks, body);
  for (int64_t task = 0; task < tasks; ++task) body(task);
}

// Operands whose panels lie across memory rows are packed a few rows at a time, so that memory is read in order.
template <class How, class T>
void pack_chunk(const Gemm<T>& g, const GemmChunk& chunk, int64_t row_panels, int64_t col_panels, bool serial) {
  const int64_t k = chunk.k_end - chunk.k_begin, blocks = ceil_div(k, kPackRows);
  const bool packs_b = chunk.packed && !g.packed_b;
  const int64_t a_tasks = chunk.packed_a ? blocks : 0, b_tasks = !packs_b ? 0 : g.b_col == 1 ? blocks : col_panels;
  const auto steps = [&](int64_t panels, int64_t block) {
    return GemmPackRange{0, panels, block * kPackRows, std::min(k, (block + 1) * kPackRows)};
  };
  run_tasks(serial, a_tasks + b_tasks, [&](int64_t task) {
    if (task < a_tasks) return How::pack_rows(g, chunk, steps(row_panels, task));
    task -= a_tasks;
    if (g.b_col == 1) return How::pack_columns(g, chunk, steps(col_panels, task));
    How::pack_columns(g, chunk, {task, task + 1, 0, k});
  });
}

// Calls each(chunk, its column panels) for all chunks, run of columns after run of columns.
template <class T, class Each> void each_chunk(const Gemm<T>& g, const Cut& cut, Each&& each) {
  for (int64_t n0 = 0; n0 < g.n; n0 += cut.n_chunk) {
    const int64_t n1 = std::min(g.n, n0 + cut.n_chunk);
    int64_t k0 = 0;
    do {
      each(GemmChunk{k0, std::min(g.k, k0 + cut.k_chunk), n0, n1}, ceil_div(n1 - n0, cut.tile.cols));
      k0 += cut.k_chunk;
    } while (k0 < g.k);
  }
}

template <class How, class T, class Finish> void packed_product(const Gemm<T>& g, bool serial, Finish&& finish) {
  const Cut cut = How::cut(g);
  const int64_t own_b_bytes = g.packed_b ? 0 : cut.b_bytes;
  char* scratch = static_cast<char*>(thread_scratch(kSharedProductSlot, own_b_bytes + cut.a_bytes));
  char* packed_b = static_cast<char*>(g.packed_b);
  each_chunk(g, cut, [&](GemmChunk chunk, int64_t col_panels) {
    if (g.a_col != 1 && !cut.a_in_place) chunk.packed_a = scratch + own_b_bytes;
    if (!cut.b_in_place) chunk.packed = packed_b ? packed_b : scratch;
    if (packed_b) packed_b += cut.b_bytes;
    pack_chunk<How>(g, chunk, cut.row_panels, col_panels, serial);
    const int64_t row_tiles = ceil_div(cut.row_panels, cut.tile_rows), col_tiles = ceil_div(col_panels, cut.tile_cols);
    run_tasks(serial, row_tiles * col_tiles, [&](int64_t task) {
      const int64_t i = task / col_tiles * cut.tile_rows, j = task % col_tiles * cut.tile_cols;
      const GemmRange range{i, std::min(i + cut.tile_rows, cut.row_panels), j, std::min(j + cut.tile_cols, col_panels)};
      How::run(g, chunk, range, thread_scratch(kTaskProductSlot, cut.task_bytes));
      if (chunk.k_end == g.k)
        finish(How::row(g, cut, range.row_panel_begin), How::row(g, cut, range.row_panel_end),
               chunk.n_begin + j * cut.tile.cols,
               std::min(chunk.n_end, chunk.n_begin + range.col_panel_end * cut.tile.cols));
    });
  });
}

// Calls use() with the kind of product for these operands and this CPU level.
template <class T, class Use> auto with_kind(Gemm<T> g, Use&& use) {
  if constexpr (std::is_same_v<T, float>)
    if (g.round && ByTiles::apply()) return use(ByTiles(), g);
  g.words = g.round && bf16_dots_pay();
  return use(ByVectors<T>(), g);
}

// Calls finish(row_begin, row_end, col_begin, col_end) for each part of c as soon as the part is complete, while the
// cache still holds the part.
template <class T, class Finish> void product(const Gemm<T>& g, Finish&& finish) {
  if (g.m == 0 || g.n == 0) return;
  const bool serial = g.m * g.n * g.k <= kSerialWork;
  if (g.m <= 8 && g.b_row == 1 && g.a_col == 1 && !g.lower) {
    const int64_t grain = std::max<int64_t>(16, kSerialWork / std::max<int64_t>(1, g.m * g.k));
    parallel_for(g.n, grain, [&](int64_t begin, int64_t end) {
      dot_columns(g, begin, end);
      finish(0, g.m, begin, end);
    });
    return;
  }
  with_kind(g, [&](auto how, const Gemm<T>& known) { packed_product<decltype(how)>(known, serial, finish); });
}
template <class T> void product(const Gemm<T>& g) {
  product(g, [](int64_t, int64_t, int64_t, int64_t) {});
}

}  // namespace ingot::linear_cpu
