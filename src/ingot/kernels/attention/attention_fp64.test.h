#pragma once
// Attention's operands, the fp64 loop on the same numbers, and error bounds derived from the roundings, for tests of
// the kernels on a GPU and in emulation. `On` has the class Storage, an operand's memory with a mirror on the host
// (such as testing::DeviceBuffer), and run(op) and workspace_bytes(op), the calls under test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/attention/parts/tiles.h"
#include "ingot/testing/testing.h"

namespace ingot::testing {

using Lengths = std::vector<int64_t>;
inline int64_t total(const Lengths& n) { return std::accumulate(n.begin(), n.end(), int64_t(0)); }

inline std::vector<int32_t> offsets(const Lengths& n) {
  std::vector<int32_t> at{0};
  for (int64_t m : n) at.push_back(at.back() + int32_t(m));
  return at;
}

struct AttentionCase {
  Lengths queries, keys;  // keys empty: as queries
  int64_t heads = 2, kv_heads = 1, d = 64;
  DType type = DType::bf16;
  int64_t gap = 0;
  double softcap = 0;
  int64_t window = 0;
  bool causal = true, sinks = false;
  bool regular = false;         // told to the backward pass
  double size = 1.5;            // of q and k
  std::optional<double> scale;  // of the scores; left out: 1 / sqrt(d)
};
inline std::ostream& operator<<(std::ostream& out, const AttentionCase& c) {
  out << "queries";
  for (int64_t n : c.queries) out << ' ' << n;
  out << " keys";
  for (int64_t n : c.keys) out << ' ' << n;
  return out << " heads " << c.heads << '/' << c.kv_heads << " d " << c.d << ' ' << c.type << " gap " << c.gap
             << " softcap " << c.softcap << " window " << c.window << " causal " << c.causal << " sinks " << c.sinks
             << " regular " << c.regular << " size " << c.size << " scale " << c.scale.value_or(0);
}

// The operands of a case on a GPU, the same numbers in fp64 on the host, and their results in fp64.
template <class On> struct AttentionOperands {
  using Storage = typename On::Storage;
  explicit AttentionOperands(const AttentionCase& given)
      : c(given),
        q(c.type, {total(c.queries), c.heads, c.d}, c.d + c.gap),
        k(c.type, {total(c.keys), c.kv_heads, c.d}, c.d + 2 * c.gap),
        v(c.type, {total(c.keys), c.kv_heads, c.d}, c.d + c.gap),
        cu_q(DType::i32, {int64_t(c.queries.size()) + 1}),
        cu_k(DType::i32, {int64_t(c.queries.size()) + 1}),
        sinks(DType::f32, {c.heads}),
        out(c.type, q.tensor().shape, c.d + c.gap),
        lse(DType::f32, {c.heads, total(c.queries)}),
        q64(DType::f64, q.tensor().shape),
        k64(DType::f64, k.tensor().shape),
        v64(DType::f64, v.tensor().shape),
        sinks64(DType::f64, {c.heads}),
        out64(DType::f64, q.tensor().shape),
        lse64(DType::f64, lse.tensor().shape) {
    fill_normal(q.host(), 1, c.size), fill_normal(k.host(), 2, c.size);
    fill_normal(v.host(), 3), fill_normal(sinks.host(), 4);
    const auto fill_offsets = [](const Storage& b, const Lengths& n) {
      const auto at = offsets(n);
      assign(b.host(), std::vector<double>(at.begin(), at.end()));
    };
    fill_offsets(cu_q, c.queries), fill_offsets(cu_k, c.keys);
    for (Storage* b : {&q, &k, &v, &cu_q, &cu_k, &sinks, &out, &lse}) b->upload();
    assign(q64, values(q.host())), assign(k64, values(k.host()));
    assign(v64, values(v.host())), assign(sinks64, values(sinks.host()));
  }
  double scale() const { return c.scale ? *c.scale : 1 / std::sqrt(double(c.d)); }
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
  Attention reference(const Tensor& values, const Tensor& result) const {
    Attention a = op();
    a.q = q64, a.k = k64, a.v = values, a.cu_q = cu_q.host(), a.cu_k = cu_k.host(), a.out = result, a.lse = lse64;
    if (c.sinks) a.sinks = sinks64;
    return a;
  }
  // The sums over the visible keys of p times `x` in place of v.
  std::vector<double> sums_of(const Tensor& x) const {
    Buffer zero(DType::f64, q64.tensor().shape), result(DType::f64, out64.tensor().shape);
    assign(zero, std::vector<double>(size_t(zero.tensor().numel()), 0));
    Attention mean = reference(x, result);
    mean.q = zero, mean.sinks = {};
    // the logarithm of the number of visible keys, as lse of equal scores
    Buffer counts(DType::f64, lse64.tensor().shape);
    mean.lse = counts;
    attention(mean, {});
    auto sums = values(result);
    const auto log_count = values(counts);
    const int64_t tokens = total(c.queries);
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t x0 = 0; x0 < c.d; ++x0)
          sums[size_t((i * c.heads + h) * c.d + x0)] *= std::exp(log_count[size_t(h * tokens + i)]);
    return sums;
  }
  // A bound of |score| log2(e) over all scores (by Cauchy-Schwarz). 1.45 is log2(e), rounded up.
  double largest_score() const {
    const auto longest = [&](const Tensor& t) {
      const auto x = values(t);
      double most = 0;
      for (size_t i = 0; i < x.size(); i += size_t(c.d)) {
        double sum = 0;
        for (size_t j = i; j < i + size_t(c.d); ++j) sum += x[j] * x[j];
        most = std::max(most, sum);
      }
      return std::sqrt(most);
    };
    return std::abs(scale()) * longest(q64) * longest(k64) * 1.45;
  }
  AttentionCase c;
  Storage q, k, v, cu_q, cu_k, sinks, out, lse;
  Buffer q64, k64, v64, sinks64, out64, lse64;
};

// out = sum p v / sum p, where p is rounded once for the tensor cores: u times the same sum over |v|. Then out is
// rounded. Scores are fp32 sums of products whose exponential takes their absolute error as a relative one; the tensor
// cores' sums and the hardware's exp2 are good to about 2^-22 of the terms' size. f16 numbers below 2^-14 are rounded
// to multiples of 2^-24: each p, which is at most 1, and out. (In bf16 such numbers do not occur.) sizes: sum p |v|;
// each: sum |v| over the visible keys.
template <class On>
std::vector<double> allowance(const AttentionOperands<On>& a, const std::vector<double>& sizes,
                              const std::vector<double>& each) {
  const double u = roundoff(a.c.type), scores = std::exp2(-21) * (4 + a.largest_score());
  const double smallest = a.c.type == DType::f16 ? std::exp2(-25) : 0;
  const auto want = values(a.out64);
  std::vector<double> allowed(want.size());
  for (size_t i = 0; i < want.size(); ++i)
    allowed[i] = (u + 2 * scores) * sizes[i] + u * std::abs(want[i]) * 1.01 + smallest * (1 + each[i]) + 1e-30;
  return allowed;
}

// The largest |got - want| / allowed, with its place, as text.
inline std::string beyond(const std::vector<double>& got, const std::vector<double>& want,
                          const std::vector<double>& allowed, double& worst) {
  worst = 0;
  size_t where = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double x = got[i] == want[i] ? 0 : std::abs(got[i] - want[i]) / allowed[i];
    if (!(x <= worst)) worst = std::isnan(x) ? HUGE_VAL : x, where = i;
  }
  return ingot::detail::concat("element ", where, ": found ", got.empty() ? 0 : got[where], ", expected ",
                               want.empty() ? 0 : want[where], " within ", allowed.empty() ? 0 : allowed[where]);
}

template <class On> void expect_output(AttentionOperands<On>& a, double& closest) {
  On::run(a.op());
  a.out.download(), a.lse.download();
  Buffer positive(DType::f64, a.v64.tensor().shape), sizes(DType::f64, a.out64.tensor().shape);
  auto magnitudes = values(a.v64);
  for (double& x : magnitudes) x = std::abs(x);
  assign(positive, magnitudes);
  attention(a.reference(positive, sizes), {});
  attention(a.reference(a.v64, a.out64), {});
  double worst;
  const std::string said =
      beyond(values(a.out.host()), values(a.out64), allowance(a, values(sizes), a.sums_of(positive)), worst);
  EXPECT_LE(worst, 1) << "out: " << said;
  closest = std::max(closest, worst);
  const double scores = std::exp2(-21) * (4 + a.largest_score());
  const auto lse = compare(a.lse.host(), values(a.lse64), scores, 1e-6);
  EXPECT_TRUE(lse.ok) << "lse: " << lse.message;
  EXPECT_TRUE(a.out.untouched() && a.lse.untouched());
}

// The backward pass written as in the definition, in fp64, with sums of the sizes of all terms beside the sums
// themselves. P and dS are rounded once for the tensor cores; their operands are fp32. The rows of dQ, then those of dK
// and dV, are divided among threads: these loops take most of the tests' time.
struct Sums {
  std::vector<double> value, size;
  explicit Sums(size_t n) : value(n, 0), size(n, 0) {}
};
struct Definition {
  Sums dq, dk, dv, dsinks;
  template <class On>
  Definition(const AttentionOperands<On>& a, const std::vector<double>& out, const std::vector<double>& lse,
             const std::vector<double>& dout)
      : dq(size_t(a.q64.tensor().numel())),
        dk(size_t(a.k64.tensor().numel())),
        dv(size_t(a.v64.tensor().numel())),
        dsinks(size_t(a.c.heads)) {
    const AttentionCase& c = a.c;
    const auto q = values(a.q64), k = values(a.k64), v = values(a.v64), sinks = values(a.sinks64);
    const double u = roundoff(c.type), fp32 = std::exp2(-21) * (4 + a.largest_score()), scale = a.scale();
    const double smallest = c.type == DType::f16 ? std::exp2(-25) : 0;
    const size_t d = size_t(c.d), tokens = size_t(total(c.queries));
    const auto length = [&](const std::vector<double>& x, size_t at) {
      double sum = 0;
      for (size_t i = at; i < at + d; ++i) sum += x[i] * x[i];
      return std::sqrt(sum);
    };
    std::vector<double> v_length(v.size() / d);
    for (size_t i = 0; i < v_length.size(); ++i) v_length[i] = length(v, i * d);
    int64_t q0 = 0, k0 = 0;
    for (size_t s = 0; s < c.queries.size(); ++s) {
      const int64_t n = c.queries[s], m = c.keys[s];
      // Of a query and a key, in the order of the queries.
      std::vector<double> p(size_t(n * m)), ds(size_t(n * m)), ds_off(size_t(n * m));
      for (int64_t h = 0; h < c.heads; ++h) {
        const size_t row0 = size_t(q0 * c.heads + h) * d, rows = size_t(c.heads) * d;
        const size_t key0 = size_t(k0 * c.kv_heads + h / (c.heads / c.kv_heads)) * d, keys = size_t(c.kv_heads) * d;
        std::vector<double> of_sink(size_t(n), 0), of_sink_size(size_t(n), 0);
        parallel_tasks(n, [&](int64_t i) {
          const size_t row = row0 + size_t(i) * rows;
          const double of = lse[size_t(h) * tokens + size_t(q0 + i)], norm = length(dout, row);
          double delta = 0;
          for (size_t x = 0; x < d; ++x) delta += dout[row + x] * out[row + x];
          const double delta_size = norm * length(out, row);
          if (c.sinks && of != -HUGE_VAL) {
            const double share = std::exp(sinks[size_t(h)] - of);
            of_sink[size_t(i)] = share * delta;
            of_sink_size[size_t(i)] = (fp32 + std::exp2(-18)) * share * delta_size;
          }
          const auto seen = detail::keys_seen(i, i + 1, n, m, c.causal, c.window);
          for (int64_t j = seen.begin; j < seen.end; ++j) {
            const size_t key = key0 + size_t(j) * keys, at = size_t(i * m + j);
            double score = 0, dp = 0;
            for (size_t x = 0; x < d; ++x) score += q[row + x] * k[key + x], dp += dout[row + x] * v[key + x];
            score *= scale;
            double slope = 1;
            if (c.softcap > 0) {
              const double part = std::tanh(score / c.softcap);
              score = c.softcap * part, slope = 1 - part * part;
            }
            p[at] = std::exp(score - of), ds[at] = p[at] * (dp - delta) * slope;
            // The rounding error of the slope 1 - part^2 is relative to 1, not to the slope.
            ds_off[at] =
                u * std::abs(ds[at]) + smallest +
                (2 * fp32 + (c.softcap > 0 ? std::exp2(-20) : 0)) * p[at] * (norm * v_length[key / d] + delta_size);
            for (size_t x = 0; x < d; ++x) {
              dq.value[row + x] += ds[at] * k[key + x];
              dq.size[row + x] += ds_off[at] * std::abs(k[key + x]);
            }
          }
        });
        for (int64_t i = 0; i < n; ++i) {
          dsinks.value[size_t(h)] -= of_sink[size_t(i)];
          dsinks.size[size_t(h)] += of_sink_size[size_t(i)];
        }
        parallel_tasks(m, [&](int64_t j) {
          const size_t key = key0 + size_t(j) * keys;
          const auto seeing = detail::queries_seeing(j, j + 1, n, m, c.causal, c.window);
          for (int64_t i = seeing.begin; i < seeing.end; ++i) {
            const size_t row = row0 + size_t(i) * rows, at = size_t(i * m + j);
            const double p_off = (u + 2 * fp32) * p[at] + smallest;
            for (size_t x = 0; x < d; ++x) {
              dk.value[key + x] += ds[at] * q[row + x];
              dk.size[key + x] += ds_off[at] * std::abs(q[row + x]);
              dv.value[key + x] += p[at] * dout[row + x];
              dv.size[key + x] += p_off * std::abs(dout[row + x]);
            }
          }
        });
      }
      q0 += n, k0 += m;
    }
    for (Sums* x : {&dq, &dk})
      for (size_t i = 0; i < x->value.size(); ++i) x->value[i] *= scale, x->size[i] *= std::abs(scale);
    for (Sums* x : {&dq, &dk, &dv})
      for (size_t i = 0; i < x->value.size(); ++i) x->size[i] += 1.01 * u * std::abs(x->value[i]) + smallest + 1e-30;
  }
};

enum class Order { fixed, any };  // the order of the additions to dq
template <class On> struct AttentionGradients {
  using Storage = typename On::Storage;
  explicit AttentionGradients(const AttentionOperands<On>& o, Order order_ = Order::fixed)
      : a(o),
        order(order_),
        dout(a.c.type, a.q.tensor().shape, a.c.d + a.c.gap),
        dq(a.c.type, a.q.tensor().shape, a.c.d + 2 * a.c.gap),
        dk(a.c.type, a.k.tensor().shape, a.c.d + a.c.gap),
        dv(a.c.type, a.k.tensor().shape, a.c.d),
        dsinks(DType::f32, {a.c.heads}),
        workspace(DType::u8, {On::workspace_bytes(op())}) {
    fill_normal(dout.host(), 5), fill_normal(dsinks.host(), 6);
    for (Storage* b : {&dout, &dq, &dk, &dv, &dsinks, &workspace}) b->upload();
  }
  AttentionBackward op() const {
    AttentionBackward b{.q = a.q,
                        .k = a.k,
                        .v = a.v,
                        .cu_q = a.cu_q,
                        .cu_k = a.cu_k,
                        .out = a.out,
                        .lse = a.lse,
                        .dout = dout,
                        .dq = dq,
                        .dk = dk,
                        .dv = dv,
                        .scale = a.scale(),
                        .softcap = a.c.softcap,
                        .window = a.c.window,
                        .causal = a.c.causal,
                        .deterministic = order != Order::any,
                        .regular = a.c.regular};
    if (a.c.sinks) b.sinks = a.sinks, b.dsinks = dsinks;
    return b;
  }
  void run() {
    AttentionBackward b = op();
    b.workspace = workspace;
    On::run(b);
    for (Storage* x : {&dq, &dk, &dv, &dsinks}) x->download();
  }
  const AttentionOperands<On>& a;
  Order order;
  Storage dout, dq, dk, dv, dsinks, workspace;
};

template <class On>
void expect_gradients(const AttentionOperands<On>& a, Order order, std::optional<Definition>& want,
                      double (&closest)[3]) {
  SCOPED_TRACE(order == Order::fixed ? "fixed order" : "any order");
  AttentionGradients<On> b(a, order);
  const auto before = values(b.dsinks.host());
  b.run();
  if (!want) want.emplace(a, values(a.out.host()), values(a.lse.host()), values(b.dout.host()));
  const std::pair<const typename On::Storage*, const Sums*> results[] = {
      {&b.dq, &want->dq}, {&b.dk, &want->dk}, {&b.dv, &want->dv}};
  for (int i = 0; i < 3; ++i) {
    double worst;
    const std::string said =
        beyond(values(results[i].first->host()), results[i].second->value, results[i].second->size, worst);
    EXPECT_LE(worst, 1) << (i == 0 ? "dq: " : i == 1 ? "dk: " : "dv: ") << said;
    EXPECT_TRUE(results[i].first->untouched());
    closest[i] = std::max(closest[i], worst);
  }
  for (size_t h = 0; h < size_t(a.c.heads); ++h) {
    const double got = values(b.dsinks.host())[h], expected = before[h] + want->dsinks.value[h];
    EXPECT_NEAR(got, expected, want->dsinks.size[h] + 1e-6 * std::abs(expected)) << "dsinks " << h;
  }
}

}  // namespace ingot::testing
