#include "ingot/kernels/linear/linear.h"

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/gpu/cublaslt.h"
#include "ingot/kernels/linear/cpu/linear.simd.h"
#include "ingot/kernels/linear/cpu/linear_tiles.h"
#include "ingot/kernels/linear/sign_bits.h"

INGOT_SIMD_DECLARE(
    detail::GemmTile gemm_tile_f32(); detail::GemmTile gemm_tile_f64(); int64_t gemm_scratch_steps();
    void gemm_pack_f32(const detail::Gemm<float>& g, const detail::GemmChunk& c, const detail::GemmPackRange& r);
    void gemm_pack_f64(const detail::Gemm<double>& g, const detail::GemmChunk& c, const detail::GemmPackRange& r);
    void gemm_pack_a_f32(const detail::Gemm<float>& g, const detail::GemmChunk& c, const detail::GemmPackRange& r);
    void gemm_pack_a_f64(const detail::Gemm<double>& g, const detail::GemmChunk& c, const detail::GemmPackRange& r);
    void gemm_range_f32(const detail::Gemm<float>& g, const detail::GemmChunk& c, const detail::GemmRange& r,
                        float* scratch);
    void gemm_range_f64(const detail::Gemm<double>& g, const detail::GemmChunk& c, const detail::GemmRange& r,
                        double* scratch);
    void gemm_dot_f32(const detail::Gemm<float>& g, int64_t begin, int64_t end);
    void gemm_dot_f64(const detail::Gemm<double>& g, int64_t begin, int64_t end);
    void sum_columns_f32(const float* x, int64_t rows, int64_t stride, int64_t cols, float* sums);
    void sum_columns_f64(const double* x, int64_t rows, int64_t stride, int64_t cols, double* sums);)
INGOT_SIMD_TILES_DECLARE(detail::GemmTile gemm_tiles(); int64_t gemm_tiles_panel_bytes(int64_t steps);
                         void gemm_tiles_pack(const detail::Gemm<float>& g, const detail::GemmChunk& c,
                                              const detail::GemmPackRange& r);
                         void gemm_tiles_pack_a(const detail::Gemm<float>& g, const detail::GemmChunk& c,
                                                const detail::GemmPackRange& r);
                         void gemm_tiles_range(const detail::Gemm<float>& g, const detail::GemmChunk& c,
                                               const detail::GemmRange& r, float* scratch);)

namespace ingot {
namespace {
std::atomic<bool> emulating_tiles = false;
}
void detail::emulate_tiles(bool on) { emulating_tiles = on; }

namespace {

using detail::Gemm;
using detail::GemmChunk;
using detail::GemmPackRange;
using detail::GemmRange;
using detail::GemmTile;
using detail::panel_begin;

// --- the vector code, by type
GemmTile tile_of(float) { return INGOT_SIMD_CALL(gemm_tile_f32); }
GemmTile tile_of(double) { return INGOT_SIMD_CALL(gemm_tile_f64); }
void pack(const Gemm<float>& g, const GemmChunk& c, const GemmPackRange& r) { INGOT_SIMD_CALL(gemm_pack_f32, g, c, r); }
void pack(const Gemm<double>& g, const GemmChunk& c, const GemmPackRange& r) {
  INGOT_SIMD_CALL(gemm_pack_f64, g, c, r);
}
void pack_a(const Gemm<float>& g, const GemmChunk& c, const GemmPackRange& r) {
  INGOT_SIMD_CALL(gemm_pack_a_f32, g, c, r);
}
void pack_a(const Gemm<double>& g, const GemmChunk& c, const GemmPackRange& r) {
  INGOT_SIMD_CALL(gemm_pack_a_f64, g, c, r);
}
void multiply(const Gemm<float>& g, const GemmChunk& c, const GemmRange& r, float* s) {
  INGOT_SIMD_CALL(gemm_range_f32, g, c, r, s);
}
void multiply(const Gemm<double>& g, const GemmChunk& c, const GemmRange& r, double* s) {
  INGOT_SIMD_CALL(gemm_range_f64, g, c, r, s);
}
void dot_columns(const Gemm<float>& g, int64_t begin, int64_t end) { INGOT_SIMD_CALL(gemm_dot_f32, g, begin, end); }
void dot_columns(const Gemm<double>& g, int64_t begin, int64_t end) { INGOT_SIMD_CALL(gemm_dot_f64, g, begin, end); }
void sum_columns(const float* x, int64_t rows, int64_t stride, int64_t cols, float* sums) {
  INGOT_SIMD_CALL(sum_columns_f32, x, rows, stride, cols, sums);
}
void sum_columns(const double* x, int64_t rows, int64_t stride, int64_t cols, double* sums) {
  INGOT_SIMD_CALL(sum_columns_f64, x, rows, stride, cols, sums);
}

// --- how a product is cut: by sizes only
constexpr int64_t kSerialWork = 1 << 16;  // multiply-adds; waking the pool costs as much
constexpr int64_t kPackRows = 64;         // steps that a task packs where memory runs along the rows

struct Cut {
  GemmTile tile;
  int64_t k_chunk, n_chunk;              // of b, packed together
  int64_t row_panels, tile_rows;         // of the whole product; of a task, in panels
  int64_t tile_cols;                     // of a task, in panels
  int64_t b_bytes, a_bytes, task_bytes;  // packed b of a chunk; packed a beside this b; a task's own rows of a
  bool b_in_place = false, a_in_place = false;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Halves tasks until there are enough for many threads or the tasks are small. At least `least_cols` columns stay
// together.
void shrink_tasks(Cut& c, int64_t k, int64_t task_work, int64_t least_cols) {
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

template <class Body> void run_tasks(bool serial, int64_t tasks, Body&& body) {
  if (!serial) return parallel_tasks(tasks, body);
  for (int64_t task = 0; task < tasks; ++task) body(task);
}

// Sapphire Rapids does bf16 dot products at half the rate (counted in operations) of fp32 multiply-adds, Zen 4 and 5 at
// twice this rate. The CPU's maker decides, not a timing, so that one kind of CPU always sums in one order.
bool bf16_dots_pay() {
#if defined(__x86_64__)
  static const bool slow = __builtin_cpu_is("intel");
  return cpu_level() == CpuLevel::avx512_bf16 && !slow;
#else
  return false;
#endif
}

// Both operands of a weight gradient lie across the sum and are used little, so packing them costs a tenth of the
// product; the weights of an input gradient lie in the same way. A step of AVX-512's micro-tile takes 14 cycles, in
// which Zen 5 fetches its three or four lines from the second-level cache, whatever their stride. AVX2's takes six, and
// Intel's caches have not been measured. The same sums in the same order either way.
bool reads_across_pay() {
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
  static constexpr int64_t kStride = 2048;             // bytes: more of b's rows of whole pages would share a set of L1

  static Cut cut(const Gemm<T>& g) {
    Cut c{.tile = tile_of(T{})};
    const bool packs_a = g.a_col != 1;
    const int64_t size = sizeof(T), depth = std::max<int64_t>(1, std::min<int64_t>(g.k, 2048));
    c.n_chunk = std::min(round_up(g.n, c.tile.cols), std::max<int64_t>(1, kPacked / depth / c.tile.cols) * c.tile.cols);
    c.k_chunk = std::max(depth, kPacked / c.n_chunk);
    // With both operands packed, the packed data is used at once and should still be in the second-level cache.
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

// A product by tiles of bf16, some ten times as fast: packed and rounded data should be used often, so a task packs its
// rows of a for all columns of a chunk.
struct ByTiles {
  static constexpr int64_t kPackedBytes = 1 << 20;  // of b, and of a and b together: half a second-level cache
  static constexpr int64_t kTaskWork = 1 << 21;     // multiply-adds: a few us

  static bool apply() { return cpu_level() >= CpuLevel::avx512_amx || emulating_tiles.load(std::memory_order_relaxed); }
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
  char* before = static_cast<char*>(g.packed_b);
  each_chunk(g, cut, [&](GemmChunk chunk, int64_t col_panels) {
    if (g.a_col != 1 && !cut.a_in_place) chunk.packed_a = scratch + own_b_bytes;
    if (!cut.b_in_place) chunk.packed = before ? before : scratch;
    if (before) before += cut.b_bytes;
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

// --- the entry points
Tensor part(const Tensor& t, int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) {
  Tensor p(static_cast<char*>(t.data) + (row_begin * t.row_stride() + col_begin) * size_of(t.dtype), t.dtype,
           {row_end - row_begin, col_end - col_begin}, t.device);
  p.stride[0] = t.row_stride();
  return p;
}

void check_matrix(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t cols, const Tensor& like) {
  INGOT_CHECK(t.dtype == like.dtype, op, ": ", name, ": found dtype ", t.dtype, ", expected ", like.dtype);
  INGOT_CHECK(t.device == like.device, op, ": ", name, ": found it on ", t.device, ", expected ", like.device);
  INGOT_CHECK(t.rank() >= 1 && t.rows() == rows && t.cols() == cols, op, ": ", name, ": found ", t.shape, ", expected ",
              rows, " rows of ", cols);
  INGOT_CHECK(t.rows_uniform(), op, ": ", name, ": found rows ", t.shape,
              " that no single stride reaches or whose last stride is not 1, expected row-major with one row stride");
}
// A sum of 16-bit products may be kept in f32.
Tensor sum_like(const Tensor& t, Tensor like) {
  if (t.dtype == DType::f32 && (like.dtype == DType::bf16 || like.dtype == DType::f16)) like.dtype = DType::f32;
  return like;
}
void check_sums(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t cols, const Tensor& like) {
  check_matrix(op, name, t, rows, cols, sum_like(t, like));
}
void check_workspace(const char* op, const Tensor& t, const Tensor& like) {
  if (!t) return;
  INGOT_CHECK(t.device == like.device, op, ": workspace: found it on ", t.device, ", expected ", like.device);
  INGOT_CHECK(t.dtype == DType::u8 && t.contiguous(), op, ": workspace: found ", t.shape, " of ", t.dtype,
              ", expected contiguous bytes");
}
void check_signs(const char* op, const Tensor& t, Act act, int64_t rows, int64_t cols, const Tensor& like) {
  INGOT_CHECK(slope_follows_from_value_and_sign(act), op, ": found signs with ", name_of(act),
              ", expected leaky_relu_squared or relu_squared");
  INGOT_CHECK(like.dtype != DType::f16, op, ": found signs with f16, whose squares underflow; expected pre");
  INGOT_CHECK(t.device == like.device, op, ": signs: found it on ", t.device, ", expected ", like.device);
  const int64_t expected = linear_sign_bytes(rows, cols, like.device);
  INGOT_CHECK(t.dtype == DType::u8 && t.contiguous() && t.numel() == expected, op, ": signs: found ", t.shape, " of ",
              t.dtype, ", expected ", expected, " contiguous bytes");
  INGOT_CHECK(reinterpret_cast<uintptr_t>(t.data) % 8 == 0, op,
              ": signs: found an address not aligned to 8 bytes, expected an aligned one");
}
void check_vector(const char* op, const char* name, const Tensor& t, int64_t n, const Tensor& like) {
  INGOT_CHECK(t.dtype == like.dtype, op, ": ", name, ": found dtype ", t.dtype, ", expected ", like.dtype);
  INGOT_CHECK(t.device == like.device, op, ": ", name, ": found it on ", t.device, ", expected ", like.device);
  INGOT_CHECK(t.rank() == 1 && t.size(0) == n && (n <= 1 || t.stride[0] == 1), op, ": ", name, ": found ", t.shape,
              ", expected a contiguous vector of ", n);
}

template <class T>
Gemm<T> gemm_of(const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
                Products products) {
  Gemm<T> g;
  g.m = c.rows();
  g.n = c.cols();
  g.k = transpose_a ? a.rows() : a.cols();
  g.a = a.ptr<T>();
  (transpose_a ? g.a_col : g.a_row) = a.row_stride();
  (transpose_a ? g.a_row : g.a_col) = 1;
  g.b = b.ptr<T>();
  (transpose_b ? g.b_col : g.b_row) = b.row_stride();
  (transpose_b ? g.b_row : g.b_col) = 1;
  g.c = c.ptr<T>();
  g.ldc = c.row_stride();
  g.add = g.c;
  g.ld_add = g.ldc;
  g.round = products == Products::bf16 && std::is_same_v<T, float>;
  return g;
}

}  // namespace

namespace {
MatMul each(const MatMul& m, int64_t i) {
  MatMul one = m;
  for (Tensor* t : {&one.a, &one.b, &one.c}) *t = t->row(i);
  return one;
}
}  // namespace

namespace cpu {

namespace {
template <class T> void keep_signs(const Tensor& pre, uint8_t* signs, int64_t stride) {
  for (int64_t r = 0; r < pre.rows(); ++r)
    for (int64_t c = 0; c < pre.cols(); ++c) signs[r * stride + c] = pre.row(r).ptr<T>()[c] > 0;
}
// dx *= f', from f's values and their arguments' signs.
template <class T>
void multiply_by_slopes(Act act, const Tensor& dx, const Tensor& y, const uint8_t* signs, int64_t stride) {
  with_activation(act, [&](auto f) {
    using F = decltype(f);
    if constexpr (has_slope_from_value_and_sign<F>)
      for (int64_t r = 0; r < dx.rows(); ++r) {
        T* const to = dx.ptr<T>() + r * dx.row_stride();
        const T* const value = y.ptr<T>() + r * y.row_stride();
        for (int64_t c = 0; c < dx.cols(); ++c)
          to[c] *= F::slope_from_value_and_sign(value[c], signs[r * stride + c] != 0);
      }
  });
}
}  // namespace

void linear(const Linear& a, Stream stream) {
  with_wide_float_type(a.x.dtype, "linear", [&](auto type) {
    using T = decltype(type);
    const Tensor& out = a.pre ? a.pre : a.y;
    Gemm<T> g = gemm_of<T>(a.x, false, a.w, true, out, a.products);
    g.alpha = T(a.alpha);
    g.beta = T(a.accumulate);
    g.bias = a.b ? a.b.ptr<T>() : nullptr;
    g.thin = true;
    g.packed_b = a.w_packed.data;
    if (a.act == Act::identity && !a.pre) return product(g);
    product(g, [&](int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
      if (a.signs) keep_signs<T>(part(out, r0, r1, c0, c1), a.signs.ptr<uint8_t>() + r0 * g.n + c0, g.n);
      activate({.act = a.act, .x = part(out, r0, r1, c0, c1), .y = part(a.y, r0, r1, c0, c1)}, stream);
    });
  });
}

namespace {

// The cut and the packing of b depend on b alone.
template <class T> Gemm<T> gemm_of_weights(const Tensor& w, Products products) {
  const Tensor x(nullptr, w.dtype, {1, w.cols()}), y(nullptr, w.dtype, {1, w.rows()});
  Gemm<T> g = gemm_of<T>(x, false, w, true, y, products);
  g.thin = true;
  return g;
}
template <class T> int64_t packed_bytes(const Tensor& w, Products products) {
  return with_kind(gemm_of_weights<T>(w, products), [](auto how, const Gemm<T>& g) {
    const Cut cut = decltype(how)::cut(g);
    return ceil_div(g.n, cut.n_chunk) * std::max<int64_t>(1, ceil_div(g.k, cut.k_chunk)) * cut.b_bytes;
  });
}
template <class T> void pack_weights(const LinearPack& a) {
  with_kind(gemm_of_weights<T>(a.w, a.products), [&](auto how, const Gemm<T>& g) {
    const Cut cut = decltype(how)::cut(g);
    char* to = static_cast<char*>(a.packed.data);
    if (cut.b_bytes == 0) return;
    each_chunk(g, cut, [&](GemmChunk chunk, int64_t col_panels) {
      chunk.packed = to;
      pack_chunk<decltype(how)>(g, chunk, 0, col_panels, g.n * g.k <= kSerialWork);
      to += cut.b_bytes;
    });
  });
}

// dx += (dy W) * f'(pre), a few rows at a time through a temporary, because the slope must not multiply the old dx.
template <class T> void add_sloped(const LinearBackward& a, Stream stream) {
  constexpr int64_t kRows = 128;
  const int64_t rows = a.dx.rows(), cols = a.dx.cols();
  // Slot 3 of this thread: product() uses its own.
  T* memory = static_cast<T*>(thread_scratch(3, std::min(rows, kRows) * cols * int64_t(sizeof(T))));
  for (int64_t r = 0; r < rows; r += kRows) {
    const int64_t end = std::min(rows, r + kRows);
    const Tensor fresh(memory, {end - r, cols});
    product(gemm_of<T>(part(a.dy, r, end, 0, a.dy.cols()), false, a.w, false, fresh, a.products));
    activate_backward({.act = a.act, .dy = fresh, .x = part(a.pre, r, end, 0, cols), .dx = fresh}, stream);
    for (int64_t i = r; i < end; ++i) {
      T* to = a.dx.ptr<T>() + i * a.dx.row_stride();
      for (int64_t j = 0; j < cols; ++j) to[j] += memory[(i - r) * cols + j];
    }
  }
}

template <class T> void backward(const LinearBackward& a, Stream stream) {
  const bool with_slopes = a.dx && !a.accumulate_dx && a.act != Act::identity;  // x is formed where slopes are
  if (a.form_x && !with_slopes) activate({.act = a.act, .x = a.pre, .y = a.x}, stream);
  if (a.dx) {
    if (a.accumulate_dx && a.pre && a.act != Act::identity) {
      add_sloped<T>(a, stream);
    } else {
      Gemm<T> g = gemm_of<T>(a.dy, false, a.w, false, a.dx, a.products);
      g.beta = T(a.accumulate_dx);
      if (a.signs)
        product(g, [&](int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
          multiply_by_slopes<T>(a.act, part(a.dx, r0, r1, c0, c1), part(a.x, r0, r1, c0, c1),
                                a.signs.ptr<uint8_t>() + r0 * g.n + c0, g.n);
        });
      else if (a.act == Act::identity || !a.pre)
        product(g);
      else
        product(g, [&](int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
          const Tensor dx = part(a.dx, r0, r1, c0, c1);
          activate_backward({.act = a.act,
                             .dy = dx,
                             .x = part(a.pre, r0, r1, c0, c1),
                             .dx = dx,
                             .y = a.form_x ? part(a.x, r0, r1, c0, c1) : Tensor()},
                            stream);
        });
    }
  }
  if (a.dw) {
    Gemm<T> g = gemm_of<T>(a.dy, true, a.x, false, a.dw, a.products);
    g.beta = 1;
    product(g);
  }
  if (a.db) {
    const T* dy = a.dy.ptr<T>();
    T* db = a.db.ptr<T>();
    const int64_t rows = a.dy.rows(), stride = a.dy.row_stride(), n = a.dy.cols();
    parallel_for(n, rows * n <= kSerialWork ? n : 64,
                 [&](int64_t begin, int64_t end) { sum_columns(dy + begin, rows, stride, end - begin, db + begin); });
  }
}

}  // namespace

int64_t linear_packed_bytes(const Tensor& w, Products products) {
  return with_wide_float_type(w.dtype, "linear_packed_bytes",
                              [&](auto type) { return packed_bytes<decltype(type)>(w, products); });
}
void linear_pack(const LinearPack& a) {
  with_wide_float_type(a.w.dtype, "linear_pack", [&](auto type) { pack_weights<decltype(type)>(a); });
}

void linear_backward(const LinearBackward& a, Stream stream) {
  with_wide_float_type(a.dy.dtype, "linear_backward", [&](auto type) { backward<decltype(type)>(a, stream); });
}

void matmul(const MatMul& m, Stream) {
  with_wide_float_type(m.a.dtype, "matmul", [&](auto type) {
    using T = decltype(type);
    Gemm<T> g = gemm_of<T>(m.a, m.transpose_a, m.b, m.transpose_b, m.c, m.products);
    g.alpha = T(m.alpha);
    g.beta = T(m.beta);
    g.lower = m.symmetric;
    g.bias = m.bias ? m.bias.ptr<T>() : nullptr;
    if (m.add) {
      g.add = m.add.ptr<T>();
      g.ld_add = m.add.row_stride();
    }
    product(g);
    if (!m.symmetric) return;
    // Both halves have the same bits: the products commute and the sums run in the same order.
    parallel_for(g.m, g.m * g.n <= kSerialWork ? g.m : 64, [&](int64_t begin, int64_t end) {
      for (int64_t j0 = begin; j0 < g.n; j0 += 32)
        for (int64_t i = begin; i < end; ++i)
          for (int64_t j = std::max(i + 1, j0); j < std::min(g.n, j0 + 32); ++j)
            g.c[i * g.ldc + j] = g.c[j * g.ldc + i];
    });
  });
}

void matmul_each(const MatMul& m, Stream stream) {
  for (int64_t i = 0; i < m.a.size(0); ++i) cpu::matmul(each(m, i), stream);
}

}  // namespace cpu

namespace cuda {
void linear(const Linear& a, Stream stream);
void linear_backward(const LinearBackward& a, Stream stream);
void matmul(const MatMul& m, Stream stream);
void matmul_each(const MatMul& m, Stream stream);
}  // namespace cuda

void linear(const Linear& a, Stream stream) {
  const int64_t rows = a.x.rows(), n = a.w.rows(), k = a.x.cols();
  check_matrix("linear", "x", a.x, rows, k, a.x);
  check_matrix("linear", "w", a.w, n, k, a.x);
  check_matrix("linear", "y", a.y, rows, n, a.x);
  check_workspace("linear", a.workspace, a.x);
  if (a.b) check_vector("linear", "b", a.b, n, a.x);
  if (a.pre) check_matrix("linear", "pre", a.pre, rows, n, a.x);
  if (a.signs) check_signs("linear", a.signs, a.act, rows, n, a.x);
  if (a.w_packed) {
    INGOT_CHECK(a.w_packed.device.kind == Device::cpu && a.x.device.kind == Device::cpu,
                "linear: w_packed: found it on ", a.w_packed.device, " beside x on ", a.x.device,
                ", expected both on a cpu");
    INGOT_CHECK_GE(a.w_packed.bytes(), linear_packed_bytes(a.w, a.products), "linear: w_packed bytes");
  }
  if (a.accumulate)
    INGOT_CHECK(a.act == Act::identity && !a.b && !a.pre, "linear: found accumulate with ",
                a.b     ? "a bias"
                : a.pre ? "pre"
                        : "an activation",
                ", expected the identity, no bias and no pre");
  INGOT_DISPATCH(LINEAR, a.x.device, linear, a, stream);
}

void linear_backward(const LinearBackward& a, Stream stream) {
  const int64_t rows = a.dy.rows(), n = a.dy.cols();
  check_matrix("linear_backward", "dy", a.dy, rows, n, a.dy);
  if (a.dx) {
    INGOT_CHECK(a.w, "linear_backward: found dx without w, expected w");
    check_matrix("linear_backward", "w", a.w, n, a.dx.cols(), a.dy);
    check_matrix("linear_backward", "dx", a.dx, rows, a.w.cols(), a.dy);
    if (a.pre) check_matrix("linear_backward", "pre", a.pre, rows, a.w.cols(), a.dy);
    INGOT_CHECK(a.pre || a.signs || a.act == Act::identity, "linear_backward: found activation ", name_of(a.act),
                " without pre, expected pre, or x and signs");
    if (a.signs) {
      INGOT_CHECK(a.x && !a.pre && !a.form_x && !a.accumulate_dx, "linear_backward: found signs with ",
                  !a.x       ? "no x"
                  : a.pre    ? "pre"
                  : a.form_x ? "form_x"
                             : "accumulate_dx",
                  ", expected x and none of the others");
      check_matrix("linear_backward", "x", a.x, rows, a.w.cols(), a.dy);
      check_signs("linear_backward", a.signs, a.act, rows, a.w.cols(), a.dy);
    }
  }
  if (a.dw) {
    INGOT_CHECK(a.x, "linear_backward: found dw without x, expected x");
    check_matrix("linear_backward", "x", a.x, rows, a.dw.cols(), a.dy);
    check_sums("linear_backward", "dw", a.dw, n, a.x.cols(), a.dy);
  }
  if (a.db) check_vector("linear_backward", "db", a.db, n, sum_like(a.db, a.dy));
  check_workspace("linear_backward", a.workspace, a.dy);
  if (a.form_x) {
    INGOT_CHECK(a.x && a.pre, "linear_backward: found form_x without x or pre, expected both");
    check_matrix("linear_backward", "x", a.x, rows, a.x.cols(), a.dy);
    check_matrix("linear_backward", "pre", a.pre, rows, a.x.cols(), a.dy);
    if (a.dy.device.kind != Device::cpu) activate({.act = a.act, .x = a.pre, .y = a.x}, stream);
  }
  INGOT_DISPATCH(LINEAR, a.dy.device, linear_backward, a, stream);
}

namespace {
void check(const MatMul& m) {
  const int64_t rows = m.transpose_a ? m.a.cols() : m.a.rows(), k = m.transpose_a ? m.a.rows() : m.a.cols();
  const int64_t cols = m.transpose_b ? m.b.rows() : m.b.cols();
  check_matrix("matmul", "a", m.a, m.a.rows(), m.a.cols(), m.a);
  check_matrix("matmul", "b", m.b, m.transpose_b ? cols : k, m.transpose_b ? k : cols, m.a);
  check_sums("matmul", "c", m.c, rows, cols, m.a);
  if (m.add) check_matrix("matmul", "add", m.add, rows, cols, m.c);
  check_workspace("matmul", m.workspace, m.a);
  if (m.bias) {
    check_vector("matmul", "bias", m.bias, cols, m.c);
    INGOT_CHECK(!m.symmetric, "matmul: found a bias in a symmetric product, expected none");
  }
  if (m.symmetric) INGOT_CHECK_EQ(rows, cols, "matmul: symmetric");
}
}  // namespace

void matmul(const MatMul& m, Stream stream) {
  check(m);
  INGOT_DISPATCH(LINEAR, m.a.device, matmul, m, stream);
}

void matmul_each(const MatMul& m, Stream stream) {
  for (const auto& [name, t] : {std::pair{"a", &m.a}, {"b", &m.b}, {"c", &m.c}})
    INGOT_CHECK(t->rank() == 3 && t->size(0) == m.a.size(0), "matmul_each: ", name, ": found shape ", t->shape,
                ", expected rank 3 and as many matrices as a of shape ", m.a.shape);
  INGOT_CHECK(!m.bias && !m.symmetric, "matmul_each: found ", m.bias ? "a bias" : "symmetric", ", expected none");
  INGOT_CHECK(!m.add || m.add.rank() == 2, "matmul_each: found add of shape ", m.add.shape,
              ", expected one matrix for all");
  if (m.a.size(0) == 0) return;
  check(each(m, 0));
  INGOT_DISPATCH(LINEAR, m.a.device, matmul_each, m, stream);
}

void matmul_plain(const MatMul& m) {
  check(m);
  with_wide_float_type(m.a.dtype, "matmul_plain", [&](auto type) {
    using T = decltype(type);
    Gemm<T> g = gemm_of<T>(m.a, m.transpose_a, m.b, m.transpose_b, m.c, Products::fp32);
    const Tensor& add = m.add ? m.add : m.c;
    for (int64_t i = 0; i < g.m; ++i)
      for (int64_t j = 0; j < g.n; ++j) {
        T sum = 0;
        for (int64_t p = 0; p < g.k; ++p) sum += g.a[i * g.a_row + p * g.a_col] * g.b[p * g.b_row + j * g.b_col];
        sum *= T(m.alpha);
        if (m.bias) sum += m.bias.ptr<T>()[j];
        if (m.beta != 0) sum += T(m.beta) * add.ptr<T>()[i * add.row_stride() + j];
        g.c[i * g.ldc + j] = sum;
      }
  });
}

int64_t linear_packed_bytes(const Tensor& w, Products products) { return cpu::linear_packed_bytes(w, products); }
void linear_pack(const LinearPack& a) {
  INGOT_CHECK(a.w.device.kind == Device::cpu, "linear_pack: found w on ", a.w.device, ", expected the CPU");
  check_matrix("linear_pack", "w", a.w, a.w.rows(), a.w.cols(), a.w);
  INGOT_CHECK_GE(a.packed.bytes(), linear_packed_bytes(a.w, a.products), "linear_pack: packed bytes");
  cpu::linear_pack(a);
}

int64_t linear_sign_bytes(int64_t rows, int64_t cols, Device device) {
  return device.kind == Device::cuda ? sign_bits::words(rows, cols) * int64_t(sizeof(uint64_t)) : rows * cols;
}
int64_t linear_workspace_bytes(Device device) { return device.kind == Device::cuda ? gpu::kLtWorkspaceBytes : 0; }
int64_t bytes(const Linear& a) {
  const int64_t outputs = (a.pre ? 2 : 1) + (a.accumulate ? 1 : 0);
  return a.x.bytes() + a.w.bytes() + (a.b ? a.b.bytes() : 0) + outputs * a.y.bytes();
}
int64_t flops(const Linear& a) { return 2 * a.x.rows() * a.w.rows() * a.w.cols(); }

}  // namespace ingot
