// Products of bf16 by tiles: c (16 x 16, fp32) += a (16 x 32) b (32 x 16) is one instruction where the CPU has AMX, and
// a plain loop elsewhere, so that tests of packing and edges run on every CPU. Both operands are rounded while they are
// packed; 2 x 2 tiles of c stay in registers. Every element of c is one chain over p, cut at fixed places.
#include "ingot/core/cpu/tiles.simd.h"
#include "ingot/kernels/linear/cpu/linear.simd.h"
#include "ingot/kernels/linear/cpu/linear_words.simd.h"

namespace ingot::INGOT_SIMD {

using detail::Gemm;
using detail::GemmChunk;
using detail::GemmPackRange;
using detail::GemmRange;
using detail::GemmTile;

namespace {
constexpr int kTile = 16;                  // rows of a tile, and words of each: 32 steps of the sum
constexpr int kPanel = 2 * kTile;          // rows of a, or columns of b, of a micro-tile
constexpr int kSteps = 2 * kTile;          // of the sum, per tile
constexpr int kTileWords = kTile * kTile;  // 1 KB
constexpr int L = kLanes<float>;

// --- the tile product: a and b are `steps` pairs of tiles, c gets R x C tiles of sums
#if defined(__AMX_BF16__)
// Tiles 0-3 hold c, 4-5 a, 6-7 b. Configured once per task, because configuring takes as long as a few products.
class TileUnit {
 public:
  TileUnit() { configure_tiles(); }
  ~TileUnit() { _tile_release(); }

  template <int R, int C>
  __attribute__((noinline)) void multiply(int64_t steps, const float* a, const float* b, float* c, int64_t ldc) const {
    // g++ 12 does not know that a tile load reads memory, and could otherwise move stores behind the load.
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (; steps > 0; --steps, a += 2 * kTileWords, b += 2 * kTileWords) {
      _tile_loadd(6, b, 64);
      _tile_loadd(4, a, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (C == 2) {
        _tile_loadd(7, b + kTileWords, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (R == 2) {
        _tile_loadd(5, a + kTileWords, 64);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (C == 2) _tile_dpbf16ps(3, 5, 7);
      }
    }
    const int64_t row = 4 * ldc;
    _tile_stored(0, c, row);
    if constexpr (C == 2) _tile_stored(1, c + kTile, row);
    if constexpr (R == 2) {
      _tile_stored(2, c + kTile * ldc, row);
      if constexpr (C == 2) _tile_stored(3, c + kTile * ldc + kTile, row);
    }
    asm volatile("" ::: "memory");
  }
};
#else
// The same sums in the order of Intel's description of the instruction: even and odd steps of a tile apart, then both.
class TileUnit {
 public:
  template <int R, int C> void multiply(int64_t steps, const float* a, const float* b, float* c, int64_t ldc) const {
    for (int i = 0; i < R; ++i)
      for (int j = 0; j < C; ++j) {
        float* out = c + i * kTile * ldc + j * kTile;
        for (int row = 0; row < kTile; ++row)
          for (int col = 0; col < kTile; ++col) out[row * ldc + col] = 0;
        for (int64_t s = 0; s < steps; ++s)
          add_tile(a + (2 * s + i) * kTileWords, b + (2 * s + j) * kTileWords, out, ldc);
      }
  }

 private:
  static float half(const float* word, bool high) {
    uint32_t u;
    std::memcpy(&u, word, 4);
    u = high ? u & 0xffff0000u : u << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
  }
  static void add_tile(const float* a, const float* b, float* c, int64_t ldc) {
    for (int row = 0; row < kTile; ++row) {
      float even[kTile] = {}, odd[kTile] = {};
      for (int w = 0; w < kTile; ++w) {
        const float first = half(a + row * kTile + w, false), second = half(a + row * kTile + w, true);
        for (int col = 0; col < kTile; ++col) {
          even[col] = __builtin_fmaf(first, half(b + w * kTile + col, false), even[col]);
          odd[col] = __builtin_fmaf(second, half(b + w * kTile + col, true), odd[col]);
        }
      }
      for (int col = 0; col < kTile; ++col) c[row * ldc + col] += even[col] + odd[col];
    }
  }
};
#endif

// --- packing. A lane is a row of a or a column of b; element (lane, step) is x[lane * lane_stride + step *
// step_stride].
struct Operand {
  const float* x;
  int64_t lane_stride, step_stride, lanes, steps;
};

// A tile of a keeps the words of a lane together, a tile of b the words of a step. [panel][32 steps][tile of 16 lanes];
// a second tile without lanes stays as it was. Lanes and steps beyond the operand are zero.

// Words of one packed panel.
int64_t panel_words(int64_t steps) { return (steps + kSteps - 1) / kSteps * 2 * kTileWords; }
float* tile_at(float* packed, const Operand& o, int64_t lane, int64_t step) {
  return packed + lane / kPanel * panel_words(o.steps) + step / kSteps * 2 * kTileWords +
         lane % kPanel / kTile * kTileWords;
}

// Rows of a that lie along memory: nothing is transposed, and each row is read from end to end, an order that hardware
// prefetchers recognise.
void pack_rows_along(const Operand& o, const GemmPackRange& r, float* packed) {
  for (int64_t lane = r.panel_begin * kPanel; lane < r.panel_end * kPanel && lane / kTile * kTile < o.lanes; ++lane) {
    const float* x = o.x + lane * o.lane_stride;
    float* to = tile_at(packed, o, lane, r.p_begin) + lane % kTile * kTile;
    for (int64_t step = r.p_begin; step < r.p_end; step += kSteps, to += 2 * kTileWords)
      for (int word = 0; word < kTile; word += L) {
        const int64_t n = lane < o.lanes ? o.steps - step - 2 * word : 0;
        store(to + word, n > 0 ? words_along(x + step + 2 * word, n) : Vec<float>{});
      }
  }
}

// Columns of b across memory: two rows of memory become words, all panels in turn.
void pack_columns_across(const Operand& o, const GemmPackRange& r, float* packed) {
  const int64_t end = r.panel_end * kPanel;
  for (int64_t step = r.p_begin; step < (r.p_end + kSteps - 1) / kSteps * kSteps; step += 2) {
    const float *first = o.x + step * o.step_stride, *second = first + o.step_stride;
    for (int64_t lane = r.panel_begin * kPanel; lane < end && lane / kTile * kTile < o.lanes; lane += L) {
      const int64_t n = o.lanes - lane;
      const auto read = [&](const float* x, bool exists) {
        return n >= L && exists ? load(x + lane) : n > 0 && exists ? load_tail(x + lane, n) : Vec<float>{};
      };
      float* to = tile_at(packed, o, lane, step) + step % kSteps / 2 * kTile + lane % kTile;
      store(to, word_of(read(first, step < o.steps), read(second, step + 1 < o.steps)));
    }
  }
}

// The remaining layouts transpose squares of words in registers.
template <bool kStepsAlong, bool kWhole>
INGOT_SIMD_INLINE void turn_tile(const float* x, int64_t stride, int64_t lanes, int64_t steps, float* to) {
  for (int lane = 0; lane < kTile; lane += L)
    for (int word = 0; word < kTile; word += L) {
      Vec<float> r[L];
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) {
        if constexpr (kStepsAlong) {
          const int64_t n = kWhole ? kSteps : lane + i < lanes ? steps - 2 * word : 0;
          r[i] = n > 0 ? words_along(x + (lane + i) * stride + 2 * word, n) : Vec<float>{};
        } else {
          const int64_t step = 2 * (word + i), n = kWhole ? L : lanes - lane;
          const float* from = x + step * stride + lane;
          const auto read = [&](const float* at, bool exists) {
            return n >= L && exists ? load(at) : n > 0 && exists ? load_tail(at, n) : Vec<float>{};
          };
          r[i] = word_of(read(from, kWhole || step < steps), read(from + stride, kWhole || step + 1 < steps));
        }
      }
      exchange<float, 1>(r);
      const int row = kStepsAlong ? word : lane, col = kStepsAlong ? lane : word;
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) store(to + (row + i) * kTile + col, r[i]);
    }
}
template <bool kStepsAlong> void turn_pair(const Operand& o, int64_t panel, int64_t step, float* packed) {
  const int64_t stride = kStepsAlong ? o.lane_stride : o.step_stride, steps = o.steps - step;
  for (int64_t lane = panel * kPanel; lane < (panel + 1) * kPanel && lane < o.lanes; lane += kTile) {
    const float* x = o.x + lane * o.lane_stride + step * o.step_stride;
    float* to = tile_at(packed, o, lane, step);
    if (o.lanes - lane >= kTile && steps >= kSteps)
      turn_tile<kStepsAlong, true>(x, stride, o.lanes - lane, steps, to);
    else
      turn_tile<kStepsAlong, false>(x, stride, o.lanes - lane, steps, to);
  }
}
void pack_columns_along(const Operand& o, const GemmPackRange& r, float* packed) {
  for (int64_t q = r.panel_begin; q < r.panel_end; ++q)
    for (int64_t step = r.p_begin; step < r.p_end; step += kSteps) turn_pair<true>(o, q, step, packed);
}
void pack_rows_across(const Operand& o, const GemmPackRange& r, float* packed) {
  for (int64_t step = r.p_begin; step < r.p_end; step += kSteps)
    for (int64_t q = r.panel_begin; q < r.panel_end; ++q) turn_pair<false>(o, q, step, packed);
}

Operand rows_of_a(const Gemm<float>& g, const GemmChunk& c) {
  return {g.a + c.k_begin * g.a_col, g.a_row, g.a_col, g.m, c.k_end - c.k_begin};
}
Operand columns_of_b(const Gemm<float>& g, const GemmChunk& c) {
  return {g.b + c.k_begin * g.b_row + c.n_begin * g.b_col, g.b_col, g.b_row, c.n_end - c.n_begin, c.k_end - c.k_begin};
}

// --- a micro-tile of c
struct Out {
  float* c;
  int64_t ldc;
  const float* add;  // null: nothing is added
  int64_t ld_add;
  const float* bias;
  float alpha, beta;
  int64_t rows, cols;
  bool plain() const { return alpha == 1 && !add && !bias && rows % kTile == 0 && cols % kTile == 0; }
};

void write_sums(const float* sums, const Out& out) {
  for (int64_t i = 0; i < out.rows; ++i, sums += kPanel)
    for (int64_t j = 0; j < out.cols; j += L) {
      const int64_t n = out.cols - j;
      const auto read = [&](const float* p) { return n >= L ? load(p) : load_tail(p, n); };
      Vec<float> y = load(sums + j) * out.alpha;
      if (out.bias) y += read(out.bias + j);
      if (out.add) y += read(out.add + i * out.ld_add + j) * out.beta;
      n >= L ? store(out.c + i * out.ldc + j, y) : store_tail(out.c + i * out.ldc + j, y, n);
    }
}

void micro_tile(const TileUnit& unit, int64_t steps, const float* a, const float* b, const Out& out) {
  alignas(64) float sums[kPanel * kPanel];
  const bool plain = out.plain();
  float* c = plain ? out.c : sums;
  const int64_t ldc = plain ? out.ldc : kPanel;
  if (out.rows > kTile)
    out.cols > kTile ? unit.multiply<2, 2>(steps, a, b, c, ldc) : unit.multiply<2, 1>(steps, a, b, c, ldc);
  else
    out.cols > kTile ? unit.multiply<1, 2>(steps, a, b, c, ldc) : unit.multiply<1, 1>(steps, a, b, c, ldc);
  if (!plain) write_sums(sums, out);
}

}  // namespace

GemmTile gemm_tiles() { return {kPanel, kPanel}; }
int64_t gemm_tiles_panel_bytes(int64_t steps) { return panel_words(steps) * 4; }

void gemm_tiles_pack(const Gemm<float>& g, const GemmChunk& c, const GemmPackRange& r) {
  (g.b_row == 1 ? pack_columns_along : pack_columns_across)(columns_of_b(g, c), r, static_cast<float*>(c.packed));
}
void gemm_tiles_pack_a(const Gemm<float>& g, const GemmChunk& c, const GemmPackRange& r) {
  pack_rows_across(rows_of_a(g, c), r, static_cast<float*>(c.packed_a));
}

void gemm_tiles_range(const Gemm<float>& g, const GemmChunk& chunk, const GemmRange& range, float* scratch) {
  const int64_t steps = chunk.k_end - chunk.k_begin, panel = panel_words(steps);
  const float* packed_a = static_cast<const float*>(chunk.packed_a) + range.row_panel_begin * panel;
  if (g.a_col == 1) {
    Operand rows = rows_of_a(g, chunk);
    rows.x += range.row_panel_begin * kPanel * rows.lane_stride;
    rows.lanes -= range.row_panel_begin * kPanel;
    pack_rows_along(rows, {0, range.row_panel_end - range.row_panel_begin, 0, steps}, scratch);
    packed_a = scratch;
  }
  const bool first = chunk.k_begin == 0;
  const TileUnit unit;
  const auto one = [&](int64_t i, int64_t q) {
    const int64_t j = chunk.n_begin + q * kPanel, cols = chunk.n_end - j, row = i * kPanel, rows = g.m - row;
    if (g.lower && row + kPanel <= j) return;
    Out out{.c = g.c + row * g.ldc + j, .ldc = g.ldc, .alpha = g.alpha, .beta = first ? g.beta : 1};
    out.rows = rows < kPanel ? rows : kPanel;
    out.cols = cols < kPanel ? cols : kPanel;
    out.add = !first ? out.c : g.beta != 0 ? g.add + row * g.ld_add + j : nullptr;
    out.ld_add = first ? g.ld_add : g.ldc;
    out.bias = first && g.bias ? g.bias + j : nullptr;
    micro_tile(unit, panel / (2 * kTileWords), packed_a + (i - range.row_panel_begin) * panel,
               static_cast<const float*>(chunk.packed) + q * panel, out);
  };
  // The inner loop runs along the rows of c. Along the columns, the rows of c would be written 128 bytes at a time,
  // which is 20 % slower at 1,024 columns.
  for (int64_t i = range.row_panel_begin; i < range.row_panel_end; ++i)
    for (int64_t q = range.col_panel_begin; q < range.col_panel_end; ++q) one(i, q);
}

}  // namespace ingot::INGOT_SIMD
