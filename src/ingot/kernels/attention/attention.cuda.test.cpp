// The Hopper kernels against the fp64 loop, under bounds derived from the roundings. Without a GPU the numeric cases
// skip; the division into tiles is plain C++.
#include "ingot/kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>

#include "ingot/gpu/device.h"
#include "ingot/kernels/attention/claim_slots.h"
#include "ingot/kernels/attention/hopper/tiles.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace cuda {
uint32_t claim_slot(Stream stream, Device device);  // called by every launch
}
namespace {

using testing::Buffer;
using testing::compare;
using testing::DeviceBuffer;
using testing::roundoff;
using testing::values;

using Lengths = std::vector<int64_t>;
int64_t total(const Lengths& n) { return std::accumulate(n.begin(), n.end(), int64_t(0)); }

std::vector<int32_t> offsets(const Lengths& n) {
  std::vector<int32_t> at{0};
  for (int64_t m : n) at.push_back(at.back() + int32_t(m));
  return at;
}

TEST(AttentionTiles, EveryRowOfEverySegmentHasOnePlace) {
  const std::vector<Lengths> all = {
      {0}, {1}, {64}, {65}, {0, 0, 5, 0, 700, 1, 1, 63, 0}, {191, 193, 192, 1, 2}, Lengths(300, 7)};
  for (const Lengths& n : all)
    for (int rows : {64, 128, 192}) {
      const auto cu = offsets(n);
      std::vector<int> seen(size_t(total(n)), 0);
      for (int64_t place = 0; place < detail::tile_places(total(n), int64_t(n.size()), rows); ++place) {
        const auto at = detail::tile_place(cu.data(), int(n.size()), rows, place);
        ASSERT_GE(at.first, 0);
        for (int64_t i = at.first; i < std::min(at.first + rows, n[size_t(at.segment)]); ++i)
          ++seen[size_t(cu[size_t(at.segment)] + i)];
      }
      EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; })) << rows;
    }
}

TEST(AttentionTiles, RangesHoldExactlyWhatRowsSee) {
  for (int64_t queries : {1, 5, 40})
    for (int64_t keys : {0, 1, 11, 40, 90})
      for (int64_t window : {0, 1, 7, 100})
        for (bool causal : {true, false}) {
          if (!causal && window > 0) continue;
          const auto sees = [&](int64_t i, int64_t j) {
            return !causal || (j <= i + keys - queries && (window == 0 || j > i + keys - queries - window));
          };
          for (int64_t i = 0; i < queries; ++i) {
            const auto r = detail::keys_seen(i, i + 1, queries, keys, causal, window);
            for (int64_t j = 0; j < keys; ++j) EXPECT_EQ(sees(i, j), j >= r.begin && j < r.end) << i << ' ' << j;
          }
          for (int64_t j = 0; j < keys; ++j) {
            const auto r = detail::queries_seeing(j, j + 1, queries, keys, causal, window);
            for (int64_t i = 0; i < queries; ++i) EXPECT_EQ(sees(i, j), i >= r.begin && i < r.end) << i << ' ' << j;
          }
        }
}

// Everything below needs a GPU.
class AttentionCuda : public testing::GpuTest<> {};

struct Case {
  Lengths queries, keys;  // keys empty: as queries
  int64_t heads = 2, kv_heads = 1, d = 64;
  DType type = DType::bf16;
  int64_t gap = 0;
  double softcap = 0;
  int64_t window = 0;
  bool causal = true, sinks = false;
  double size = 1.5;            // of q and k
  std::optional<double> scale;  // of the scores; left out: 1 / sqrt(d)
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << "queries";
  for (int64_t n : c.queries) out << ' ' << n;
  out << " keys";
  for (int64_t n : c.keys) out << ' ' << n;
  return out << " heads " << c.heads << '/' << c.kv_heads << " d " << c.d << ' ' << c.type << " gap " << c.gap
             << " softcap " << c.softcap << " window " << c.window << " causal " << c.causal << " sinks " << c.sinks
             << " size " << c.size << " scale " << c.scale.value_or(0);
}

// Cases of the same width and type; d = 0: of several widths.
struct Group {
  int64_t d = 0;
  DType type = DType::bf16;
};
std::vector<Case> cases(const Group& group) {
  std::vector<Case> all;
  const auto [d, type] = group;
  if (d > 0) {
    const Case some[] = {
        {.queries = {64}, .heads = 1, .causal = false},
        {.queries = {128}, .heads = 1},
        {.queries = {1}, .heads = 1},
        {.queries = {300}},
        {.queries = {0, 5, 0, 700, 1, 129, 64}, .heads = 4, .kv_heads = 2, .gap = 8},
        {.queries = {475, 130, 33}, .heads = 4, .kv_heads = 4, .softcap = 20},
        {.queries = {300, 500}, .window = 128, .sinks = true},
        {.queries = {300, 77}, .window = 5},
        {.queries = {700}, .softcap = 10, .window = 1, .sinks = true},
        {.queries = {5, 140}, .keys = {390, 170}, .heads = 4, .kv_heads = 4, .sinks = true},
        {.queries = {240, 9}, .keys = {111, 9}},                               // the first queries see nothing
        {.queries = {240, 9}, .keys = {111, 9}, .window = 30, .sinks = true},  // nothing but the sink
        {.queries = {133, 20}, .keys = {250, 0}, .causal = false},
        {.queries = {133, 20}, .keys = {250, 0}, .causal = false, .sinks = true},
        {.queries = {10, 20}, .keys = {0, 0}, .sinks = true},
        {.queries = {200}, .size = 12},  // huge scores
        {.queries = {200}, .scale = -0.1},
        {.queries = {200}, .scale = 0},
        {.queries = Lengths(40, 17), .heads = 3, .kv_heads = 3},
    };
    for (Case c : some) {
      c.d = d, c.type = type;
      all.push_back(c);
    }
  } else {
    for (int64_t width : {8, 40, 72, 96, 120, 136, 192, 248})
      all.push_back({.queries = {150, 7}, .heads = 4, .kv_heads = 2, .d = width});
  }
  for (Case& c : all)
    if (c.keys.empty()) c.keys = c.queries;
  return all;
}

// The operands of a case on a GPU, the same numbers in fp64 on the host, and their results in fp64.
struct Operands {
  explicit Operands(const Case& given)
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
    testing::fill_normal(q.host(), 1, c.size), testing::fill_normal(k.host(), 2, c.size);
    testing::fill_normal(v.host(), 3), testing::fill_normal(sinks.host(), 4);
    const auto fill_offsets = [](const DeviceBuffer& b, const Lengths& n) {
      const auto at = offsets(n);
      testing::assign(b.host(), std::vector<double>(at.begin(), at.end()));
    };
    fill_offsets(cu_q, c.queries), fill_offsets(cu_k, c.keys);
    for (DeviceBuffer* b : {&q, &k, &v, &cu_q, &cu_k, &sinks, &out, &lse}) b->upload();
    testing::assign(q64, values(q.host())), testing::assign(k64, values(k.host()));
    testing::assign(v64, values(v.host())), testing::assign(sinks64, values(sinks.host()));
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
  // Of `x` in place of v, summed over the visible keys.
  std::vector<double> sums_of(const Tensor& x) const {
    Buffer zero(DType::f64, q64.tensor().shape), result(DType::f64, out64.tensor().shape);
    testing::assign(zero, std::vector<double>(size_t(zero.tensor().numel()), 0));
    Attention mean = reference(x, result);
    mean.q = zero, mean.sinks = {};
    Buffer counts(DType::f64, lse64.tensor().shape);  // exp(lse) of equal scores
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
  // No score is larger (Cauchy), in powers of two.
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
  Case c;
  DeviceBuffer q, k, v, cu_q, cu_k, sinks, out, lse;
  Buffer q64, k64, v64, sinks64, out64, lse64;
};

// out = sum p v / sum p, where p is rounded once for the tensor cores: u times the same sum over |v|. Then out is
// rounded. Scores are fp32 sums of products whose exponential takes their absolute error as a relative one; the tensor
// cores' sums and the hardware's exp2 are good to about 2^-22 of the terms' size. f16 numbers below 2^-14 are rounded
// to multiples of 2^-24: each p, which is at most 1, and out. (In bf16 such numbers do not occur.) sizes: sum p |v|;
// each: sum |v| over the visible keys.
std::vector<double> allowance(const Operands& a, const std::vector<double>& sizes, const std::vector<double>& each) {
  const double u = roundoff(a.c.type), scores = std::exp2(-21) * (4 + a.largest_score());
  const double smallest = a.c.type == DType::f16 ? std::exp2(-25) : 0;
  const auto want = values(a.out64);
  std::vector<double> allowed(want.size());
  for (size_t i = 0; i < want.size(); ++i)
    allowed[i] = (u + 2 * scores) * sizes[i] + u * std::abs(want[i]) * 1.01 + smallest * (1 + each[i]) + 1e-30;
  return allowed;
}

// The largest |got - want| / allowed, and where.
std::string beyond(const std::vector<double>& got, const std::vector<double>& want, const std::vector<double>& allowed,
                   double& worst) {
  worst = 0;
  size_t where = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double x = got[i] == want[i] ? 0 : std::abs(got[i] - want[i]) / allowed[i];
    if (!(x <= worst)) worst = std::isnan(x) ? HUGE_VAL : x, where = i;
  }
  return ingot::detail::concat("element ", where, ": found ", got.empty() ? 0 : got[where], ", expected ",
                               want.empty() ? 0 : want[where], " within ", allowed.empty() ? 0 : allowed[where]);
}

class AttentionCudaNumbers : public testing::GpuTest<::testing::TestWithParam<Group>> {};
INSTANTIATE_TEST_SUITE_P(, AttentionCudaNumbers,
                         ::testing::Values(Group{64, DType::bf16}, Group{64, DType::f16}, Group{128, DType::bf16},
                                           Group{128, DType::f16}, Group{256, DType::bf16}, Group{256, DType::f16},
                                           Group{}),
                         [](const auto& info) {
                           return info.param.d == 0 ? std::string("other_widths")
                                                    : ingot::detail::concat(info.param.d, "_wide_", info.param.type);
                         });

void expect_output(Operands& a, double& closest) {
  attention(a.op(), {});
  a.out.download(), a.lse.download();
  Buffer positive(DType::f64, a.v64.tensor().shape), sizes(DType::f64, a.out64.tensor().shape);
  auto magnitudes = values(a.v64);
  for (double& x : magnitudes) x = std::abs(x);
  testing::assign(positive, magnitudes);
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

TEST_P(AttentionCudaNumbers, MatchFp64) {
  double closest = 0;
  for (const Case& c : cases(GetParam())) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands a(c);
    expect_output(a, closest);
  }
  std::cout << "largest error of out: " << closest << " of what is allowed\n";
}

// The backward pass written as in the definition, in fp64, with sums of the sizes of all terms beside the sums
// themselves. P and dS are rounded once for the tensor cores; their operands are fp32.
struct Sums {
  std::vector<double> value, size;
  explicit Sums(size_t n) : value(n, 0), size(n, 0) {}
};
struct Definition {
  Sums dq, dk, dv, dsinks;
  Definition(const Operands& a, const std::vector<double>& out, const std::vector<double>& lse,
             const std::vector<double>& dout)
      : dq(size_t(a.q64.tensor().numel())),
        dk(size_t(a.k64.tensor().numel())),
        dv(size_t(a.v64.tensor().numel())),
        dsinks(size_t(a.c.heads)) {
    const Case& c = a.c;
    const auto q = values(a.q64), k = values(a.k64), v = values(a.v64), sinks = values(a.sinks64);
    const double u = roundoff(c.type), fp32 = std::exp2(-21) * (4 + a.largest_score());
    const double smallest = c.type == DType::f16 ? std::exp2(-25) : 0;
    const size_t d = size_t(c.d), tokens = size_t(total(c.queries));
    const auto length = [&](const std::vector<double>& x, size_t at) {
      double sum = 0;
      for (size_t i = at; i < at + d; ++i) sum += x[i] * x[i];
      return std::sqrt(sum);
    };
    int64_t q0 = 0, k0 = 0;
    for (size_t s = 0; s < c.queries.size(); ++s) {
      const int64_t n = c.queries[s], m = c.keys[s];
      for (int64_t i = 0; i < n; ++i)
        for (int64_t h = 0; h < c.heads; ++h) {
          const size_t row = size_t((q0 + i) * c.heads + h) * d;
          const double of = lse[size_t(h) * tokens + size_t(q0 + i)], norm = length(dout, row);
          double delta = 0;
          for (size_t x = 0; x < d; ++x) delta += dout[row + x] * out[row + x];
          const double delta_size = norm * length(out, row);
          if (c.sinks && of != -HUGE_VAL) {
            const double p = std::exp(sinks[size_t(h)] - of);
            dsinks.value[size_t(h)] -= p * delta;
            dsinks.size[size_t(h)] += (fp32 + std::exp2(-18)) * p * delta_size;
          }
          const auto seen = detail::keys_seen(i, i + 1, n, m, c.causal, c.window);
          for (int64_t j = seen.begin; j < seen.end; ++j) {
            const size_t key = size_t((k0 + j) * c.kv_heads + h / (c.heads / c.kv_heads)) * d;
            double score = 0, dp = 0;
            for (size_t x = 0; x < d; ++x) score += q[row + x] * k[key + x], dp += dout[row + x] * v[key + x];
            score *= a.scale();
            double slope = 1;
            if (c.softcap > 0) {
              const double part = std::tanh(score / c.softcap);
              score = c.softcap * part, slope = 1 - part * part;
            }
            const double p = std::exp(score - of), ds = p * (dp - delta) * slope;
            // The rounding error of the slope 1 - part^2 is relative to 1.
            const double ds_off =
                u * std::abs(ds) + smallest +
                (2 * fp32 + (c.softcap > 0 ? std::exp2(-20) : 0)) * p * (norm * length(v, key) + delta_size);
            const double p_off = (u + 2 * fp32) * p + smallest;
            for (size_t x = 0; x < d; ++x) {
              dq.value[row + x] += ds * k[key + x] * a.scale();
              dq.size[row + x] += ds_off * std::abs(k[key + x] * a.scale());
              dk.value[key + x] += ds * q[row + x] * a.scale();
              dk.size[key + x] += ds_off * std::abs(q[row + x] * a.scale());
              dv.value[key + x] += p * dout[row + x];
              dv.size[key + x] += p_off * std::abs(dout[row + x]);
            }
          }
        }
      q0 += n, k0 += m;
    }
    for (Sums* x : {&dq, &dk, &dv})
      for (size_t i = 0; i < x->value.size(); ++i) x->size[i] += 1.01 * u * std::abs(x->value[i]) + smallest + 1e-30;
  }
};

enum class Order { fixed, any };  // of dq's sums
struct Gradients {
  explicit Gradients(const Operands& o, Order order_ = Order::fixed)
      : a(o),
        order(order_),
        dout(a.c.type, a.q.tensor().shape, a.c.d + a.c.gap),
        dq(a.c.type, a.q.tensor().shape, a.c.d + 2 * a.c.gap),
        dk(a.c.type, a.k.tensor().shape, a.c.d + a.c.gap),
        dv(a.c.type, a.k.tensor().shape, a.c.d),
        dsinks(DType::f32, {a.c.heads}),
        workspace(DType::u8, {attention_backward_workspace_bytes(op())}) {
    testing::fill_normal(dout.host(), 5), testing::fill_normal(dsinks.host(), 6);
    for (DeviceBuffer* b : {&dout, &dq, &dk, &dv, &dsinks, &workspace}) b->upload();
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
                        .deterministic = order != Order::any};
    if (a.c.sinks) b.sinks = a.sinks, b.dsinks = dsinks;
    return b;
  }
  void run() {
    AttentionBackward b = op();
    b.workspace = workspace;
    attention_backward(b, {});
    for (DeviceBuffer* x : {&dq, &dk, &dv, &dsinks}) x->download();
  }
  const Operands& a;
  Order order;
  DeviceBuffer dout, dq, dk, dv, dsinks, workspace;
};

void expect_gradients(const Operands& a, Order order, std::optional<Definition>& want, double (&closest)[3]) {
  SCOPED_TRACE(order == Order::fixed ? "fixed order" : "any order");
  Gradients b(a, order);
  const auto before = values(b.dsinks.host());
  b.run();
  if (!want) want.emplace(a, values(a.out.host()), values(a.lse.host()), values(b.dout.host()));
  const std::pair<const DeviceBuffer*, const Sums*> results[] = {
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

// For any order of additions, too: the order of fp32 partial sums changes a sum by 2^-24 of the terms' size, thousands
// of times less than dS's rounding.
TEST_P(AttentionCudaNumbers, OfGradientsMatchFp64) {
  double closest[3] = {};
  for (const Case& c : cases(GetParam())) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands a(c);
    attention(a.op(), {});
    a.out.download(), a.lse.download();
    std::optional<Definition> want;
    for (Order order : {Order::fixed, Order::any}) expect_gradients(a, order, want, closest);
  }
  std::cout << "largest errors of dq, dk, dv: " << closest[0] << ' ' << closest[1] << ' ' << closest[2]
            << " of what is allowed\n";
}

// For slow tools: blocks with several tiles, tiles of several steps, rows behind a segment's end.
TEST_F(AttentionCuda, MatchesFp64Small) {
  const Case some[] = {
      {.queries = {300, 7}, .keys = {300, 7}, .heads = 4, .kv_heads = 2, .d = 64, .sinks = true},
      {.queries = {5, 140}, .keys = {200, 150}, .d = 128, .softcap = 20, .window = 100},
  };
  for (const Case& c : some) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands a(c);
    double of_output = 0, of_gradients[3] = {};
    expect_output(a, of_output);
    std::optional<Definition> want;
    for (Order order : {Order::fixed, Order::any}) expect_gradients(a, order, want, of_gradients);
  }
}

// The old and the new value, both rounded, are added and rounded again; each element once.
TEST_F(AttentionCuda, AddsToTheValuesGradientWhereAsked) {
  for (int64_t d : {64, 128, 256}) {
    Operands a({.queries = {300, 7, 0, 130}, .keys = {300, 7, 0, 130}, .heads = 4, .kv_heads = 2, .d = d, .gap = 8});
    attention(a.op(), {});
    Gradients b(a);
    b.run();
    const auto alone = values(b.dv.host());
    testing::fill_normal(b.dv.host(), 9);
    const auto there = values(b.dv.host());
    b.dv.upload();
    AttentionBackward op = b.op();
    op.add_dv = true;
    op.workspace = b.workspace;
    attention_backward(op, {});
    b.dv.download();
    const auto got = values(b.dv.host());
    op.add_dv = false, op.has_delta = true;  // the last call left the sums in the workspace
    attention_backward(op, {});
    b.dv.download();
    EXPECT_EQ(values(b.dv.host()), alone);
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got[i], double(float(bf16(float(there[i]) + float(alone[i]))))) << d << ", element " << i;
    EXPECT_TRUE(b.dv.untouched());
  }
}

TEST_F(AttentionCuda, RepeatsBitForBitAndSegmentsDoNotDependOnTheirNeighbours) {
  for (int64_t d : {64, 128}) {
    Operands alone({.queries = {300}, .keys = {300}, .heads = 4, .kv_heads = 2, .d = d});
    Operands beside({.queries = {77, 300, 500}, .keys = {77, 300, 500}, .heads = 4, .kv_heads = 2, .d = d});
    // The second segment holds the first operand's numbers, its neighbours NaN.
    for (auto [from, to] : {std::pair{&alone.q, &beside.q}, {&alone.k, &beside.k}, {&alone.v, &beside.v}}) {
      to->host();
      std::vector<double> x(size_t(to->host().numel()), NAN);
      const auto part = values(from->host());
      std::copy(part.begin(), part.end(), x.begin() + 77 * to->host().size(1) * d);
      testing::assign(to->host(), x);
      to->upload();
    }
    attention(alone.op(), {});
    alone.out.download();
    const auto want = values(alone.out.host());
    Gradients one(alone), three(beside), any_order(beside, Order::any);
    std::vector<double> x(size_t(three.dout.host().numel()), NAN);
    const auto part = values(one.dout.host());
    std::copy(part.begin(), part.end(), x.begin() + 77 * 4 * d);
    testing::assign(three.dout.host(), x);
    testing::assign(any_order.dout.host(), x);
    for (Gradients* b : {&three, &any_order}) b->dout.upload();
    one.run();
    for (int repeat = 0; repeat < 3; ++repeat) {
      attention(beside.op(), {});
      beside.out.download();
      EXPECT_EQ(values(beside.out.host().slice(0, 77, 377)), want) << d;
      three.run();
      EXPECT_EQ(values(three.dq.host().slice(0, 77, 377)), values(one.dq.host())) << d;
      EXPECT_EQ(values(three.dk.host().slice(0, 77, 377)), values(one.dk.host())) << d;
      EXPECT_EQ(values(three.dv.host().slice(0, 77, 377)), values(one.dv.host())) << d;
      any_order.run();
      for (double value : values(any_order.dq.host().slice(0, 77, 377))) ASSERT_FALSE(std::isnan(value)) << d;
      EXPECT_EQ(values(any_order.dk.host().slice(0, 77, 377)), values(one.dk.host())) << d;
      EXPECT_EQ(values(any_order.dv.host().slice(0, 77, 377)), values(one.dv.host())) << d;
    }
  }
}

// More tiles than a GPU has SMs. Sums in another order differ by a few roundings of the result and by fp32's of the
// terms.
TEST_F(AttentionCuda, LongSegmentsInAnyOrderMatchAFixedOne) {
  for (auto [d, window] : {std::pair<int64_t, int64_t>{64, 0}, {128, 0}, {128, 5000}}) {
    const Lengths lengths{300, 23000, 77};
    Operands a({.queries = lengths, .keys = lengths, .heads = 2, .kv_heads = 1, .d = d, .window = window});
    attention(a.op(), {});
    Gradients fixed(a), any(a, Order::any);
    fixed.run(), any.run();
    const std::pair<const DeviceBuffer*, const DeviceBuffer*> results[] = {
        {&any.dq, &fixed.dq}, {&any.dk, &fixed.dk}, {&any.dv, &fixed.dv}};
    for (const auto& [got, want] : results) {
      const auto x = values(want->host());
      double sum = 0;
      for (double y : x) sum += y * y;
      const double typical = std::sqrt(sum / double(x.size()));
      const auto seen = compare(got->host(), x, 1e-3 * typical, 2.1 * roundoff(DType::bf16));
      EXPECT_TRUE(seen.ok) << d << ": " << seen.message;
    }
    const auto dq = values(fixed.dq.host()), dk = values(fixed.dk.host()), dv = values(fixed.dv.host());
    for (int repeat = 0; repeat < 3; ++repeat) {
      fixed.run();
      EXPECT_EQ(values(fixed.dq.host()), dq);
      EXPECT_EQ(values(fixed.dk.host()), dk);
      EXPECT_EQ(values(fixed.dv.host()), dv);
    }
  }
}

// Blocks claim their tiles from counters in global memory, and concurrent launches must not share a counter.
TEST_F(AttentionCuda, StreamsAndGraphsDoNotDisturbEachOther) {
  const Lengths lengths(60, 90);
  Operands one({.queries = lengths, .keys = lengths}), two({.queries = {2000}, .keys = {2000}}),
      three({.queries = lengths, .keys = lengths, .heads = 4, .kv_heads = 4});
  std::vector<double> want[3];
  Operands* const all[3] = {&one, &two, &three};
  for (int i = 0; i < 3; ++i) {
    attention(all[i]->op(), {});
    all[i]->out.download();
    want[i] = values(all[i]->out.host());
  }
  const auto backward = [](Gradients& b, Stream stream) {
    AttentionBackward op = b.op();
    op.workspace = b.workspace;
    attention_backward(op, stream);
  };
  std::optional<Gradients> gradients[3];
  std::vector<double> want_dq[3];
  for (int i = 0; i < 3; ++i) {
    gradients[i].emplace(*all[i]);
    gradients[i]->run();
    want_dq[i] = values(gradients[i]->dq.host());
    for (DeviceBuffer* b : {&all[i]->out, &gradients[i]->dq}) {
      testing::assign(b->host(), std::vector<double>(want[i].size(), 0));
      b->upload();
    }
  }
  gpu::synchronize();
  const gpu::OwnedStream streams[3];
  const auto step = [&](int i) { attention(all[i]->op(), streams[i]), backward(*gradients[i], streams[i]); };
  const gpu::Graph graph(streams[2], [&] {
    for (int i = 0; i < 20; ++i) step(2);
  });
  for (int i = 0; i < 20; ++i) {
    graph.launch(streams[2]);
    for (int j = 0; j < 10; ++j) step(0), step(1);
  }
  gpu::synchronize();
  for (int i = 0; i < 3; ++i) {
    all[i]->out.download(), gradients[i]->dq.download();
    EXPECT_EQ(values(all[i]->out.host()), want[i]) << i;
    EXPECT_EQ(values(gradients[i]->dq.host()), want_dq[i]) << i;
  }
}

#ifdef INGOT_HAS_CUDA_ATTENTION
// The counters of launches recorded in turn into a graph, which is returned. A thread of CUDA's releases a counter
// after the last graph with this counter has ended, so a little later.
class RecordedCounters : public AttentionCuda {
 protected:
  static std::unique_ptr<gpu::Graph> record(Stream stream, std::vector<uint32_t>& slots, int launches = 1,
                                            bool fails = false) {
    DeviceBuffer node(DType::u8, {16});
    return std::make_unique<gpu::Graph>(stream, [&] {
      gpu::fill_bytes(Tensor(node).data, 0, 16, stream);
      for (int i = 0; i < launches; ++i) slots.push_back(cuda::claim_slot(stream, {Device::cuda, 0}));
      if (fails) fail(ErrorCode::unsupported, "a recording that fails");
    });
  }
  static bool holds(const std::vector<uint32_t>& slots, uint32_t slot) {
    return std::find(slots.begin(), slots.end(), slot) != slots.end();
  }
};

TEST_F(RecordedCounters, BelongToAGraphUntilItEnds) {
  using std::chrono::steady_clock;
  const Lengths lengths(60, 90);
  Operands one({.queries = lengths, .keys = lengths});
  const gpu::OwnedStream stream;
  std::vector<uint32_t> own;
  auto graph = std::make_unique<gpu::Graph>(stream, [&] {
    own.push_back(cuda::claim_slot(stream, {Device::cuda, 0}));
    attention(one.op(), stream);
    own.push_back(cuda::claim_slot(stream, {Device::cuda, 0}));
  });
  EXPECT_NE(own[0], own[1]);
  for (int i = 0; i < 20; ++i) {
    graph->launch(stream);  // a completed launch does not end the graph
    std::vector<uint32_t> others;
    record(stream, others, 8);
    for (uint32_t slot : others) ASSERT_FALSE(holds(own, slot)) << slot;
  }
  gpu::synchronize();
  graph.reset();
  bool given_back = false;
  for (const auto begin = steady_clock::now(); !given_back && steady_clock::now() - begin < std::chrono::seconds(10);) {
    std::vector<uint32_t> others;
    record(stream, others, 8);
    for (uint32_t slot : others) given_back |= holds(own, slot);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(given_back) << "counters of a graph that ended are still nobody's";
}
// More recordings than counters, so that each counter must serve again, also after failed recordings.
TEST_F(RecordedCounters, NeverEndWhereGraphsDo) {
  using namespace cuda::attention_hopper;
  constexpr int kLaunches = 1000, kGraphs = 2 * int(kSlots) / kLaunches;
  const gpu::OwnedStream stream;
  for (bool fails : {false, true})
    for (int i = 0; i < kGraphs; ++i) {
      std::vector<uint32_t> slots;
      if (fails)
        EXPECT_THROW(record(stream, slots, kLaunches, true), Error);
      else
        record(stream, slots, kLaunches);
      ASSERT_EQ(slots.size(), size_t(kLaunches));
      ASSERT_FALSE(holds(slots, kNoCounter)) << "graph " << i << (fails ? " of those that fail" : "");
      if (i % 16 == 15)
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // CUDA's thread releases the
                                                                     // counters
    }
}
#endif

// Launches without a counter claim nothing: launches of two such streams run at once. This is the last test of
// counters, because the test uses up all counters of this process's streams.
TEST_F(AttentionCuda, MoreStreamsThanCountersDoNotDisturbEachOther) {
  constexpr int kStreams = int(cuda::attention_hopper::kStreamSlots), kPairs = 16;
  Operands one({.queries = Lengths(60, 90), .keys = Lengths(60, 90)}), two({.queries = {2000}, .keys = {2000}}),
      small({.queries = {20}, .keys = {20}});
  Operands* const operands[2] = {&one, &two};
  std::optional<Gradients> gradients[2];
  std::vector<double> want[2], want_dq[2], want_dk[2];
  for (int i = 0; i < 2; ++i) {
    attention(operands[i]->op(), {});
    operands[i]->out.download();
    want[i] = values(operands[i]->out.host());
    gradients[i].emplace(*operands[i]);
    gradients[i]->run();
    want_dq[i] = values(gradients[i]->dq.host()), want_dk[i] = values(gradients[i]->dk.host());
    for (DeviceBuffer* b : {&operands[i]->out, &gradients[i]->dq, &gradients[i]->dk}) {
      testing::assign(b->host(), std::vector<double>(values(b->host()).size(), 0));
      b->upload();
    }
  }
  const auto streams = std::make_unique<gpu::OwnedStream[]>(kStreams + kPairs);
  for (int i = 0; i < kStreams + kPairs; ++i) attention(small.op(), streams[size_t(i)]);
  gpu::synchronize();
  for (int i = 0; i < kPairs; ++i) {
    for (int repeat = 0; repeat < 10; ++repeat)
      for (int j = 0; j < 2; ++j) {
        const gpu::OwnedStream& stream = streams[size_t(i + j * kStreams)];
        attention(operands[j]->op(), stream);
        AttentionBackward op = gradients[j]->op();
        op.workspace = gradients[j]->workspace;
        attention_backward(op, stream);
      }
    gpu::synchronize();
  }
  for (int i = 0; i < 2; ++i) {
    for (DeviceBuffer* b : {&operands[i]->out, &gradients[i]->dq, &gradients[i]->dk}) b->download();
    EXPECT_EQ(values(operands[i]->out.host()), want[i]) << i;
    EXPECT_EQ(values(gradients[i]->dq.host()), want_dq[i]) << i;
    EXPECT_EQ(values(gradients[i]->dk.host()), want_dk[i]) << i;
  }
}

std::string said(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) { return e.what(); }
  return "no error";
}

TEST_F(AttentionCuda, RefusesByNameWhatItCannotDo) {
  const Operands good({.queries = {20}, .keys = {20}});
  const auto with = [&](const std::function<void(Attention&)>& change) {
    return said([&] {
      Attention a = good.op();
      change(a);
      attention(a, {});
    });
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  DeviceBuffer wide(DType::f32, {20, 2, 64}), key(DType::f32, {20, 1, 64});
  EXPECT_TRUE(
      has(with([&](Attention& a) { a.q = wide, a.k = key, a.v = key, a.out = wide; }), "found dtype f32 on a GPU"));
  DeviceBuffer q20(DType::bf16, {20, 2, 20}), k20(DType::bf16, {20, 1, 20});
  EXPECT_TRUE(
      has(with([&](Attention& a) { a.q = q20, a.k = k20, a.v = k20, a.out = q20; }), "found a head size of 20"));
  DeviceBuffer q264(DType::bf16, {20, 2, 264}), k264(DType::bf16, {20, 1, 264});
  EXPECT_TRUE(
      has(with([&](Attention& a) { a.q = q264, a.k = k264, a.v = k264, a.out = q264; }), "found a head size of 264"));
  DeviceBuffer v32(DType::bf16, {20, 1, 32}), out32(DType::bf16, {20, 2, 32});
  EXPECT_TRUE(has(with([&](Attention& a) { a.v = v32, a.out = out32; }), "head size of v on a GPU"));
  DeviceBuffer odd(DType::bf16, {20, 2, 64}, 67), shifted(DType::bf16, {20, 2, 64}, 64, 1);
  EXPECT_TRUE(has(with([&](Attention& a) { a.out = odd; }), "expected an address of a multiple of 16 bytes"));
  EXPECT_TRUE(has(with([&](Attention& a) { a.out = shifted; }), "expected an address of a multiple of 16 bytes"));
  EXPECT_TRUE(has(with([&](Attention& a) { a.q = odd; }), "attention: q"));
  DeviceBuffer first(DType::i32, {1});
  EXPECT_TRUE(has(with([&](Attention& a) { a.ring = 20, a.k_first = first; }), "found a ring of 20 keys on a GPU"));
  Gradients b(good);
  EXPECT_TRUE(has(said([&] { attention_backward(b.op(), {}); }), "workspace: found "));
}

TEST_F(AttentionCuda, NothingToDoIsDone) {
  Operands none({.queries = {0}, .keys = {0}}), no_segments({.queries = {}, .keys = {}});
  for (Operands* a : {&none, &no_segments}) {
    attention(a->op(), {});
    attention_backward(Gradients(*a).op(), {});
  }
  gpu::synchronize();
  // No query sees the keys: their gradients are zero.
  Operands unseen({.queries = {0}, .keys = {70}});
  Gradients b(unseen);
  b.run();
  for (const DeviceBuffer* x : {&b.dk, &b.dv})
    for (double value : values(x->host())) ASSERT_EQ(value, 0);
}

// Padding behind the last segment holds NaN; results hold NaN before the call.
TEST_F(AttentionCuda, RowsOfNoSegmentAreZeroAndTakeNoGradient) {
  for (int64_t d : {64, 128, 256})
    for (Order order : {Order::fixed, Order::any})
      for (int64_t padding : {1, 90, 3000}) {
        SCOPED_TRACE(::testing::Message() << d << ' ' << padding);
        Operands a({.queries = {77, 300, padding}, .keys = {77, 310, padding}, .heads = 4, .kv_heads = 2, .d = d});
        for (auto [b, covered] : {std::pair{&a.q, 377}, {&a.k, 387}, {&a.v, 387}}) {
          std::vector<double> x = values(b->host());
          std::fill(x.begin() + covered * b->host().size(1) * d, x.end(), NAN);
          testing::assign(b->host(), x);
          b->upload();
        }
        Attention op = a.op();
        op.cu_q = op.cu_q.slice(0, 0, 3), op.cu_k = op.cu_k.slice(0, 0, 3);
        attention(op, {});
        a.out.download(), a.lse.download();
        Gradients g(a, order);
        AttentionBackward back = g.op();
        back.cu_q = op.cu_q, back.cu_k = op.cu_k, back.workspace = g.workspace;
        attention_backward(back, {});
        for (DeviceBuffer* b : {&g.dq, &g.dk, &g.dv}) b->download();
        const auto expect_rows = [](const char* name, const Tensor& t, int64_t covered) {
          for (double x : values(t.slice(0, 0, covered))) ASSERT_TRUE(std::isfinite(x)) << name;
          for (double x : values(t.slice(0, covered, t.size(0)))) ASSERT_EQ(x, 0) << name;
        };
        expect_rows("out", a.out.host(), 377), expect_rows("dq", g.dq.host(), 377);
        expect_rows("dk", g.dk.host(), 387), expect_rows("dv", g.dv.host(), 387);
        for (double x : values(a.lse.host().slice(1, 377, 377 + padding))) ASSERT_EQ(x, -HUGE_VAL);
      }
}

// Linear in dlse: of random numbers and of none, the difference is p scale k, p scale q and nothing for v.
TEST_F(AttentionCuda, LseHasAGradient) {
  for (int64_t d : {64, 128})
    for (Order order : {Order::fixed, Order::any}) {
      Operands a({.queries = {70, 33}, .keys = {70, 50}, .heads = 2, .kv_heads = 1, .d = d});
      attention(a.op(), {});
      a.lse.download();
      Gradients g(a, order);
      DeviceBuffer dlse(DType::f32, {2, 103});
      testing::fill_normal(dlse.host(), 8), dlse.upload();
      testing::assign(g.dout.host(), std::vector<double>(size_t(g.dout.host().numel()), 0)), g.dout.upload();
      AttentionBackward back = g.op();
      back.workspace = g.workspace, back.dlse = dlse;
      attention_backward(back, {});
      g.dq.download();
      const auto q = values(a.q64), k = values(a.k64), lse = values(a.lse.host()), of = values(dlse.host()),
                 got = values(g.dq.host());
      for (int64_t i = 0; i < 70; ++i)
        for (int64_t h = 0; h < 2; ++h) {
          std::vector<double> want(size_t(d), 0), size(size_t(d), 0);
          for (int64_t j = 0; j <= i; ++j) {
            double score = 0;
            for (int64_t x = 0; x < d; ++x) score += q[size_t((i * 2 + h) * d + x)] * k[size_t(j * d + x)];
            const double p = std::exp(a.scale() * score - lse[size_t(h * 103 + i)]);
            for (int64_t x = 0; x < d; ++x) {
              const double term = p * of[size_t(h * 103 + i)] * a.scale() * k[size_t(j * d + x)];
              want[size_t(x)] += term, size[size_t(x)] += std::abs(term);
            }
          }
          for (int64_t x = 0; x < d; ++x)  // dS and dQ are rounded to bf16 once
            ASSERT_NEAR(got[size_t((i * 2 + h) * d + x)], want[size_t(x)],
                        2.1 * roundoff(DType::bf16) * size[size_t(x)] + 1e-6)
                << d << ' ' << i;
        }
    }
}

TEST_F(AttentionCuda, ExcludesSelfAsTheCpuDoes) {
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (auto [d, writes] : {std::pair<int64_t, bool>{64, false}, {64, true}, {128, false}, {40, true}}) {
      const Shape many{333, 8, d}, few{333, 4, d};
      DeviceBuffer y(type, many), v(type, few), z(type, many), dz(type, many), dy(type, many), dv(type, few);
      Buffer y64(DType::f64, many), v64(DType::f64, few), z64(DType::f64, many), dz64(DType::f64, many),
          dy64(DType::f64, many), dv64(DType::f64, few);
      uint64_t seed = 1;
      for (auto [gpu, cpu] : {std::pair{&y, &y64}, {&v, &v64}, {&dz, &dz64}, {&dv, &dv64}}) {
        testing::fill_normal(gpu->host(), seed++);
        testing::assign(*cpu, values(gpu->host()));
        gpu->upload();
      }
      DeviceBuffer delta(DType::f32, {8, 333});
      z.upload(), dy.upload(), delta.upload();
      exclude_self({.y = y, .v = v, .z = z}, {});
      exclude_self_backward({.y = y, .v = v, .dz = dz, .dy = dy, .dv = dv, .write_dv = writes, .delta = delta}, {});
      exclude_self({.y = y64, .v = v64, .z = z64}, {});
      if (writes) fill_zero(dv64);
      exclude_self_backward({.y = y64, .v = v64, .dz = dz64, .dy = dy64, .dv = dv64}, {});
      const double u = roundoff(type), sums = 64 * roundoff(DType::f32);
      for (auto [gpu, cpu] : {std::pair{&z, &z64}, {&dy, &dy64}, {&dv, &dv64}}) {
        gpu->download();
        const auto seen = compare(gpu->host(), values(*cpu), sums + (type == DType::f16 ? 1e-7 : 0), 1.01 * u + sums);
        EXPECT_TRUE(seen.ok) << seen.message;
        EXPECT_TRUE(gpu->untouched());
      }
      // For dy as stored: sums of d products of two numbers of size 1.
      delta.download();
      const auto a = values(dy.host()), b = values(y.host()), got = values(delta.host());
      for (int64_t t = 0; t < 333; ++t)
        for (int64_t h = 0; h < 8; ++h) {
          double sum = 0;
          for (int64_t c = 0; c < d; ++c) sum += a[size_t((t * 8 + h) * d + c)] * b[size_t((t * 8 + h) * d + c)];
          EXPECT_NEAR(got[size_t(h * 333 + t)], sum, double(d) * roundoff(DType::f32) * 8);
        }
      EXPECT_TRUE(delta.untouched());
    }
}

}  // namespace
}  // namespace ingot
