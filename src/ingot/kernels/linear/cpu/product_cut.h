#pragma once
// How the CPU cuts a product into chunks, which are packed as a whole, and into tasks: by sizes and the kind of CPU
// alone, never by the number of threads.
#include <algorithm>
#include <cstdint>

#include "ingot/core/cpu/cpu.h"
#include "ingot/kernels/linear/cpu/linear.simd.h"
#include "ingot/kernels/linear/cpu/linear_tiles.h"
#include "ingot/kernels/linear/cpu/simd_calls.h"

namespace ingot::linear_cpu {

constexpr int64_t kSerialWork = 1 << 16;  // multiply-adds; waking the pool costs as much
constexpr int64_t kPackRows = 64;         // steps that a task packs where memory runs along the rows

struct Cut {
  GemmTile tile;
  int64_t k_chunk, n_chunk;      // steps of the sum, and columns, of a chunk, which is packed as a whole
  int64_t row_panels;            // of the whole product
  int64_t tile_rows, tile_cols;  // of a task, in panels
  int64_t b_bytes, a_bytes;      // the packed operands of a chunk
  int64_t task_bytes;            // rows of a that a task packs for itself
  bool b_in_place = false, a_in_place = false;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Halves the tasks until there are enough tasks for many threads, or the tasks are small. Every task has at least
// `least_cols` columns.
inline void shrink_tasks(Cut& c, int64_t k, int64_t task_work, int64_t least_cols) {
  const int64_t rows = c.tile.rows, cols = c.tile.cols, col_panels = c.n_chunk / cols;
  const auto tasks = [&] { return ceil_div(c.row_panels, c.tile_rows) * ceil_div(col_panels, c.tile_cols); };
  const auto work = [&] { return c.tile_rows * rows * c.tile_cols * cols * std::min(k, c.k_chunk); };
  while (tasks() < 32 && work() > task_work) {
    const bool halve_rows =
        c.tile_cols * cols <= least_cols || (c.tile_rows > 1 && c.tile_rows * rows >= c.tile_cols * cols);
    if (halve_rows && c.tile_rows == 1) break;
    int64_t& side = halve_rows ? c.tile_rows : c.tile_cols;
    side = (side + 1) / 2;
  }
}

// Whether bf16 dot products are faster than fp32 multiply-adds: Sapphire Rapids does them at half the rate (counted in
// operations), Zen 4 and 5 at twice the rate. The CPU's maker decides, not a timing, so that one kind of CPU always
// sums in one order.
inline bool bf16_dots_pay() {
#if defined(__x86_64__)
  static const bool slow = __builtin_cpu_is("intel");
  return cpu_level() == CpuLevel::avx512_bf16 && !slow;
#else
  return false;
#endif
}

// Whether operands that lie across the sum are read in place instead of packed. Both operands of a weight gradient lie
// in this way and are used little, so packing would cost a tenth of the product; so do the weights of an input
// gradient. A step of AVX-512's micro-tile takes 14 cycles, in which Zen 5 fetches the step's three or four lines from
// the second-level cache, whatever their stride. A step of AVX2's micro-tile takes only six cycles, and Intel's caches
// have not been measured. The sums and their order are the same either way.
inline bool reads_across_pay() {
#if defined(__x86_64__)
  static const bool wide_loads = __builtin_cpu_is("amd");
  return wide_loads && cpu_level() >= CpuLevel::avx512;
#else
  return false;
#endif
}

// A product by vectors: rows of a are read in place where a row is contiguous.
template <class T> struct ByVectors {
  static constexpr int64_t kPacked = 1 << 20;          // elements of b (4 MB of f32), a part of the last-level cache
  static constexpr int64_t kPackedTogether = 1 << 18;  // elements of a and b together (1 MB)
  static constexpr int64_t kTaskWork = 1 << 19;        // multiply-adds: some 10 us
  // b is read in place only where its rows are at most this many bytes apart: rows whole pages apart share a set of L1.
  static constexpr int64_t kStride = 2048;

  static Cut cut(const Gemm<T>& g) {
    Cut c{.tile = tile_of(T{})};
    const bool packs_a = g.a_col != 1;
    const int64_t size = sizeof(T), depth = std::max<int64_t>(1, std::min<int64_t>(g.k, 2048));
    c.n_chunk = std::min(round_up(g.n, c.tile.cols), std::max<int64_t>(1, kPacked / depth / c.tile.cols) * c.tile.cols);
    c.k_chunk = std::max(depth, kPacked / c.n_chunk);
    // If both operands are packed, the packed data is used right away and should then still be in the second-level
    // cache.
    if (packs_a) c.k_chunk = std::max<int64_t>(256, kPackedTogether / (g.m + c.n_chunk));
    c.k_chunk = round_up(c.k_chunk, kPackRows);  // whole cache lines, and pairs of steps for bf16 dot products
    c.row_panels = ceil_div(g.m, c.tile.rows);
    c.tile_rows = std::min<int64_t>(c.row_panels, std::max(1, 96 / c.tile.rows));
    // Each task rounds its own rows of a; a task with enough columns amortises the rounding.
    const int64_t least_cols = packs_a || !g.round ? c.tile.cols : g.words ? 1024 : 128;
    c.tile_cols = std::clamp<int64_t>(std::max<int64_t>(256, least_cols) / c.tile.cols, 1, c.n_chunk / c.tile.cols);
    shrink_tasks(c, g.k, kTaskWork, least_cols);
    c.a_in_place = packs_a && !g.round && reads_across_pay();
    c.b_in_place =
        !g.round && reads_across_pay() && g.b_row != 1 && g.b_row * size <= kStride && g.n % (c.tile.cols / 2) == 0;
    const int64_t depth_packed = std::min(g.k, c.k_chunk);
    const int64_t b_steps = g.words ? ceil_div(depth_packed, 2) : depth_packed;
    c.b_bytes = c.b_in_place ? 0 : round_up(c.n_chunk * b_steps * size, 256);
    c.a_bytes = packs_a && !c.a_in_place ? g.m * depth_packed * size : 0;
    c.task_bytes = c.tile_rows * c.tile.rows * INGOT_SIMD_CALL(gemm_scratch_steps) * size;
    return c;
  }
  static int64_t row(const Gemm<T>& g, const Cut& c, int64_t panel) { return panel_begin(panel, g.m, c.row_panels); }
  static void pack_rows(const Gemm<T>& g, const GemmChunk& c, const GemmPackRange& r) { pack_a(g, c, r); }
  static void pack_columns(const Gemm<T>& g, const GemmChunk& c, const GemmPackRange& r) { pack(g, c, r); }
  static void run(const Gemm<T>& g, const GemmChunk& c, const GemmRange& r, void* scratch) {
    multiply(g, c, r, static_cast<T*>(scratch));
  }
};

// A product by bf16 tiles, some ten times as fast as by vectors. Packing and rounding therefore weigh more, and a task
// uses the rows of a that it packs for all columns of a chunk.
struct ByTiles {
  static constexpr int64_t kPackedBytes = 1 << 20;  // of b, and of a and b together: half a second-level cache
  static constexpr int64_t kTaskWork = 1 << 21;     // multiply-adds: a few us

  static bool apply() { return cpu_level() >= CpuLevel::avx512_amx || detail::tiles_emulated(); }
  static Cut cut(const Gemm<float>& g) {
    Cut c{.tile = call_tile()};
    const bool packs_a = g.a_col != 1;
    const int64_t all_cols = round_up(g.n, c.tile.cols), all_rows = round_up(g.m, c.tile.rows);
    const int64_t steps = kPackedBytes / 2 / (packs_a ? all_rows + all_cols : std::min<int64_t>(all_cols, 512));
    const int64_t parts = std::max<int64_t>(1, ceil_div(g.k, std::clamp<int64_t>(steps, 512, 2048)));
    c.k_chunk = std::max(kPackRows, round_up(ceil_div(g.k, parts), kPackRows));
    c.n_chunk = all_cols;
    if (!packs_a) c.n_chunk = std::min(all_cols, kPackedBytes / 2 / c.k_chunk / c.tile.cols * c.tile.cols);
    c.row_panels = ceil_div(g.m, c.tile.rows);
    c.tile_rows = std::min<int64_t>(c.row_panels, 4);
    c.tile_cols = packs_a ? std::min<int64_t>(c.n_chunk / c.tile.cols, 8) : c.n_chunk / c.tile.cols;
    shrink_tasks(c, g.k, kTaskWork, packs_a ? c.tile.cols : 256);
    const int64_t panel = INGOT_SIMD_TILES_CALL(gemm_tiles_panel_bytes, std::min(g.k, c.k_chunk));
    c.b_bytes = c.n_chunk / c.tile.cols * panel;
    c.a_bytes = packs_a ? c.row_panels * panel : 0;
    c.task_bytes = packs_a ? 0 : c.tile_rows * panel;
    return c;
  }
  static int64_t row(const Gemm<float>& g, const Cut& c, int64_t panel) {
    return std::min<int64_t>(g.m, panel * c.tile.rows);
  }
  static void pack_rows(const Gemm<float>& g, const GemmChunk& c, const GemmPackRange& r) {
    INGOT_SIMD_TILES_CALL(gemm_tiles_pack_a, g, c, r);
  }
  static void pack_columns(const Gemm<float>& g, const GemmChunk& c, const GemmPackRange& r) {
    INGOT_SIMD_TILES_CALL(gemm_tiles_pack, g, c, r);
  }
  static void run(const Gemm<float>& g, const GemmChunk& c, const GemmRange& r, void* scratch) {
    INGOT_SIMD_TILES_CALL(gemm_tiles_range, g, c, r, static_cast<float*>(scratch));
  }

 private:
  static GemmTile call_tile() { return INGOT_SIMD_TILES_CALL(gemm_tiles); }
};

}  // namespace ingot::linear_cpu
