// Attention with queries along the vector: scores are kept transposed, (keys x lanes). Keys and values are read in
// place, one broadcast at a time, so only the queries are packed; the softmax runs down the columns, without a
// horizontal sum; and a panel of lanes skips the keys that are invisible to all its queries. Online softmax over tiles
// of keys after Milakov and Gimelshein (2018), backward from lse after Dao et al. (2022).
#include "ingot/kernels/attention/attention.simd.h"

#include <utility>

#include "ingot/core/cpu/simd.h"

namespace ingot::INGOT_SIMD {

using detail::attention_pad;
using detail::AttentionBackwardTask;
using detail::AttentionMask;
using detail::AttentionTask;

namespace {

using F = Vec<float>;
using I = Vec<int32_t>;
constexpr int W = kLanes<float>;
constexpr float kInfinity = __builtin_inff();

INGOT_SIMD_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INGOT_SIMD_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// --- three products ----------------------------------------------------------------------------------------
// Each product keeps R x V accumulators in registers. Six by two accumulators hide the latency of the multiply-adds at
// every CPU level.

// Calls use<R>(at) over [0, n) in blocks of six rows; the rest is divided so that every block has at least three rows.
template <class Use> INGOT_SIMD_INLINE void for_blocks(int64_t n, Use&& use) {
  int64_t at = 0;
  for (; n - at > 8 || n - at == 6; at += 6) use.template operator()<6>(at);
  switch (n - at) {
    case 8:
      use.template operator()<4>(at);
      use.template operator()<4>(at + 4);
      break;
    case 7:
      use.template operator()<4>(at);
      use.template operator()<3>(at + 4);
      break;
    case 5: use.template operator()<5>(at); break;
    case 4: use.template operator()<4>(at); break;
    case 3: use.template operator()<3>(at); break;
    case 2: use.template operator()<2>(at); break;
    case 1: use.template operator()<1>(at); break;
    default: break;
  }
}

// s[r][lane] = sum_c rows[r][c] * lanes[c][lane]
template <int R, int V>
void rows_by_lanes(const float* rows, int64_t row, const float* lanes, int64_t n, float* s, int64_t s_row) {
  F acc[R][V] = {};
  for (int64_t c = 0; c < n; ++c, lanes += V * W) {
    F x[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) x[v] = load(lanes + v * W);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const F b = splat(rows[r * row + c]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[r][v] += b * x[v];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(s + r * s_row + v * W, acc[r][v]);
}

// o[r][lane] = o[r][lane] * keep[lane] + sum_j columns[j][r] * p[j][lane]
template <int R, int V>
void columns_by_lanes(const float* columns, int64_t row, int64_t n, const float* p, int64_t p_row, const F (&keep)[V],
                      float* o) {
  F acc[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[r][v] = load(o + (r * V + v) * W) * keep[v];
  for (int64_t j = 0; j < n; ++j, columns += row, p += p_row) {
    F x[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) x[v] = load(p + v * W);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const F b = splat(columns[r]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[r][v] += b * x[v];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(o + (r * V + v) * W, acc[r][v]);
}

// sum[r][c] += sum_lane p[r][lane] * x[lane][c]
template <int R, int V>
void lanes_by_columns(const float* p, int64_t p_row, int64_t n, const float* x, int64_t x_row, float* sum) {
  F acc[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[r][v] = load(sum + r * x_row + v * W);
  for (int64_t l = 0; l < n; ++l, x += x_row) {
    F y[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) y[v] = load(x + v * W);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const F b = splat(p[r * p_row + l]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[r][v] += b * y[v];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(sum + r * x_row + v * W, acc[r][v]);
}

// --- rows to lanes and back --------------------------------------------------------------------------------

// Swaps the off-diagonal blocks of size S: S = 1, 2, 4 ... in turn transpose a square of vectors.
template <int S, size_t... L> INGOT_SIMD_INLINE void swap_blocks(F& a, F& b, std::index_sequence<L...>) {
  const F low = __builtin_shufflevector(a, b, ((L & S) ? int(L) - S + W : int(L))...);
  b = __builtin_shufflevector(a, b, ((L & S) ? int(L) + W : int(L) + S)...);
  a = low;
}
template <int S> INGOT_SIMD_INLINE void transpose_stage(F (&m)[W]) {
  if constexpr (S < W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
      if ((i & S) == 0) swap_blocks<S>(m[i], m[i + S], std::make_index_sequence<W>());
    transpose_stage<2 * S>(m);
  }
}
INGOT_SIMD_INLINE void transpose(F (&m)[W]) { transpose_stage<1>(m); }

// The start of lane l in a tensor of rows and heads.
struct LaneRows {
  int64_t row, head, group;
  int64_t at(int64_t lane) const { return lane / group * row + lane % group * head; }
};

// to[c][lane] = from[lane][c] * factor for W lanes, `live` of them real; the remaining lanes are 0. `rows`, if given:
// the same numbers as rows of padded length.
__attribute__((noinline)) void pack_lanes(const float* from, const LaneRows& lanes, int64_t lane, int64_t live,
                                          int64_t d, float factor, float* to, int64_t to_row, float* rows) {
  const float* base[W];
  const int64_t pd = attention_pad(d);
  for (int i = 0; i < W; ++i) base[i] = from + lanes.at(i < live ? lane + i : lane);
  int64_t c = 0;
  const auto put = [&](F(&m)[W], int64_t n) {
    if (rows)
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(rows + i * pd + c, m[i]);
    transpose(m);
    if (n >= W)
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(to + (c + i) * to_row, m[i]);
    else
      for (int i = 0; i < n; ++i) store(to + (c + i) * to_row, m[i]);
  };
  F m[W];
  for (; live >= W && c + W <= d; c += W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) m[i] = load(base[i] + c) * factor;
    put(m, W);
  }
  for (; c < d; c += W) {
    for (int i = 0; i < W; ++i) m[i] = i < live ? load_some(base[i] + c, d - c) * factor : F{};
    put(m, d - c);
  }
  for (; rows && c < pd; c += W)  // the padding beyond: whole vectors
    for (int i = 0; i < W; ++i) store(rows + i * pd + c, F{});
}
// to[lane][c] = from[c][lane] * factor[lane]
__attribute__((noinline)) void unpack_lanes(const float* from, int64_t from_row, F factor, const LaneRows& lanes,
                                            int64_t lane, int64_t live, int64_t d, float* to) {
  float* base[W];
  for (int i = 0; i < W; ++i) base[i] = to + lanes.at(i < live ? lane + i : lane);
  int64_t c = 0;
  F m[W];
  for (; live >= W && c + W <= d; c += W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) m[i] = load(from + (c + i) * from_row) * factor;
    transpose(m);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) store(base[i] + c, m[i]);
  }
  for (; c < d; c += W) {
    for (int i = 0; i < W; ++i) m[i] = c + i < d ? load(from + (c + i) * from_row) * factor : F{};
    transpose(m);
    for (int i = 0; i < W && i < live; ++i) store_some(base[i] + c, m[i], d - c);
  }
}

// --- masks -------------------------------------------------------------------------------------------------

struct Range {
  int64_t begin, end;
};
INGOT_SIMD_INLINE Range visible(const AttentionMask& m, int64_t query) {
  const int64_t end = m.causal ? most(0, least(m.keys, query + m.keys - m.queries + 1)) : m.keys;
  return {m.window > 0 ? most(0, end - m.window) : 0, end};
}

// The keys visible to the lanes of a panel: [begin, end) per lane, [any.begin, any.end) seen by at least one lane,
// [all.begin, all.end) seen by every lane.
template <int V> struct PanelMask {
  I begin[V], end[V];
  Range any, all;
};
template <int V> INGOT_SIMD_INLINE PanelMask<V> panel_mask(const AttentionMask& m, int64_t lane, int64_t lane_end) {
  PanelMask<V> mask;
  const int64_t last = least(lane + V * W, lane_end) - 1;
  const Range first_range = visible(m, lane / m.group), last_range = visible(m, last / m.group);
  // The begin and the end of a query's range both grow with the query.
  mask.any = {first_range.begin, last_range.end};
  mask.all = {last_range.begin, first_range.end};
  for (int i = 0; i < V * W; ++i) {
    const Range r = visible(m, least(lane + i, last) / m.group);
    mask.begin[i / W][i % W] = int32_t(r.begin);
    mask.end[i / W][i % W] = int32_t(r.end);
  }
  return mask;
}
INGOT_SIMD_INLINE bool seen_by_all(const Range& all, int64_t key) { return key >= all.begin && key < all.end; }
template <int V> INGOT_SIMD_INLINE I sees(const PanelMask<V>& m, int v, int64_t key) {
  const I j = splat(int32_t(key));
  return (j >= m.begin[v]) & (j < m.end[v]);
}

// --- forward -----------------------------------------------------------------------------------------------

template <int V> struct Softmax {
  F top[V], sum[V];  // running maximum, and sum of e^(s - top)
};

// Turns a tile of scores into weights relative to the new maximum; `keep` gets the factor for the earlier sums.
template <int V>
INGOT_SIMD_INLINE void weigh_tile(float* s, int64_t first, int64_t keys, const PanelMask<V>& mask, float softcap,
                                  Softmax<V>& run, F (&keep)[V]) {
  F top[V];
  for (int v = 0; v < V; ++v) top[v] = run.top[v];
  for (int64_t j = 0; j < keys; ++j) {
    const bool all = seen_by_all(mask.all, first + j);
    if (all && softcap == 0) {
      for (int v = 0; v < V; ++v) top[v] = max<float>(top[v], load(s + (j * V + v) * W));
      continue;
    }
    for (int v = 0; v < V; ++v) {
      F x = load(s + (j * V + v) * W);
      if (softcap > 0) x = tanh(x / softcap) * softcap;
      if (!all) x = sees(mask, v, first + j) ? x : splat(-kInfinity);
      store(s + (j * V + v) * W, x);
      top[v] = max<float>(top[v], x);
    }
  }
  F base[V], sum[V];
  for (int v = 0; v < V; ++v) {
    base[v] = top[v] == -kInfinity ? F{} : top[v];  // no key seen yet: e^(-inf - 0) is 0, e^(-inf + inf) would be NaN
    keep[v] = exp(run.top[v] - base[v]);
    sum[v] = run.sum[v] * keep[v];
    run.top[v] = top[v];
  }
  for (int64_t j = 0; j < keys; ++j)
    for (int v = 0; v < V; ++v) {
      const F p = exp(load(s + (j * V + v) * W) - base[v]);
      sum[v] += p;
      store(s + (j * V + v) * W, p);
    }
  for (int v = 0; v < V; ++v) run.sum[v] = sum[v];
}

template <int V>
INGOT_SIMD_INLINE void finish_panel(const AttentionTask& t, int64_t lane, const Softmax<V>& run, const float* o) {
  const LaneRows rows{t.out_row, t.out_head, t.mask.group};
  for (int v = 0; v < V; ++v) {
    const int64_t first = lane + v * W, live = least(W, t.lane_end - first);
    const F inverse = run.sum[v] == 0.f ? F{} : 1.f / run.sum[v];
    unpack_lanes(o + v * W, V * W, inverse, rows, first, live, t.dv, t.out);
    if (t.lse == nullptr) continue;
    for (int64_t i = 0; i < live; ++i) {
      const int64_t l = first + i;
      const float sum = run.sum[v][i];
      t.lse[l % t.mask.group * t.lse_head + l / t.mask.group] =
          sum == 0 ? -kInfinity : run.top[v][i] + __builtin_logf(sum);
    }
  }
}

template <int V> void forward_panel(const AttentionTask& t, int64_t lane) {
  const PanelMask<V> mask = panel_mask<V>(t.mask, lane, t.lane_end);
  float* q = t.scratch;
  float* o = q + attention_pad(t.d) * V * W;
  float* s = o + attention_pad(t.dv) * V * W;
  Softmax<V> run;
  for (int v = 0; v < V; ++v) {
    pack_lanes(t.q, {t.q_row, t.q_head, t.mask.group}, lane + v * W, least(W, t.lane_end - lane - v * W), t.d, t.scale,
               q + v * W, V * W, nullptr);
    run.top[v] = splat(-kInfinity);
    run.sum[v] = F{};
    for (int i = 0; i < W && t.sinks; ++i) run.top[v][i] = t.sinks[(lane + v * W + i) % t.mask.group];
    run.sum[v] = run.top[v] == -kInfinity ? F{} : splat(1.f);
  }
  for (int64_t i = 0; i < t.dv * V; ++i) store(o + i * W, F{});
  for (int64_t first = mask.any.begin, next; first < mask.any.end; first = next) {
    next = least(mask.any.end, first + detail::kAttentionKeys);
    if (first < t.wrap) next = least(next, t.wrap);
    const int64_t keys = next - first;
    const float* k = first < t.wrap ? t.k + first * t.k_row : t.k2 + (first - t.wrap) * t.k_row;
    const float* value = first < t.wrap ? t.v + first * t.v_row : t.v2 + (first - t.wrap) * t.v_row;
    for_blocks(keys,
               [&]<int R>(int64_t j) { rows_by_lanes<R, V>(k + j * t.k_row, t.k_row, q, t.d, s + j * V * W, V * W); });
    F keep[V];
    weigh_tile<V>(s, first, keys, mask, t.softcap, run, keep);
    for_blocks(t.dv, [&]<int R>(int64_t c) {
      columns_by_lanes<R, V>(value + c, t.v_row, keys, s, V * W, keep, o + c * V * W);
    });
  }
  finish_panel<V>(t, lane, run, o);
}

// --- forward for a lane or two: decoding -------------------------------------------------------------------
// A vector of queries would be mostly empty, so the vector holds numbers of one head instead.

INGOT_SIMD_INLINE void row_scores(const float* q, const float* k, int64_t k_row, int64_t d, int64_t keys, float scale,
                                  float* s) {
  int64_t j = 0;
  for (; j + 4 <= keys; j += 4, k += 4 * k_row) {
    F acc[4] = {};
    for (int64_t c = 0; c < d; c += W) {
      const F x = load_some(q + c, d - c);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) acc[r] += load_some(k + r * k_row + c, d - c) * x;
    }
    for (int r = 0; r < 4; ++r) s[j + r] = reduce_add<float>(acc[r]) * scale;
  }
  for (; j < keys; ++j, k += k_row) {
    F acc = {};
    for (int64_t c = 0; c < d; c += W) acc += load_some(k + c, d - c) * load_some(q + c, d - c);
    s[j] = reduce_add<float>(acc) * scale;
  }
}

// out[c] += sum_j p[j] * v[j][c] for V vectors of channels, the last with `tail` channels.
template <int V>
INGOT_SIMD_INLINE void row_values(const float* v, int64_t v_row, int64_t keys, const float* p, int64_t tail,
                                  float* out) {
  F acc[V];
#pragma GCC unroll 8
  for (int i = 0; i < V; ++i) acc[i] = load_some(out + i * W, i + 1 < V ? W : tail);
  for (int64_t j = 0; j < keys; ++j, v += v_row) {
    const F b = splat(p[j]);
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) acc[i] += b * load_some(v + i * W, i + 1 < V ? W : tail);
  }
#pragma GCC unroll 8
  for (int i = 0; i < V; ++i) store_some(out + i * W, acc[i], i + 1 < V ? W : tail);
}
void row_values_any(const float* v, int64_t v_row, int64_t d, int64_t keys, const float* p, float* out) {
  int64_t c = 0;
  for (; d - c >= 8 * W; c += 8 * W) row_values<8>(v + c, v_row, keys, p, W, out + c);
  for (; d - c >= 4 * W; c += 4 * W) row_values<4>(v + c, v_row, keys, p, W, out + c);
  for (; d - c > 0; c += W) row_values<1>(v + c, v_row, keys, p, least(W, d - c), out + c);
}

void forward_row(const AttentionTask& t, int64_t lane) {
  const int64_t query = lane / t.mask.group, head = lane % t.mask.group;
  const Range see = visible(t.mask, query);
  const int64_t n = see.end - see.begin, split = most(0, least(n, t.wrap - see.begin));  // keys before the ring wraps
  const int64_t second = most(0, see.begin - t.wrap);  // first key after the ring wraps
  const float* q = t.q + query * t.q_row + head * t.q_head;
  float *s = t.scratch, *out = t.out + query * t.out_row + head * t.out_head;
  row_scores(q, t.k + see.begin * t.k_row, t.k_row, t.d, split, t.scale, s);
  if (n > split) row_scores(q, t.k2 + second * t.k_row, t.k_row, t.d, n - split, t.scale, s + split);
  F top = splat(t.sinks ? t.sinks[head] : -kInfinity);
  for (int64_t j = 0; j < n; j += W) {
    F x = load_some(s + j, n - j);
    if (t.softcap > 0) x = tanh(x / t.softcap) * t.softcap;
    for (int i = 0; i < W; ++i) x[i] = j + i < n ? x[i] : -kInfinity;
    store(s + j, x);
    top = max<float>(top, x);
  }
  const float most_of_all = reduce_max<float>(top), base = most_of_all == -kInfinity ? 0 : most_of_all;
  F sums = {};
  for (int64_t j = 0; j < n; j += W) {
    const F p = exp(load(s + j) - base);
    store(s + j, p);
    sums += p;
  }
  float sum = reduce_add<float>(sums);
  if (t.sinks) sum += __builtin_expf(t.sinks[head] - base);
  for (int64_t c = 0; c < t.dv; ++c) out[c] = 0;
  row_values_any(t.v + see.begin * t.v_row, t.v_row, t.dv, split, s, out);
  if (n > split) row_values_any(t.v2 + second * t.v_row, t.v_row, t.dv, n - split, s + split, out);
  const float inverse = sum == 0 ? 0 : 1 / sum;
  for (int64_t c = 0; c < t.dv; ++c) out[c] *= inverse;
  if (t.lse) t.lse[head * t.lse_head + query] = sum == 0 ? -kInfinity : most_of_all + __builtin_logf(sum);
}

// --- backward ----------------------------------------------------------------------------------------------

constexpr int64_t kBlock = detail::kAttentionBlock;
constexpr int kPanels = int(kBlock) / W;  // the most panels, of one or two vectors each

// A block of lanes, packed once and used with every tile of keys.
struct Block {
  float *q, *dout;            // per panel (d x lanes): panel at lane l begins at q + l * d
  float *q_rows, *dout_rows;  // (kBlock x padded d)
  float* dq;                  // as q
  float *p, *ds;              // (kBlock keys x kBlock lanes)
  float *lse, *delta;         // (kBlock)
  int64_t lane, lanes;        // first lane, and how many, rounded up to whole vectors
};

INGOT_SIMD_INLINE Block block_in(float* scratch, int64_t d, int64_t dv) {
  const int64_t pd = attention_pad(d), pdv = attention_pad(dv);
  Block b;
  b.q = scratch;
  b.q_rows = b.q + kBlock * pd;
  b.dq = b.q_rows + kBlock * pd;
  b.dout = b.dq + kBlock * pd;
  b.dout_rows = b.dout + kBlock * pdv;
  b.p = b.dout_rows + kBlock * pdv;
  b.ds = b.p + kBlock * kBlock;
  b.lse = b.ds + kBlock * kBlock;
  b.delta = b.lse + kBlock;
  return b;
}

// Panels of two vectors; the last panel may have a single vector.
INGOT_SIMD_INLINE int panel_vectors(const Block& b, int64_t at) { return b.lanes - at >= 2 * W ? 2 : 1; }

void load_block(const AttentionBackwardTask& t, Block& b) {
  const int64_t group = t.mask.group, live = least(kBlock, t.lane_end - b.lane);
  b.lanes = (live + W - 1) / W * W;
  for (int64_t at = 0; at < b.lanes;) {
    const int vectors = panel_vectors(b, at);
    for (int v = 0; v < vectors; ++v) {
      const int64_t l = at + v * W, real = least(W, live - l);
      pack_lanes(t.q, {t.q_row, t.q_head, group}, b.lane + l, real, t.d, t.scale, b.q + at * t.d + v * W, vectors * W,
                 b.q_rows + l * attention_pad(t.d));
      pack_lanes(t.dout, {t.dout_row, t.dout_head, group}, b.lane + l, real, t.dv, 1, b.dout + at * t.dv + v * W,
                 vectors * W, b.dout_rows + l * attention_pad(t.dv));
    }
    at += vectors * W;
  }
  for (int64_t i = 0; i < b.lanes * t.d; i += W) store(b.dq + i, F{});
  for (int64_t i = 0; i < b.lanes; ++i) {
    b.lse[i] = kInfinity;  // a lane without a query, or whose query sees no key: e^(s - inf) = 0
    b.delta[i] = 0;
    if (i >= live) continue;
    const int64_t lane = b.lane + i, query = lane / group, head = lane % group;
    const float* out = t.out + query * t.out_row + head * t.out_head;
    F sum = {};
    for (int64_t c = 0; c < t.dv; c += W)
      sum += load_some(out + c, t.dv - c) * load(b.dout_rows + i * attention_pad(t.dv) + c);
    const float lse = t.lse[head * t.lse_head + query];
    if (lse == -kInfinity) continue;
    b.lse[i] = lse;
    b.delta[i] = reduce_add<float>(sum) - (t.dlse ? t.dlse[head * t.dlse_head + query] : 0.f);
    if (t.dsinks) t.dsinks[head] -= __builtin_expf(t.sinks[head] - lse) * b.delta[i];
  }
}

// Turns scores into p, and dp into ds, in `rows` of the tile that begins at key `first`. The other rows become 0.
template <int V>
INGOT_SIMD_INLINE void weigh_backward(const AttentionBackwardTask& t, const Block& b, int64_t at,
                                      const PanelMask<V>& mask, int64_t first, int64_t keys, Range rows) {
  for (int64_t j = 0; j < keys; ++j) {
    const bool inside = j >= rows.begin && j < rows.end, all = seen_by_all(mask.all, first + j);
    for (int v = 0; v < V; ++v) {
      float *s = b.p + j * kBlock + at + v * W, *dp = b.ds + j * kBlock + at + v * W;
      if (!inside) {
        store(s, F{});
        store(dp, F{});
        continue;
      }
      F x = load(s), slope = splat(1.f);
      if (t.softcap > 0) {
        const F bent = tanh(x / t.softcap);
        slope = 1.f - bent * bent;
        x = bent * t.softcap;
      }
      F p = exp(x - load(b.lse + at + v * W));
      if (!all) p = sees(mask, v, first + j) ? p : F{};
      store(s, p);
      store(dp, p * (load(dp) - load(b.delta + at + v * W)) * slope);
    }
  }
}

template <int V>
Range backward_panel(const AttentionBackwardTask& t, const Block& b, int64_t at, int64_t first, int64_t keys) {
  const PanelMask<V> mask = panel_mask<V>(t.mask, b.lane + at, t.lane_end);
  const Range rows{least(keys, most(0, mask.any.begin - first)), most(0, least(keys, mask.any.end - first))};
  const int64_t n = rows.end - rows.begin;
  const float *k = t.k + (first + rows.begin) * t.k_row, *v = t.v + (first + rows.begin) * t.v_row;
  float *p = b.p + rows.begin * kBlock + at, *ds = b.ds + rows.begin * kBlock + at;
  for_blocks(n, [&]<int R>(int64_t j) {
    rows_by_lanes<R, V>(k + j * t.k_row, t.k_row, b.q + at * t.d, t.d, p + j * kBlock, kBlock);
    rows_by_lanes<R, V>(v + j * t.v_row, t.v_row, b.dout + at * t.dv, t.dv, ds + j * kBlock, kBlock);
  });
  weigh_backward<V>(t, b, at, mask, first, keys, rows);
  if (n <= 0) return {0, 0};
  F keep[V];
  for (int i = 0; i < V; ++i) keep[i] = splat(1.f);
  for_blocks(t.d, [&]<int R>(int64_t c) {
    columns_by_lanes<R, V>(k + c, t.k_row, n, ds, kBlock, keep, b.dq + at * t.d + c * V * W);
  });
  return rows;
}

// sum[j][c] += sum_lane p[j][lane] * x[lane][c] over lanes [from, to) for R rows.
template <int R>
INGOT_SIMD_INLINE void add_rows(const float* p, int64_t from, int64_t to, const float* x, int64_t width, float* sum) {
  int64_t c = 0;
  for (; c + 2 * W <= width; c += 2 * W)
    lanes_by_columns<R, 2>(p + from, kBlock, to - from, x + from * width + c, width, sum + c);
  for (; c < width; c += W) lanes_by_columns<R, 1>(p + from, kBlock, to - from, x + from * width + c, width, sum + c);
}

void backward_tile(const AttentionBackwardTask& t, const Block& b, int64_t first, int64_t keys) {
  Range rows[kPanels];
  int64_t lane[kPanels + 1];
  int panels = 0;
  for (int64_t at = 0; at < b.lanes; ++panels) {
    const int vectors = panel_vectors(b, at);
    lane[panels] = at;
    rows[panels] = vectors == 2 ? backward_panel<2>(t, b, at, first, keys) : backward_panel<1>(t, b, at, first, keys);
    at += vectors * W;
  }
  lane[panels] = b.lanes;
  const int64_t pd = attention_pad(t.d), pdv = attention_pad(t.dv), row = first - t.keys_begin;
  for_blocks(keys, [&]<int R>(int64_t j) {
    int from = 0, to = panels;  // panels with a query that sees some of these keys
    while (from < to && (rows[from].end <= j || rows[from].begin >= j + R)) ++from;
    while (to > from && (rows[to - 1].end <= j || rows[to - 1].begin >= j + R)) --to;
    if (from == to) return;
    add_rows<R>(b.p + j * kBlock, lane[from], lane[to], b.dout_rows, pdv, t.dv_sum + (row + j) * pdv);
    add_rows<R>(b.ds + j * kBlock, lane[from], lane[to], b.q_rows, pd, t.dk_sum + (row + j) * pd);
  });
}

}  // namespace

void attention_forward(const AttentionTask& t) {
  int64_t lane = t.lane_begin;
  while (lane < t.lane_end) {
    const int64_t left = t.lane_end - lane;
    if (left > W) {
      forward_panel<2>(t, lane);
      lane += 2 * W;
    } else if (left > W / 2) {
      forward_panel<1>(t, lane);
      lane += W;
    } else {
      forward_row(t, lane++);
    }
  }
}

void attention_backward(const AttentionBackwardTask& t) {
  const int64_t keys = t.keys_end - t.keys_begin;
  for (int64_t i = 0; i < keys * attention_pad(t.d); i += W) store(t.dk_sum + i, F{});
  for (int64_t i = 0; i < keys * attention_pad(t.dv); i += W) store(t.dv_sum + i, F{});
  for (int64_t h = 0; t.dsinks && h < t.mask.group; ++h) t.dsinks[h] = 0;
  Block b = block_in(t.scratch, t.d, t.dv);
  for (b.lane = t.lane_begin; b.lane < t.lane_end; b.lane += kBlock) {
    load_block(t, b);
    const int64_t last = least(b.lane + kBlock, t.lane_end) - 1;
    const int64_t begin = visible(t.mask, b.lane / t.mask.group).begin, end = visible(t.mask, last / t.mask.group).end;
    for (int64_t first = begin; first < end; first += kBlock) backward_tile(t, b, first, least(kBlock, end - first));
    for (int64_t at = 0; at < b.lanes;) {
      const int vectors = panel_vectors(b, at);
      for (int v = 0; v < vectors; ++v) {
        const int64_t l = b.lane + at + v * W;
        unpack_lanes(b.dq + at * t.d + v * W, vectors * W, splat(t.scale), {t.dq_row, t.dq_head, t.mask.group}, l,
                     least(W, t.lane_end - l), t.d, t.dq);
      }
      at += vectors * W;
    }
  }
}

}  // namespace ingot::INGOT_SIMD
