#include "ingot/kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::compare;
using testing::roundoff;
using testing::values;

struct Case {
  std::vector<int64_t> queries, keys;  // per segment; keys empty: as queries
  int64_t heads, kv_heads, d, dv, gap = 0;
  double softcap = 0;
  int64_t window = 0;
  bool causal = true, sinks = false;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << "queries";
  for (int64_t n : c.queries) out << ' ' << n;
  out << " keys";
  for (int64_t n : c.keys) out << ' ' << n;
  return out << " heads " << c.heads << '/' << c.kv_heads << " d " << c.d << '/' << c.dv << " gap " << c.gap
             << " softcap " << c.softcap << " window " << c.window << " causal " << c.causal << " sinks " << c.sinks;
}
const Case kCases[] = {
    {{1}, {}, 1, 1, 1, 1},
    {{}, {}, 2, 1, 8, 8},
    {{0, 5, 0}, {}, 2, 2, 8, 8},
    {{64, 64}, {}, 4, 4, 32, 32},
    {{7, 1, 130, 33}, {}, 4, 2, 32, 32, 8},
    {{65, 17}, {}, 2, 1, 64, 64, 0, 30},
    {{100, 3}, {}, 3, 1, 20, 12, 4, 0, 9},
    {{77}, {}, 4, 2, 17, 33, 1, 5, 40, true, true},
    {{5, 40}, {90, 70}, 4, 4, 48, 48, 0, 0, 0, true, true},  // a chunk after a cached prefix
    {{40, 9}, {11, 9}, 2, 1, 16, 24, 0, 0, 0, true},         // the first 29 queries see nothing
    {{40, 9}, {11, 9}, 2, 1, 16, 24, 0, 4, 3, true, true},   // the first queries see nothing but the sink
    {{33, 20}, {50, 0}, 4, 2, 24, 24, 0, 0, 0, false},
    {{31}, {45}, 2, 2, 40, 8, 3, 10, 0, false, true},
    {{1, 1, 1}, {200, 1, 37}, 8, 4, 64, 64},  // decode
    {{1, 2}, {300, 70}, 6, 2, 96, 256, 0, 20, 128, true, true},
    {{19}, {}, 2, 1, 256, 256},
    {{300}, {}, 2, 1, 32, 32, 0, 0, 64},
    {{530, 0, 20}, {700, 30, 20}, 2, 1, 8, 8, 0, 0, 100, true, true},  // dk and dv summed over two runs of queries
    {{600}, {560}, 2, 2, 9, 4, 0, 3},
};

// The operands of a case in `type`; the same numbers for every type that can represent f32.
struct Operands {
  Case c;
  Buffer q, k, v, cu_q, cu_k, sinks, out, lse, dout, dlse, dq, dk, dv, dsinks;
  static int64_t total(const std::vector<int64_t>& n) { return std::accumulate(n.begin(), n.end(), int64_t(0)); }
  static Shape shape(const std::vector<int64_t>& n, int64_t heads, int64_t d) { return {total(n), heads, d}; }
  Operands(const Case& k_, DType type, double size = 1.5)
      : c(k_.keys.empty() ? with_keys(k_) : k_),
        q(type, shape(c.queries, c.heads, c.d), c.d + c.gap),
        k(type, shape(c.keys, c.kv_heads, c.d), c.d + 2 * c.gap),
        v(type, shape(c.keys, c.kv_heads, c.dv), c.dv + c.gap),
        cu_q(DType::i32, {int64_t(c.queries.size()) + 1}),
        cu_k(DType::i32, {int64_t(c.queries.size()) + 1}),
        sinks(type, {c.heads}),
        out(type, shape(c.queries, c.heads, c.dv), c.dv + c.gap),
        lse(type, {c.heads, total(c.queries)}),
        dout(type, out.tensor().shape, c.dv + c.gap),
        dlse(type, lse.tensor().shape),
        dq(type, q.tensor().shape, c.d + c.gap),
        dk(type, k.tensor().shape, c.d + c.gap),
        dv(type, v.tensor().shape, c.dv),
        dsinks(type, {c.heads}) {
    fill(q, 1, size), fill(k, 2, size), fill(v, 3, 1), fill(sinks, 4, 1), fill(dout, 5, 1), fill(dsinks, 6, 1);
    fill(dlse, 7, 1);
    offsets(cu_q, c.queries), offsets(cu_k, c.keys);
  }
  static Case with_keys(Case k) {
    k.keys = k.queries;
    return k;
  }
  static void fill(const Tensor& t, uint64_t seed, double scale) {
    Buffer rounded(DType::f32, t.shape);
    testing::fill_normal(rounded, seed, scale);
    testing::assign(t, values(rounded));
  }
  static void offsets(const Tensor& cu, const std::vector<int64_t>& n) {
    std::vector<double> at{0};
    for (int64_t m : n) at.push_back(at.back() + double(m));
    testing::assign(cu, at);
  }
  bool with_dlse = false;  // whether the backward pass is given a gradient of lse
  double scale() const { return 1 / std::sqrt(double(c.d)); }
  Attention op() const {
    Attention a{.q = q,
                .k = k,
                .v = v,
                .cu_q = cu_q,
                .cu_k = cu_k,
                .out = out,
                .lse = lse,
                .scale = scale(),
                .softcap = c.softcap,
                .window = c.window,
                .causal = c.causal};
    if (c.sinks) a.sinks = sinks;
    return a;
  }
  AttentionBackward backward_op() const {
    AttentionBackward a{.q = q,
                        .k = k,
                        .v = v,
                        .cu_q = cu_q,
                        .cu_k = cu_k,
                        .out = out,
                        .lse = lse,
                        .dout = dout,
                        .dq = dq,
                        .dk = dk,
                        .dv = dv,
                        .scale = scale(),
                        .softcap = c.softcap,
                        .window = c.window,
                        .causal = c.causal};
    if (c.sinks) a.sinks = sinks, a.dsinks = dsinks;
    if (with_dlse) a.dlse = dlse;
    return a;
  }
  void run() {
    attention(op(), {});
    attention_backward(backward_op(), {});
  }
  bool guards() const {
    for (const Buffer* b : {&q, &k, &v, &cu_q, &cu_k, &sinks, &out, &lse, &dout, &dlse, &dq, &dk, &dv, &dsinks})
      if (!b->guards_intact()) return false;
    return true;
  }
};

int64_t longest(const Case& c) {
  int64_t n = 1;
  for (int64_t m : c.keys) n = std::max(n, m);
  for (int64_t m : c.queries) n = std::max(n, m);
  return n;
}

// softmax(q k) v written as in the definition, query by query, in fp64: this code shares nothing with the op.
void definition(const Operands& a, std::vector<double>& out, std::vector<double>& lse) {
  const auto q = values(a.q), k = values(a.k), v = values(a.v), sinks = values(a.sinks);
  const Case& c = a.c;
  const int64_t total = Operands::total(c.queries);
  out.assign(size_t(total * c.heads * c.dv), 0);
  lse.assign(size_t(total * c.heads), -HUGE_VAL);
  int64_t q0 = 0, k0 = 0;
  for (size_t s = 0; s < c.queries.size(); ++s) {
    const int64_t n = c.queries[s], m = c.keys[s];
    for (int64_t i = 0; i < n; ++i)
      for (int64_t h = 0; h < c.heads; ++h) {
        std::vector<double> weight;
        std::vector<int64_t> key;
        double sum = c.sinks ? std::exp(sinks[size_t(h)]) : 0;
        const int64_t g = h / (c.heads / c.kv_heads);
        for (int64_t j = 0; j < m; ++j) {
          if (c.causal && j > i + (m - n)) continue;
          if (c.window > 0 && j <= i + (m - n) - c.window) continue;
          double score = 0;
          for (int64_t x = 0; x < c.d; ++x)
            score += q[size_t(((q0 + i) * c.heads + h) * c.d + x)] * k[size_t(((k0 + j) * c.kv_heads + g) * c.d + x)];
          score *= a.scale();
          if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
          weight.push_back(std::exp(score));
          key.push_back(j);
          sum += weight.back();
        }
        if (sum == 0) continue;
        lse[size_t(h * total + q0 + i)] = std::log(sum);
        for (size_t x = 0; x < key.size(); ++x)
          for (int64_t y = 0; y < c.dv; ++y)
            out[size_t(((q0 + i) * c.heads + h) * c.dv + y)] +=
                weight[x] / sum * v[size_t(((k0 + key[x]) * c.kv_heads + g) * c.dv + y)];
      }
    q0 += n, k0 += m;
  }
}

TEST(Attention, Fp64MatchesTheDefinition) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands a(c, DType::f64);
    attention(a.op(), {});
    std::vector<double> out, lse;
    definition(a, out, lse);
    // Scores of size up to 20 are sums of d products; exp turns their absolute error into a relative one.
    EXPECT_TRUE(compare(a.out, out, 1e-12, 1e-12).ok) << compare(a.out, out, 1e-12, 1e-12).message;
    EXPECT_TRUE(compare(a.lse, lse, 1e-12, 1e-12).ok) << compare(a.lse, lse, 1e-12, 1e-12).message;
    EXPECT_TRUE(a.guards());
  }
}

TEST(Attention, Fp32MatchesFp64ForwardAndBackward) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands got(c, DType::f32), want(c, DType::f64);
    got.with_dlse = want.with_dlse = c.heads % 4 == 0;
    got.run();
    want.run();
    // A score is a sum of d products of size up to (4.5 * 1.5)^2 with random signs; its absolute error is p's relative
    // error. Below, `p` bounds this error: products' roundings grow like sqrt(d), and exp, lse and the sums add a few.
    const double u = roundoff(DType::f32), n = double(longest(c));
    const double p = u * (4 * std::sqrt(double(c.d)) * 4 + 24 + 2 * c.softcap);
    const auto near = [&](const char* name, const Buffer& a, const Buffer& b, double absolute) {
      const auto result = compare(a, values(b), absolute, p);
      EXPECT_TRUE(result.ok) << name << ": " << result.message;
    };
    near("out", got.out, want.out, p * 4);  // |v| <= 4.5
    near("lse", got.lse, want.lse, p);
    // ds = p (dout . v - delta) is a difference of sums of dv products of size 1; dk and dv add up to n rows.
    const double ds = p * std::sqrt(double(c.dv)), rows = 2 + 0.25 * std::sqrt(n);
    near("dq", got.dq, want.dq, ds * 4);
    near("dk", got.dk, want.dk, ds * 4 * rows);
    near("dv", got.dv, want.dv, p * 4 * rows);
    near("dsinks", got.dsinks, want.dsinks, ds * rows * 4);
    EXPECT_TRUE(got.guards());
  }
}

TEST(Attention, GradientsAgreeWithFiniteDifferences) {
  const Case cases[] = {
      {{9, 1, 14}, {}, 4, 2, 6, 5, 2},
      {{9, 14}, {12, 14}, 4, 2, 6, 5, 0, 3, 5, true, true},  // every feature at once
      {{9, 12}, {4, 17}, 2, 1, 6, 7, 0, 0, 0, true, true},   // rows with only the sink visible
      {{8, 3}, {5, 9}, 3, 3, 4, 4, 0, 2, 0, false},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands a(c, DType::f64);
    testing::assign(a.dsinks, std::vector<double>(size_t(c.heads), 0));
    a.with_dlse = true;
    a.run();
    const auto loss = [&] {
      attention(a.op(), {});
      return testing::dot(a.out, a.dout) + testing::dot(a.lse, a.dlse);
    };
    EXPECT_LT(testing::gradient_error(loss, a.q, a.dq, 1), 1e-6);
    EXPECT_LT(testing::gradient_error(loss, a.k, a.dk, 2), 1e-6);
    EXPECT_LT(testing::gradient_error(loss, a.v, a.dv, 3), 1e-6);
    if (c.sinks) { EXPECT_LT(testing::gradient_error(loss, a.sinks, a.dsinks, 4), 1e-6); }
  }
}

TEST(Attention, PackedSegmentsEqualOneCallPerSegment) {
  for (const DType type : {DType::f32, DType::f64}) {
    const Case c{{40, 1, 70}, {50, 9, 70}, 4, 2, 24, 16, 0, 6, 33, true, true};
    Operands a(c, type);
    testing::assign(a.dsinks, std::vector<double>(4, 0));
    a.run();
    std::vector<double> dsinks(4, 0);
    int64_t q0 = 0, k0 = 0;
    for (size_t s = 0; s < c.queries.size(); ++s) {
      Operands one({{c.queries[s]}, {c.keys[s]}, 4, 2, 24, 16, 0, 6, 33, true, true}, type);
      const int64_t q1 = q0 + c.queries[s], k1 = k0 + c.keys[s];
      const auto rows = [](const Buffer& b, int64_t begin, int64_t end) {
        return values(b.tensor().slice(0, begin, end));
      };
      testing::assign(one.q, rows(a.q, q0, q1)), testing::assign(one.dout, rows(a.dout, q0, q1));
      testing::assign(one.k, rows(a.k, k0, k1)), testing::assign(one.v, rows(a.v, k0, k1));
      testing::assign(one.dsinks, dsinks);
      one.run();
      EXPECT_EQ(values(one.out), rows(a.out, q0, q1));
      EXPECT_EQ(values(one.dq), rows(a.dq, q0, q1));
      EXPECT_EQ(values(one.dk), rows(a.dk, k0, k1));
      EXPECT_EQ(values(one.dv), rows(a.dv, k0, k1));
      EXPECT_EQ(values(one.lse), values(a.lse.tensor().slice(1, q0, q1)));
      dsinks = values(one.dsinks);
      q0 = q1, k0 = k1;
    }
    EXPECT_TRUE(compare(a.dsinks, dsinks, 1e-5, 1e-5).ok);
  }
}

TEST(Attention, RowsThatSeeNothingGiveZeroAndTakeNoGradient) {
  for (const DType type : {DType::f32, DType::f64})
    for (const bool sinks : {false, true}) {
      Operands a({{30, 6}, {10, 0}, 2, 1, 16, 16, 0, 0, 0, true, sinks}, type);
      a.run();
      const auto out = values(a.out), lse = values(a.lse), dq = values(a.dq), sink = values(a.sinks);
      for (int64_t t = 0; t < 36; ++t) {
        if (t >= 20 && t < 30) continue;
        for (int64_t h = 0; h < 2; ++h) {
          EXPECT_EQ(lse[size_t(h * 36 + t)], sinks ? sink[size_t(h)] : -HUGE_VAL);
          for (int64_t c = 0; c < 16; ++c) {
            EXPECT_EQ(out[size_t((t * 2 + h) * 16 + c)], 0);
            EXPECT_EQ(dq[size_t((t * 2 + h) * 16 + c)], 0);
          }
        }
      }
      for (const Buffer* b : {&a.dq, &a.dk, &a.dv, &a.dsinks})
        for (double v : values(*b)) EXPECT_TRUE(std::isfinite(v));
    }
}

TEST(Attention, RowsOfNoSegmentAreZeroAndTakeNoGradient) {
  for (const DType type : {DType::f32, DType::f64})
    for (const int64_t segments : {0, 1, 2}) {
      SCOPED_TRACE(::testing::Message() << type << ' ' << segments);
      const std::vector<int64_t> queries{20, 7, 5}, keys{20, 9, 4};
      Operands all({queries, keys, 2, 1, 16, 16, 3, 0, 0, true, true}, type), some(all.c, type);
      all.run();
      Attention op = some.op();
      AttentionBackward back = some.backward_op();
      for (Tensor* cu : {&op.cu_q, &op.cu_k, &back.cu_q, &back.cu_k}) *cu = cu->slice(0, 0, segments + 1);
      attention(op, {});
      attention_backward(back, {});
      const int64_t q_end = Operands::total({queries.begin(), queries.begin() + segments}),
                    k_end = Operands::total({keys.begin(), keys.begin() + segments});
      const auto expect_rows = [](const char* name, const Buffer& got, const Buffer& want, int64_t covered) {
        const Tensor a = got, b = want;
        EXPECT_EQ(values(a.slice(0, 0, covered)), values(b.slice(0, 0, covered))) << name;
        for (double x : values(a.slice(0, covered, a.size(0)))) EXPECT_EQ(x, 0) << name;
      };
      expect_rows("out", some.out, all.out, q_end);
      expect_rows("dq", some.dq, all.dq, q_end);
      expect_rows("dk", some.dk, all.dk, k_end);
      expect_rows("dv", some.dv, all.dv, k_end);
      for (double x : values(some.lse.tensor().slice(1, q_end, 32))) EXPECT_EQ(x, -HUGE_VAL);
      EXPECT_TRUE(some.guards());
    }
}

TEST(Attention, RingEqualsPackedRows) {
  for (const DType type : {DType::f32, DType::f64}) {
    const int64_t ring = 50;
    Operands a({{1, 3, 17}, {50, 20, 33}, 4, 2, 24, 24, 0, 0, 19, true, true}, type);
    attention(a.op(), {});
    Buffer k(type, {3 * ring, 2, 24}, 28), v(type, {3 * ring, 2, 24}), first(DType::i32, {3});
    const double start[] = {13, 49, 30};
    testing::assign(first, {start[0], start[1], start[2]});
    int64_t k0 = 0;
    for (int64_t s = 0; s < 3; ++s)
      for (int64_t i = 0; i < a.c.keys[size_t(s)]; ++i, ++k0) {
        const int64_t row = s * ring + (int64_t(start[s]) + i) % ring;
        copy(a.k.tensor().row(k0), k.tensor().row(row));
        copy(a.v.tensor().row(k0), v.tensor().row(row));
      }
    Buffer out(type, {21, 4, 24}), lse(type, {4, 21});
    Attention op = a.op();
    op.k = k, op.v = v, op.out = out, op.lse = lse, op.ring = ring, op.k_first = first;
    attention(op, {});
    // Where the ring wraps a tile of keys ends, which moves a few roundings in f32.
    const double near = type == DType::f32 ? 40 * roundoff(type) : 1e-300;
    EXPECT_TRUE(compare(out, values(a.out), near, near).ok) << compare(out, values(a.out), near, near).message;
    EXPECT_TRUE(compare(lse, values(a.lse), near, near).ok) << compare(lse, values(a.lse), near, near).message;
  }
}

TEST(Attention, OneQueryAtATimeEqualsTheWholeSegment) {
  const Case c{{90}, {}, 4, 2, 32, 32, 0, 15, 40, true, true};
  Operands whole(c, DType::f32);
  attention(whole.op(), {});
  for (int64_t i : {0, 1, 15, 16, 63, 64, 89}) {
    Operands step({{1}, {i + 1}, 4, 2, 32, 32, 0, 15, 40, true, true}, DType::f32);
    copy(whole.q.tensor().slice(0, i, i + 1), step.q);
    copy(whole.k.tensor().slice(0, 0, i + 1), step.k);
    copy(whole.v.tensor().slice(0, 0, i + 1), step.v);
    attention(step.op(), {});
    // The tiles differ, and so does the order of sums: a few roundings of numbers of size 1 to 4.
    const auto result =
        compare(step.out, values(whole.out.tensor().slice(0, i, i + 1)), 40 * roundoff(DType::f32), 1e-5);
    EXPECT_TRUE(result.ok) << result.message;
  }
}

TEST(Attention, LseMayBeLeftOutAndHugeScoresStayFinite) {
  Operands a({{50, 20}, {}, 4, 2, 32, 32}, DType::f32, 60);  // scores reach thousands
  attention(a.op(), {});
  const auto out = values(a.out);
  a.out.poison();
  Attention op = a.op();
  op.lse = {};
  attention(op, {});
  EXPECT_EQ(values(a.out), out);
  attention_backward(a.backward_op(), {});
  for (const Buffer* b : {&a.out, &a.dq, &a.dk, &a.dv})
    for (double v : values(*b)) EXPECT_TRUE(std::isfinite(v));
}

TEST(Attention, ResultsAreBitwiseTheSameForAnyThreadCount) {
  const int before = thread_count();
  for (const Case& c :
       {Case{{7, 130, 33, 260}, {}, 4, 2, 32, 32, 0, 0, 0, true, true}, Case{{1, 1}, {700, 90}, 4, 1, 32, 32}}) {
    std::vector<std::vector<double>> seen;
    for (int threads : {1, 2, 3}) {
      set_thread_count(threads);
      Operands a(c, DType::f32);
      a.run();
      std::vector<double> all;
      for (const Buffer* b : {&a.out, &a.lse, &a.dq, &a.dk, &a.dv, &a.dsinks})
        for (double v : values(*b)) all.push_back(v);
      seen.push_back(all);
    }
    EXPECT_EQ(seen[0], seen[1]);
    EXPECT_EQ(seen[0], seen[2]);
  }
  set_thread_count(before);
}

TEST(Attention, FlopsCountVisiblePairsOnly) {
  EXPECT_EQ(flops(Operands({{4}, {}, 2, 1, 8, 8}, DType::f32).op()), 10 * 2 * 2 * 16);
  EXPECT_EQ(flops(Operands({{4}, {}, 2, 1, 8, 8, 0, 0, 2}, DType::f32).op()), 7 * 2 * 2 * 16);
  EXPECT_EQ(flops(Operands({{4}, {2}, 1, 1, 8, 8}, DType::f32).op()), 3 * 2 * 16);
}

std::string message(const std::function<void()>& use) {
  try {
    use();
  } catch (const Error& e) { return e.what(); }
  return "no error";
}

TEST(Attention, ErrorsNameBothValues) {
  Operands a({{6, 4}, {}, 4, 2, 8, 8}, DType::f32);
  struct {
    std::function<void(Attention&)> spoil;
    const char *one, *other;
  } cases[] = {
      {[](Attention& o) { o.k = o.k.slice(2, 0, 7); }, "7", "8"},
      {[](Attention& o) { o.v = o.v.slice(0, 0, 9); }, "9", "10"},
      {[](Attention& o) { o.q = o.q.slice(1, 0, 3), o.out = o.out.slice(1, 0, 3); }, "3 query heads", "2 key heads"},
      {[](Attention& o) { o.q = o.q.slice(0, 0, 9), o.out = o.out.slice(0, 0, 9), o.lse = {}; }, "10", "9"},
      {[](Attention& o) { o.causal = false, o.window = 5; }, "window of 5", "causal"},
      {[](Attention& o) { o.softcap = -2; }, "-2", "at least 0"},
      {[](Attention& o) { o.ring = 3; }, "k_first", "(2)"},
  };
  for (auto& c : cases) {
    Attention op = a.op();
    c.spoil(op);
    const std::string m = message([&] { attention(op, {}); });
    EXPECT_TRUE(m.find(c.one) != m.npos && m.find(c.other) != m.npos) << m;
  }
  const std::string m = message([&] {
    AttentionBackward op = a.backward_op();
    op.dk = op.dk.slice(0, 0, 5);
    attention_backward(op, {});
  });
  EXPECT_TRUE(m.find('5') != m.npos && m.find("10") != m.npos) << m;
  const std::string of_lse = message([&] {
    AttentionBackward op = a.backward_op();
    op.dlse = a.dlse.tensor().slice(1, 0, 7);
    attention_backward(op, {});
  });
  EXPECT_TRUE(of_lse.find("dlse of shape (4, 7)") != of_lse.npos && of_lse.find("(4, 10)") != of_lse.npos) << of_lse;
  const std::string of_lengths = message([&] {
    AttentionBackward op = a.backward_op();
    op.regular = true;
    attention_backward(op, {});
  });
  EXPECT_TRUE(of_lengths.find("segment 0") != of_lengths.npos && of_lengths.find('6') != of_lengths.npos &&
              of_lengths.find('5') != of_lengths.npos)
      << of_lengths;
  Operands b({{6, 5}, {}, 4, 2, 8, 8}, DType::f32);
  const std::string of_rows = message([&] {
    AttentionBackward op = b.backward_op();
    op.regular = true;
    attention_backward(op, {});
  });
  EXPECT_TRUE(of_rows.find("11 rows of q in 2 segments") != of_rows.npos) << of_rows;
}

TEST(Attention, EveryOperandLiesOnOneDevice) {
  using F = Attention;
  using B = AttentionBackward;
  Operands a({{6, 4}, {}, 4, 2, 8, 8}, DType::f32);
  F op = a.op();
  op.sinks = a.sinks;
  EXPECT_EQ(testing::device_not_checked(op, {&F::q, &F::k, &F::v, &F::cu_q, &F::cu_k, &F::sinks, &F::out, &F::lse},
                                        attention),
            "");
  Buffer first(DType::i32, {2});
  testing::assign(first, {0, 0});
  op.ring = 5, op.k_first = first;
  op.cu_k.ptr<int32_t>()[1] = 5, op.cu_k.ptr<int32_t>()[2] = 9;
  EXPECT_EQ(testing::device_not_checked(op, {&F::k_first}, attention), "");
  Operands whole({{6, 4}, {}, 4, 2, 8, 8}, DType::f32);
  B back = whole.backward_op();
  back.sinks = whole.sinks, back.dsinks = whole.dsinks, back.dlse = whole.dlse;
  EXPECT_EQ(testing::device_not_checked(back,
                                        {&B::q, &B::k, &B::v, &B::cu_q, &B::sinks, &B::out, &B::lse, &B::dout, &B::dq,
                                         &B::dk, &B::dv, &B::dsinks, &B::dlse},
                                        attention_backward),
            "");
}

// --- exclusive self attention ------------------------------------------------------------------------------

struct Exclusive {
  Buffer y, v, z, dz, dy, dv;
  Exclusive(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t d, DType type, int64_t gap = 0)
      : y(type, {tokens, heads, d}, d + gap),
        v(type, {tokens, kv_heads, d}, d + 2 * gap),
        z(type, {tokens, heads, d}),
        dz(type, {tokens, heads, d}),
        dy(type, {tokens, heads, d}, d + gap),
        dv(type, {tokens, kv_heads, d}, d + gap) {
    Operands::fill(y, 1, 1), Operands::fill(v, 2, 1), Operands::fill(dz, 3, 1), Operands::fill(dv, 4, 1);
  }
  void run() {
    exclude_self({.y = y, .v = v, .z = z}, {});
    exclude_self_backward({.y = y, .v = v, .dz = dz, .dy = dy, .dv = dv}, {});
  }
};

TEST(ExcludeSelf, WritesTheValuesGradientWhereAsked) {
  Exclusive added(5, 4, 2, 8, DType::f64), written(5, 4, 2, 8, DType::f64);
  fill_zero(added.dv);
  added.run();
  exclude_self_backward(
      {.y = written.y, .v = written.v, .dz = written.dz, .dy = written.dy, .dv = written.dv, .write_dv = true}, {});
  EXPECT_EQ(values(added.dv), values(written.dv));
}

TEST(ExcludeSelf, Fp32MatchesFp64AndLeavesNothingAlongTheValue) {
  for (auto [tokens, heads, kv_heads, d, gap] : {std::array<int64_t, 5>{0, 2, 1, 8, 0},
                                                 {1, 1, 1, 1, 0},
                                                 {70, 4, 2, 33, 3},
                                                 {40, 8, 4, 64, 0},
                                                 {5, 3, 1, 7, 1}}) {
    Exclusive got(tokens, heads, kv_heads, d, DType::f32, gap), want(tokens, heads, kv_heads, d, DType::f64, gap);
    got.run();
    want.run();
    // Dot products of d terms of size 1, divided by |v| ~ sqrt(d); at d = 1 |v| may be small, and dv depends on its
    // square.
    const double u = roundoff(DType::f32), tolerance = u * (double(d) + 16) * (d < 8 ? 100 : 2);
    EXPECT_TRUE(compare(got.z, values(want.z), tolerance, tolerance).ok)
        << compare(got.z, values(want.z), tolerance, tolerance).message;
    EXPECT_TRUE(compare(got.dy, values(want.dy), tolerance, tolerance).ok);
    EXPECT_TRUE(compare(got.dv, values(want.dv), tolerance, tolerance).ok)
        << compare(got.dv, values(want.dv), tolerance, tolerance).message;
    const auto z = values(want.z), v = values(want.v);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        double along = 0;
        for (int64_t c = 0; c < d; ++c)
          along += z[size_t((t * heads + h) * d + c)] * v[size_t((t * kv_heads + h / (heads / kv_heads)) * d + c)];
        EXPECT_NEAR(along, 0, 1e-12);
      }
    for (const Buffer* b : {&got.y, &got.v, &got.z, &got.dz, &got.dy, &got.dv}) EXPECT_TRUE(b->guards_intact());
  }
}

TEST(ExcludeSelf, GradientsAgreeWithFiniteDifferences) {
  Exclusive a(6, 4, 2, 5, DType::f64, 2);
  testing::assign(a.dv, std::vector<double>(60, 0));
  a.run();
  const auto loss = [&] {
    exclude_self({.y = a.y, .v = a.v, .z = a.z}, {});
    return testing::dot(a.z, a.dz);
  };
  EXPECT_LT(testing::gradient_error(loss, a.y, a.dy, 1), 1e-6);
  EXPECT_LT(testing::gradient_error(loss, a.v, a.dv, 2), 1e-6);
}

TEST(ExcludeSelf, WorksInPlaceAndWithZeroValues) {
  Exclusive apart(9, 4, 2, 16, DType::f32), same(9, 4, 2, 16, DType::f32);
  for (Exclusive* a : {&apart, &same}) fill_zero(a->v.tensor().row(3));
  apart.run();
  exclude_self_backward({.y = same.y, .v = same.v, .dz = same.dz, .dy = same.dz, .dv = same.dv}, {});
  exclude_self({.y = same.y, .v = same.v, .z = same.y}, {});
  EXPECT_EQ(values(same.y), values(apart.z));
  EXPECT_EQ(values(same.dz), values(apart.dy));
  EXPECT_EQ(values(same.dv), values(apart.dv));
  EXPECT_EQ(values(apart.z.tensor().row(3)), values(apart.y.tensor().row(3)));
  for (double v : values(apart.dv)) EXPECT_TRUE(std::isfinite(v));
}

TEST(ExcludeSelf, ErrorsNameBothValues) {
  Exclusive a(4, 4, 2, 8, DType::f32), b(4, 3, 2, 8, DType::f32);
  std::string m = message([&] { exclude_self({.y = b.y, .v = b.v, .z = b.z}, {}); });
  EXPECT_TRUE(m.find("3 query heads and 2") != m.npos) << m;
  m = message([&] { exclude_self({.y = a.y, .v = a.v, .z = b.z}, {}); });
  EXPECT_TRUE(m.find("(4, 3, 8)") != m.npos && m.find("(4, 4, 8)") != m.npos) << m;
}

}  // namespace
}  // namespace ingot
