// Packed products after Goto and van de Geijn (ACM TOMS 34(3), 2008): a panel of b stays in L1, rows of a stream past
// it, and a micro-tile of c lives in registers. Every element of c is one chain of multiply-adds over p, cut at fixed
// places (a few last columns may be dot products): the value depends on the sizes and the CPU level, never on the tiles
// or the threads.
#include "ingot/kernels/linear/cpu/linear.simd.h"

#include "ingot/core/cpu/simd.h"
#include "ingot/kernels/linear/cpu/linear_words.simd.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_SIMD {

using detail::Gemm;
using detail::GemmChunk;
using detail::GemmPackRange;
using detail::GemmRange;
using detail::GemmTile;

namespace {

// rows x 2 accumulators, two vectors of b and one vector of a fill the register file.
constexpr int kRows = kVecBytes == 64 ? 14 : 6;
constexpr int64_t kDepth = 256;  // the most steps of the sum between two updates of c, so that a panel of b stays in L1

constexpr int64_t kLargeBytes = 1 << 20;  // of c: a second-level cache

template <class T> constexpr int kCols = 2 * kLanes<T>;

// The sum over [0, k) is divided into equal parts of at most kDepth steps, each a multiple of `unit`.
int64_t depth_step(int64_t k, int64_t depth, int64_t unit) {
  const int64_t parts = k <= depth ? 1 : (k + depth - 1) / depth;
  const int64_t step = (k + parts - 1) / parts;
  return (step + unit - 1) / unit * unit;
}

// The place of a micro-tile in c.
template <class T> struct Out {
  T* c;
  int64_t ldc;
  const T* add;  // null: nothing is added
  int64_t ld_add;
  const T* bias;
  T alpha, beta;
  int64_t cols;  // columns of the micro-tile inside c
  bool far;      // `add` is probably not in the inner caches
};
// Prefetches the tile of `add`, which is read after the loop, about a thousand cycles later.
template <class T> INGOT_SIMD_INLINE void ask_for(const Out<T>& out, int rows) {
  for (int i = 0; i < rows; ++i)
    for (int line = 0; line < int(kCols<T> * sizeof(T)); line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(out.add + i * out.ld_add) + line);
}

template <class T, int R, int V> INGOT_SIMD_INLINE void write_tile(const Vec<T> (&acc)[R][V], const Out<T>& out) {
  constexpr int L = kLanes<T>;
  if (out.cols == V * L) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Vec<T> bias = out.bias ? load(out.bias + v * L) : Vec<T>{};
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        Vec<T> y = acc[i][v] * out.alpha;
        if (out.bias) y += bias;
        if (out.add) y += load(out.add + i * out.ld_add + v * L) * out.beta;
        store(out.c + i * out.ldc + v * L, y);
      }
    }
    return;
  }
  T tile[R][V * L];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(&tile[i][v * L], acc[i][v]);
  for (int i = 0; i < R; ++i)
    for (int64_t j = 0; j < out.cols; ++j) {
      T y = tile[i][j] * out.alpha;
      if (out.bias) y += out.bias[j];
      if (out.add) y = __builtin_fma(out.add[i * out.ld_add + j], out.beta, y);
      out.c[i * out.ldc + j] = y;
    }
}

// acc[i][v] = sum_p a[i * a_row + p * a_col] * b[p * b_step + v * lanes ...]
template <class T, int R, int V>
void micro(int64_t k, const T* a, int64_t a_row, int64_t a_col, const T* b, int64_t b_step, const Out<T>& out) {
  if (out.far) ask_for(out, R);
  Vec<T> acc[R][V] = {};
  // Five rows are reached from one pointer by x86 addressing (0, 1, 2, 3, 4 strides); more pointers would spill.
  const T* a0 = a;
  const T* a5 = a + 5 * a_row;
  const T* a10 = a + 10 * a_row;
  for (int64_t p = 0; p < k; ++p) {
    Vec<T> bv[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) bv[v] = load(b + v * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const T* row = i < 5 ? a0 + i * a_row : i < 10 ? a5 + (i - 5) * a_row : a10 + (i - 10) * a_row;
      const Vec<T> av = *row - Vec<T>{};
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[i][v] += av * bv[v];
    }
    a0 += a_col;
    if (R > 5) a5 += a_col;
    if (R > 10) a10 += a_col;
    b += b_step;
  }
  write_tile<T, R, V>(acc, out);
}

template <class T> using Micro = void (*)(int64_t, const T*, int64_t, int64_t, const T*, int64_t, const Out<T>&);

// at[R][V] is micro() for R rows and V vectors.
template <class T> struct MicroTable {
  Micro<T> at[kRows + 1][3] = {};
  template <int R> constexpr void fill() {
    at[R][1] = &micro<T, R, 1>;
    at[R][2] = &micro<T, R, 2>;
    if constexpr (R > 1) fill<R - 1>();
  }
  constexpr MicroTable() { fill<kRows>(); }
};
template <class T> constexpr MicroTable<T> kMicro;

// A narrow last panel would cost a whole vector of columns. Where both operands lie along the sum (a_col == b_row ==
// 1), a few columns are cheaper as dot products: the panel is packed as [column][p].
template <class T> bool is_thin(const Gemm<T>& g, int64_t cols) { return g.thin && cols <= kLanes<T> / 4; }
template <class T> constexpr int kThinRows = kRows < kLanes<T> ? kRows : kLanes<T>;

// r[0][i] = the sum of r[i]'s lanes.
template <class T, int S = 1> INGOT_SIMD_INLINE void add_across(Vec<T> (&r)[kLanes<T>]) {
  constexpr int L = kLanes<T>;
  if constexpr (S < L) {
    Vec<typename IndexOf<T>::type> own{}, other{};
    for (int j = 0; j < L; ++j) {
      own[j] = j & S ? j + L : j;
      other[j] = j & S ? (j ^ S) + L : j ^ S;
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; i += 2 * S) r[i] = shuffle(r[i], r[i + S], own) + shuffle(r[i], r[i + S], other);
    add_across<T, 2 * S>(r);
  }
}
template <class T, int R> INGOT_SIMD_INLINE void write_thin(Vec<T> (&sums)[kLanes<T>], int64_t j, const Out<T>& out) {
  add_across<T>(sums);
  T column[kLanes<T>];
  store(column, sums[0]);
  for (int i = 0; i < R; ++i) {
    T y = column[i] * out.alpha;
    if (out.bias) y += out.bias[j];
    if (out.add) y = __builtin_fma(out.add[i * out.ld_add + j], out.beta, y);
    out.c[i * out.ldc + j] = y;
  }
}
// c[i][j] = sum_p a[i * a_row + p] * b[j * b_col + p]
template <class T, int R>
void micro_thin(int64_t k, const T* a, int64_t a_row, const T* b, int64_t b_col, const Out<T>& out) {
  constexpr int L = kLanes<T>;
  for (int64_t j = 0; j < out.cols; ++j, b += b_col) {
    Vec<T> acc[L] = {};
    int64_t p = 0;
    for (; p + L <= k; p += L) {
      const Vec<T> bv = load(b + p);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) acc[i] += load(a + i * a_row + p) * bv;
    }
    if (p < k)
      for (int i = 0; i < R; ++i) acc[i] += load_tail(a + i * a_row + p, k - p) * load_tail(b + p, k - p);
    write_thin<T, R>(acc, j, out);
  }
}
template <class T> using MicroThin = void (*)(int64_t, const T*, int64_t, const T*, int64_t, const Out<T>&);
template <class T> struct ThinTable {
  MicroThin<T> at[kThinRows<T> + 1] = {};
  template <int R> constexpr void fill() {
    at[R] = &micro_thin<T, R>;
    if constexpr (R > 1) fill<R - 1>();
  }
  constexpr ThinTable() { fill<kThinRows<T>>(); }
};
template <class T> constexpr ThinTable<T> kMicroThin;

template <class T>
void pack_thin(const T* b, int64_t b_col, int64_t k, int64_t cols, bool round, T* to, int64_t to_col) {
  for (int64_t j = 0; j < cols; ++j)
    for (int64_t p = 0; p < k; ++p) to[j * to_col + p] = round ? round_bf16(b[j * b_col + p]) : b[j * b_col + p];
}

// One panel of b: to[p][j] = b[p * b_row + j * b_col] for p < k, j < cols, zero up to `width` columns.
template <class T, bool kRound>
void pack_panel(const T* b, int64_t b_row, int64_t b_col, int64_t k, int64_t cols, int64_t width, T* to) {
  constexpr int L = kLanes<T>;
  const auto keep = [](auto x) { return kRound ? round_bf16(x) : x; };
  if (b_col == 1 && cols == 2 * L) {
    for (int64_t p = 0; p < k; ++p, b += b_row, to += 2 * L) {
      store(to, keep(load(b)));
      store(to + L, keep(load(b + L)));
    }
    return;
  }
  if (b_col == 1) {
    for (int64_t p = 0; p < k; ++p)
      for (int64_t j = 0; j < width; j += L) {
        const int64_t left = cols - j;
        const T* from = b + p * b_row + j;
        store(to + p * width + j, keep(left >= L ? load(from) : left > 0 ? load_tail(from, left) : Vec<T>{}));
      }
    return;
  }
  for (int64_t j = 0; j < width; j += L) {
    int64_t p = 0;
    if (cols - j >= L)
      for (; p + L <= k; p += L) {
        Vec<T> r[L];
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) r[i] = keep(load(b + p * b_row + (j + i) * b_col));
        exchange<T, 1>(r);
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) store(to + (p + i) * width + j, r[i]);
      }
    for (; p < k; ++p)
      for (int64_t i = 0; i < L; ++i)
        to[p * width + j + i] = j + i < cols ? keep(b[p * b_row + (j + i) * b_col]) : T(0);
  }
}

// Rows along the panels (b_col == 1) are read kPackSteps at a time from end to end, an order that hardware prefetchers
// recognise.
constexpr int64_t kPackSteps = 8;

// pack(start of the panel in b, start of the packed panel, p, k, cols, width) for steps [p, p + k) of the range's
// panels, each of which has k_all steps when packed.
template <class T, class Pack>
INGOT_SIMD_INLINE void each_panel(const Gemm<T>& g, const GemmChunk& chunk, const GemmPackRange& range, int64_t k_all,
                                  Pack&& pack) {
  constexpr int L = kLanes<T>, N = kCols<T>;
  const int64_t steps = g.b_col == 1 ? kPackSteps : range.p_end - range.p_begin;
  for (int64_t p = range.p_begin; p < range.p_end; p += steps) {
    const int64_t k = range.p_end - p < steps ? range.p_end - p : steps;
    for (int64_t panel = range.panel_begin; panel < range.panel_end; ++panel) {
      const int64_t j = chunk.n_begin + panel * N, left = chunk.n_end - j, cols = left < N ? left : N;
      pack(g.b + (chunk.k_begin + p) * g.b_row + j * g.b_col, static_cast<T*>(chunk.packed) + panel * N * k_all, p, k,
           cols, cols <= L ? L : N);
    }
  }
}
template <class T> void pack_part(const Gemm<T>& g, const GemmChunk& chunk, const GemmPackRange& range) {
  const int64_t k_all = chunk.k_end - chunk.k_begin;
  each_panel(g, chunk, range, k_all, [&](const T* from, T* to, int64_t p, int64_t k, int64_t cols, int64_t width) {
    if (is_thin(g, cols))
      pack_thin(from, g.b_col, k, cols, g.round, to + p, k_all);
    else if (g.round)
      pack_panel<T, true>(from, g.b_row, g.b_col, k, cols, width, to + p * width);
    else
      pack_panel<T, false>(from, g.b_row, g.b_col, k, cols, width, to + p * width);
  });
}

// Copies R elements from each of k rows: panels of a whose rows lie along memory become [p][R]. Whole registers are
// copied: elements beyond R in a row are overwritten by the next row. The last rows of a range are copied exactly,
// because the rows of another task follow.
template <class T, int R>
INGOT_SIMD_INLINE void copy_columns(const T* from, int64_t step, int64_t k, bool last, T* to) {
  constexpr int L = kLanes<T>, V = (R + L - 1) / L;
  const int64_t whole = step < V * L ? 0 : last ? k - (V * L + R - 1) / R : k;
  int64_t p = 0;
#pragma GCC unroll 8
  for (; p < whole; ++p)
    for (int v = 0; v < V; ++v) store(to + p * R + v * L, load(from + p * step + v * L));
  for (; p < k; ++p) __builtin_memcpy(to + p * R, from + p * step, sizeof(T) * R);
}
template <class T, int R> void copy_few_columns(const T* from, int64_t step, int64_t k, bool last, T* to) {
  copy_columns<T, R>(from, step, k, last, to);
}
template <class T> struct CopyTable {
  void (*at[kRows + 1])(const T*, int64_t, int64_t, bool, T*) = {};
  template <int R> constexpr void fill() {
    at[R] = &copy_few_columns<T, R>;
    if constexpr (R > 1) fill<R - 1>();
  }
  constexpr CopyTable() { fill<kRows>(); }
};
template <class T> constexpr CopyTable<T> kCopyColumns;

// panel_begin(i) for consecutive i without its division, which costs as much as half a dozen steps of a sum.
class Panels {
 public:
  Panels(int64_t first, int64_t m, int64_t panels)
      : row_(detail::panel_begin(first, m, panels)), panels_(panels), least_(m / panels), more_(m % panels) {
    rest_ = first * m % panels;
  }
  int64_t row() const { return row_; }
  int rows() const { return int(least_ + (rest_ + more_ >= panels_)); }
  void advance() {
    row_ += rows();
    rest_ += more_;
    if (rest_ >= panels_) rest_ -= panels_;
  }

 private:
  int64_t row_, panels_, least_, more_, rest_;
};

// Where rows of a lie along memory (a_col != 1): a few steps of all rows at a time, so that memory is read in order.
// Panel by panel, [p][rows of the panel]. The few steps of a panel take only some ten cycles, so panels with the usual
// numbers of rows are copied without divisions and calls.
template <class T> void pack_columns_of_a(const Gemm<T>& g, const GemmChunk& chunk, const GemmPackRange& range) {
  const int64_t panels = (g.m + kRows - 1) / kRows, k_all = chunk.k_end - chunk.k_begin;
  const Panels first(range.panel_begin, g.m, panels);
  const T* from = g.a + chunk.k_begin * g.a_col;
  for (int64_t p = range.p_begin; p < range.p_end; p += kPackSteps) {
    const int64_t k = range.p_end - p < kPackSteps ? range.p_end - p : kPackSteps;
    const bool last = p + k == range.p_end;
    Panels at = first;
    for (int64_t panel = range.panel_begin; panel < range.panel_end; ++panel, at.advance()) {
      const int rows = at.rows();
      T* to = static_cast<T*>(chunk.packed_a) + at.row() * k_all + p * rows;
      const T* x = from + at.row() + p * g.a_col;
      if (rows == kRows)
        copy_columns<T, kRows>(x, g.a_col, k, last, to);
      else if (rows == kRows - 1)
        copy_columns<T, kRows - 1>(x, g.a_col, k, last, to);
      else
        kCopyColumns<T>.at[rows](x, g.a_col, k, last, to);
      if (g.round)
        for (int64_t i = 0; i < k * rows; ++i) to[i] = round_bf16(to[i]);
    }
  }
}

// Rows of a, steps [p, p + k), rounded to bf16: [row][p].
template <class T> void round_rows(const Gemm<T>& g, int64_t row_begin, int64_t row_end, int64_t p, int64_t k, T* to) {
  constexpr int L = kLanes<T>;
  for (int64_t row = row_begin; row < row_end; ++row, to += k) {
    const T* x = g.a + row * g.a_row + p;
    int64_t q = 0;
    for (; q + L <= k; q += L) store(to + q, round_bf16(load(x + q)));
    for (; q < k; ++q) to[q] = round_bf16(x[q]);
  }
}

#if defined(__AVX512F__)
// With bf16 dot products one instruction computes two steps of the sum: both operands are packed as words of two bf16,
// the earlier step in the low half, and all lengths count words instead of steps. An odd last step is paired with a
// step of zeros.
int64_t words(int64_t steps) { return (steps + 1) / 2; }

// to[q][j] = the word of x[2 q * step + j] and x[(2 q + 1) * step + j] for j < n, zero up to `width`.
void pack_words_across(const float* x, int64_t step, int64_t k, int64_t n, int64_t width, float* to) {
  constexpr int L = kLanes<float>;
  for (int64_t p = 0; p < k; p += 2, to += width)
    for (int64_t j = 0; j < width; j += L) {
      const int64_t left = n - j, room = width - j;
      const float* from = x + p * step + j;
      const auto read = [&](const float* at) {
        return left >= L ? load(at) : left > 0 ? load_tail(at, left) : Vec<float>{};
      };
      const Vec<float> word = word_of(read(from), p + 1 < k ? read(from + step) : Vec<float>{});
      room >= L ? store(to + j, word) : store_tail(to + j, word, room);
    }
}
// The same panel from columns that lie along memory: to[q][j] = the word of x[j * step + 2 q] and the number after x[j
// * step + 2 q].
void pack_words_along(const float* x, int64_t step, int64_t k, int64_t n, int64_t width, float* to) {
  constexpr int L = kLanes<float>;
  for (int64_t j = 0; j < width; j += L)
    for (int64_t p = 0; p < k; p += 2 * L) {
      Vec<float> r[L];
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) r[i] = j + i < n ? words_along(x + (j + i) * step + p, k - p) : Vec<float>{};
      exchange<float, 1>(r);
      for (int i = 0; i < L && p + 2 * i < k; ++i) store(to + (p / 2 + i) * width + j, r[i]);
    }
}
void pack_thin_words(const float* b, int64_t b_col, int64_t k, int64_t cols, float* to, int64_t to_col) {
  constexpr int L = kLanes<float>;
  for (int64_t j = 0; j < cols; ++j)
    for (int64_t p = 0; p < k; p += 2 * L) {
      const int64_t left = words(k - p);
      const Vec<float> word = words_along(b + j * b_col + p, k - p);
      left >= L ? store(to + j * to_col + p / 2, word) : store_tail(to + j * to_col + p / 2, word, left);
    }
}
void pack_words(const Gemm<float>& g, const GemmChunk& chunk, const GemmPackRange& range) {
  const int64_t k_all = words(chunk.k_end - chunk.k_begin);
  const auto pack = [&](const float* from, float* to, int64_t p, int64_t k, int64_t cols, int64_t width) {
    if (is_thin(g, cols))
      pack_thin_words(from, g.b_col, k, cols, to + p / 2, k_all);
    else if (g.b_col == 1)
      pack_words_across(from, g.b_row, k, cols, width, to + p / 2 * width);
    else
      pack_words_along(from, g.b_col, k, cols, width, to + p / 2 * width);
  };
  each_panel(g, chunk, range, k_all, pack);
}
// The same as pack_words_across for R rows of a, R near a whole register: as copy_columns does, with whole registers
// but at the end of a range.
template <int R> INGOT_SIMD_INLINE void copy_words(const float* x, int64_t step, int64_t k, bool last, float* to) {
  const int64_t whole = step < kLanes<float> ? 0 : last ? k - 2 : k;
  int64_t p = 0;
#pragma GCC unroll 4
  for (; p + 2 <= whole; p += 2, to += R) store(to, word_of(load(x + p * step), load(x + (p + 1) * step)));
  if (p < k) pack_words_across(x + p * step, step, k - p, R, R, to);
}
void pack_words_of_a(const Gemm<float>& g, const GemmChunk& chunk, const GemmPackRange& range) {
  const int64_t panels = (g.m + kRows - 1) / kRows, k_all = words(chunk.k_end - chunk.k_begin);
  const Panels first(range.panel_begin, g.m, panels);
  for (int64_t p = range.p_begin; p < range.p_end; p += kPackSteps) {
    const int64_t k = range.p_end - p < kPackSteps ? range.p_end - p : kPackSteps;
    const bool last = p + k == range.p_end;
    Panels at = first;
    for (int64_t panel = range.panel_begin; panel < range.panel_end; ++panel, at.advance()) {
      const int rows = at.rows();
      const float* x = g.a + at.row() + (chunk.k_begin + p) * g.a_col;
      float* to = static_cast<float*>(chunk.packed_a) + at.row() * k_all + p / 2 * rows;
      if (rows == kRows)
        copy_words<kRows>(x, g.a_col, k, last, to);
      else if (rows == kRows - 1)
        copy_words<kRows - 1>(x, g.a_col, k, last, to);
      else
        pack_words_across(x, g.a_col, k, rows, rows, to);
    }
  }
}
// Rows of a, steps [p, p + k) as words: [row][words(k)].
void pack_words_of_rows(const Gemm<float>& g, int64_t row_begin, int64_t row_end, int64_t p, int64_t k, float* to) {
  constexpr int L = kLanes<float>;
  for (int64_t row = row_begin; row < row_end; ++row, to += words(k))
    for (int64_t q = 0; q < k; q += 2 * L) {
      const Vec<float> word = words_along(g.a + row * g.a_row + p + q, k - q);
      const int64_t left = words(k - q);
      left >= L ? store(to + q / 2, word) : store_tail(to + q / 2, word, left);
    }
}

template <int R, int V>
__attribute__((target("avx512bf16"))) void micro_words(int64_t k, const float* a, int64_t a_row, int64_t a_col,
                                                       const float* b, int64_t b_step, const Out<float>& out) {
  if (out.far) ask_for(out, R);
  __m512 acc[R][V] = {};
  const float* a0 = a;
  const float* a5 = a + 5 * a_row;
  const float* a10 = a + 10 * a_row;
  for (int64_t p = 0; p < k; ++p) {
    __m512bh bv[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) bv[v] = (__m512bh)_mm512_loadu_ps(b + v * 16);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const float* row = i < 5 ? a0 + i * a_row : i < 10 ? a5 + (i - 5) * a_row : a10 + (i - 10) * a_row;
      const __m512bh av = (__m512bh)_mm512_set1_ps(*row);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[i][v] = _mm512_dpbf16_ps(acc[i][v], av, bv[v]);
    }
    a0 += a_col;
    if (R > 5) a5 += a_col;
    if (R > 10) a10 += a_col;
    b += b_step;
  }
  Vec<float> sums[R][V];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sums[i][v] = (Vec<float>)acc[i][v];
  write_tile<float, R, V>(sums, out);
}
template <int R>
__attribute__((target("avx512bf16"))) void micro_thin_words(int64_t k, const float* a, int64_t a_row, const float* b,
                                                            int64_t b_col, const Out<float>& out) {
  constexpr int L = kLanes<float>;
  for (int64_t j = 0; j < out.cols; ++j, b += b_col) {
    __m512 acc[L] = {};
    for (int64_t p = 0; p < k; p += L) {
      const __mmask16 there = k - p >= L ? 0xffff : __mmask16((1u << (k - p)) - 1);
      const __m512bh bv = (__m512bh)_mm512_maskz_loadu_ps(there, b + p);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i)
        acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)_mm512_maskz_loadu_ps(there, a + i * a_row + p), bv);
    }
    Vec<float> sums[L];
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) sums[i] = (Vec<float>)acc[i];
    write_thin<float, R>(sums, j, out);
  }
}
struct ThinWordTable {
  MicroThin<float> at[kRows + 1] = {};
  template <int R> constexpr void fill() {
    at[R] = &micro_thin_words<R>;
    if constexpr (R > 1) fill<R - 1>();
  }
  constexpr ThinWordTable() { fill<kRows>(); }
};
constexpr ThinWordTable kMicroThinWords;
struct WordTable {
  Micro<float> at[kRows + 1][3] = {};
  template <int R> constexpr void fill() {
    at[R][1] = &micro_words<R, 1>;
    at[R][2] = &micro_words<R, 2>;
    if constexpr (R > 1) fill<R - 1>();
  }
  constexpr WordTable() { fill<kRows>(); }
};
constexpr WordTable kMicroWords;
#else
// Never reached: with_kind() (product.h) asks for words only at a level that has bf16 dot products.
int64_t words(int64_t steps) { return steps; }
void pack_words(const Gemm<float>&, const GemmChunk&, const GemmPackRange&) {}
void pack_words_of_a(const Gemm<float>&, const GemmChunk&, const GemmPackRange&) {}
void pack_words_of_rows(const Gemm<float>&, int64_t, int64_t, int64_t, int64_t, float*) {}
constexpr MicroTable<float> kMicroWords;
constexpr ThinTable<float> kMicroThinWords;
#endif

template <class T, bool kWords>
void multiply_thin(int64_t k, int rows, const T* a, int64_t a_row, const T* b, int64_t b_col, Out<T> out) {
  for (int n; rows > 0; rows -= n) {
    n = rows < kThinRows<T> ? rows : kThinRows<T>;
    if constexpr (kWords)
      kMicroThinWords.at[n](k, a, a_row, b, b_col, out);
    else
      kMicroThin<T>.at[n](k, a, a_row, b, b_col, out);
    a += n * a_row;
    out.c += n * out.ldc;
    if (out.add) out.add += n * out.ld_add;
  }
}

// kWords: k, k_all, p and step count words of two bf16 instead of single steps.
template <class T, bool kWords>
void multiply_range(const Gemm<T>& g, const GemmChunk& chunk, const GemmRange& range, T* scratch) {
  constexpr int L = kLanes<T>, N = kCols<T>;
  const int64_t panels = (g.m + kRows - 1) / kRows, k_steps = chunk.k_end - chunk.k_begin;
  const int64_t k_all = kWords ? words(k_steps) : k_steps;
  const int64_t step = depth_step(k_all, kDepth, 1);
  const bool round_a = g.round && g.a_col == 1, large = g.m * g.n * int64_t(sizeof(T)) >= kLargeBytes;
  const Panels first_panel(range.row_panel_begin, g.m, panels);
  const int64_t row0 = first_panel.row();
  int64_t p = 0;
  do {
    const int64_t k = k_all - p < step ? k_all - p : step;
    if (round_a) {
      const int64_t row1 = detail::panel_begin(range.row_panel_end, g.m, panels);
      if constexpr (kWords)
        pack_words_of_rows(g, row0, row1, chunk.k_begin + 2 * p, k_steps - 2 * p < 2 * k ? k_steps - 2 * p : 2 * k,
                           scratch);
      else
        round_rows(g, row0, row1, chunk.k_begin + p, k, scratch);
    }
    const bool first = chunk.k_begin + p == 0;
    for (int64_t q = range.col_panel_begin; q < range.col_panel_end; ++q) {
      const int64_t j = chunk.n_begin + q * N, left = chunk.n_end - j, cols = left < N ? left : N;
      const int64_t width = cols <= L ? L : N;
      const bool thin = is_thin(g, cols), in_place = chunk.packed == nullptr;
      const T* b = in_place ? g.b + (chunk.k_begin + p) * g.b_row + j
                            : static_cast<const T*>(chunk.packed) + q * N * k_all + p * (thin ? 1 : width);
      const int64_t b_step = in_place ? g.b_row : width;
      Panels at = first_panel;
      for (int64_t i = range.row_panel_begin; i < range.row_panel_end; ++i, at.advance()) {
        const int64_t row = at.row();
        const int rows = at.rows();
        if (g.lower && row + rows <= j) continue;
        const Out<T> out{g.c + row * g.ldc + j,
                         g.ldc,
                         !first        ? g.c + row * g.ldc + j
                         : g.beta != 0 ? g.add + row * g.ld_add + j
                                       : nullptr,
                         first ? g.ld_add : g.ldc,
                         first && g.bias ? g.bias + j : nullptr,
                         g.alpha,
                         first ? g.beta : T(1),
                         cols,
                         large && (!first || g.beta != 0)};
        const T* a = g.a + row * g.a_row + chunk.k_begin + p;
        int64_t a_row = g.a_row, a_col = 1;
        if (round_a) {
          a = scratch + (row - row0) * k;
          a_row = k;
        } else if (g.a_col != 1 && chunk.packed_a == nullptr) {
          a = g.a + row + (chunk.k_begin + p) * g.a_col;
          a_row = 1;
          a_col = g.a_col;
        } else if (g.a_col != 1) {
          a = static_cast<const T*>(chunk.packed_a) + row * k_all + p * rows;
          a_row = 1;
          a_col = rows;
        }
        if (thin)
          multiply_thin<T, kWords>(k, rows, a, a_row, b, k_all, out);
        else if constexpr (kWords)
          kMicroWords.at[rows][width / L](k, a, a_row, a_col, b, b_step, out);
        else
          kMicro<T>.at[rows][width / L](k, a, a_row, a_col, b, b_step, out);
      }
    }
    p += k;
  } while (p < k_all);
}

// Few rows of a against rows of b along memory: every row of b is read once and nothing is packed.
template <class T, int R, int C, bool kRound> INGOT_SIMD_INLINE void dot_tile(const Gemm<T>& g, int64_t i, int64_t j) {
  constexpr int L = kLanes<T>;
  Vec<T> acc[R][C] = {};
  const T* a = g.a + i * g.a_row;
  const T* b = g.b + j * g.b_col;
  int64_t p = 0;
  const auto step = [&](auto read) {
    Vec<T> av[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      av[r] = read(a + r * g.a_row + p);
      if (kRound) av[r] = round_bf16(av[r]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      Vec<T> bv = read(b + c * g.b_col + p);
      if (kRound) bv = round_bf16(bv);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][c] += av[r] * bv;
    }
  };
  for (; p + L <= g.k; p += L) step([](const T* x) { return load(x); });
  if (p < g.k) step([n = g.k - p](const T* x) { return load_tail(x, n); });
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      T y = reduce_add<T>(acc[r][c]) * g.alpha;
      if (g.bias) y += g.bias[j + c];
      if (g.beta != 0) y += g.beta * g.add[(i + r) * g.ld_add + j + c];
      g.c[(i + r) * g.ldc + j + c] = y;
    }
}
template <class T, bool kRound> void dot_columns(const Gemm<T>& g, int64_t begin, int64_t end) {
  int64_t j = begin;
  for (; j + 4 <= end; j += 4) {
    int64_t i = 0;
    for (; i + 2 <= g.m; i += 2) dot_tile<T, 2, 4, kRound>(g, i, j);
    if (i < g.m) dot_tile<T, 1, 4, kRound>(g, i, j);
  }
  for (; j < end; ++j)
    for (int64_t i = 0; i < g.m; ++i) dot_tile<T, 1, 1, kRound>(g, i, j);
}

// sums[c] += the sum of column c over all rows: partial sums of 64 rows, added in order.
template <class T> void sum_columns(const T* x, int64_t rows, int64_t stride, int64_t cols, T* sums) {
  constexpr int L = kLanes<T>;
  for (int64_t c = 0; c < cols; c += L) {
    const int64_t n = cols - c < L ? cols - c : L;
    Vec<T> total{};
    for (int64_t r0 = 0; r0 < rows; r0 += 64) {
      Vec<T> part{};
      const int64_t end = r0 + 64 < rows ? r0 + 64 : rows;
      if (n == L)
        for (int64_t r = r0; r < end; ++r) part += load(x + r * stride + c);
      else
        for (int64_t r = r0; r < end; ++r) part += load_tail(x + r * stride + c, n);
      total += part;
    }
    if (n == L)
      store(sums + c, load(sums + c) + total);
    else
      store_tail(sums + c, load_tail(sums + c, n) + total, n);
  }
}

}  // namespace

GemmTile gemm_tile_f32() { return {kRows, kCols<float>}; }
GemmTile gemm_tile_f64() { return {kRows, kCols<double>}; }
void gemm_pack_f32(const Gemm<float>& g, const GemmChunk& c, const GemmPackRange& r) {
  g.words ? pack_words(g, c, r) : pack_part(g, c, r);
}
void gemm_pack_f64(const Gemm<double>& g, const GemmChunk& c, const GemmPackRange& r) { pack_part(g, c, r); }
void gemm_pack_a_f32(const Gemm<float>& g, const GemmChunk& c, const GemmPackRange& r) {
  g.words ? pack_words_of_a(g, c, r) : pack_columns_of_a(g, c, r);
}
void gemm_pack_a_f64(const Gemm<double>& g, const GemmChunk& c, const GemmPackRange& r) { pack_columns_of_a(g, c, r); }
int64_t gemm_scratch_steps() { return kDepth + 1; }
void gemm_range_f32(const Gemm<float>& g, const GemmChunk& c, const GemmRange& r, float* scratch) {
  g.words ? multiply_range<float, true>(g, c, r, scratch) : multiply_range<float, false>(g, c, r, scratch);
}
void gemm_range_f64(const Gemm<double>& g, const GemmChunk& c, const GemmRange& r, double* scratch) {
  multiply_range<double, false>(g, c, r, scratch);
}
void gemm_dot_f32(const Gemm<float>& g, int64_t begin, int64_t end) {
  g.round ? dot_columns<float, true>(g, begin, end) : dot_columns<float, false>(g, begin, end);
}
void gemm_dot_f64(const Gemm<double>& g, int64_t begin, int64_t end) { dot_columns<double, false>(g, begin, end); }
void sum_columns_f32(const float* x, int64_t rows, int64_t stride, int64_t cols, float* sums) {
  sum_columns(x, rows, stride, cols, sums);
}
void sum_columns_f64(const double* x, int64_t rows, int64_t stride, int64_t cols, double* sums) {
  sum_columns(x, rows, stride, cols, sums);
}

}  // namespace ingot::INGOT_SIMD
