#include "ingot/kernels/sampling/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/sampling/adjust.h"
#include "ingot/kernels/sampling/logprobs.h"
#include "ingot/kernels/sampling/sampling_cases.test.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::values;

// The tokens drawn for `draws` rows that all hold the same logits.
std::vector<int32_t> draw(const std::vector<double>& logits, const SamplingOptions& options, int64_t draws,
                          uint64_t seed = 1, DType dtype = DType::f32) {
  const int64_t V = int64_t(logits.size());
  Buffer rows(dtype, {draws, V}), tokens(DType::i32, {draws});
  for (int64_t b = 0; b < draws; ++b) testing::assign(rows.tensor().row(b), logits);
  sample({.logits = rows, .tokens = tokens, .options = options, .seed = seed}, {});
  EXPECT_TRUE(tokens.guards_intact() && rows.guards_intact());
  const int32_t* t = tokens.tensor().ptr<int32_t>();
  return {t, t + draws};
}

// What a draw should follow, written as the definitions read: sort everything, cut, normalise.
std::vector<double> distribution(const std::vector<double>& logits, const SamplingOptions& o) {
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  std::vector<double> p(logits.size());
  for (size_t v = 0; v < p.size(); ++v) p[v] = std::exp((logits[v] - logits[order[0]]) / o.temperature);
  const auto normalise = [&] {
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= sum;
  };
  for (size_t i = 0; i < order.size(); ++i)
    if (o.top_k > 0 && int64_t(i) >= o.top_k) p[order[i]] = 0;
  normalise();
  double sum = 0;
  for (size_t v : order) {
    const double mine = p[v];
    if (sum >= o.top_p) p[v] = 0;
    sum += mine;
  }
  normalise();
  for (double& x : p) x = x < o.min_p * p[order[0]] ? 0 : x;
  normalise();
  return p;
}

const std::vector<double> kLogits = {1.3, -0.4, 2.1, 0.2, 2.1, -3.0, 0.9, 1.8, -1.1, 0.0, 2.6, 1.3};
const SamplingOptions kOptions[] = {
    {},
    {.temperature = 0.7},
    {.temperature = 2.5},
    {.top_k = 5},
    {.top_k = 3},  // cuts between two equal logits
    {.top_p = 0.8},
    {.top_p = 0.3},
    {.min_p = 0.2},
    {.temperature = 1.5, .top_k = 8, .top_p = 0.9, .min_p = 0.25},
    {.temperature = 1e9},
    {.top_k = 1000},  // more than there are
};

TEST(Sampling, DrawsFollowTheDistribution) {
  constexpr int64_t kDraws = 20000;
  for (const SamplingOptions& o : kOptions) {
    const auto p = distribution(kLogits, o);
    std::vector<double> counts(p.size(), 0);
    for (int32_t t : draw(kLogits, o, kDraws)) ++counts[size_t(t)];
    double chi2 = 0;
    int free = -1;
    for (size_t v = 0; v < p.size(); ++v) {
      if (p[v] == 0) {
        EXPECT_EQ(counts[v], 0) << "token " << v << " was cut";
        continue;
      }
      ++free;
      chi2 += (counts[v] - kDraws * p[v]) * (counts[v] - kDraws * p[v]) / (kDraws * p[v]);
    }
    // mean `free`, variance 2 `free`: with the seed fixed this is one number, not a chance
    EXPECT_LT(chi2, free + 4 * std::sqrt(2.0 * std::max(free, 1)) + 1)
        << "temperature " << o.temperature << " top_k " << o.top_k << " top_p " << o.top_p << " min_p " << o.min_p;
  }
}

TEST(Sampling, FiltersKeepExactlyTheDefinedTokensOfALargeVocabulary) {
  std::vector<double> logits(3000);
  const Rng rng(5, Purpose::test);
  for (size_t v = 0; v < logits.size(); ++v) logits[v] = std::round(4 * rng.normal(v)) / 4;  // many ties
  for (const SamplingOptions& o : {SamplingOptions{.top_k = 37},
                                   {.temperature = 3, .top_p = 0.5},
                                   {.top_p = 0.999},
                                   {.temperature = 2, .top_k = 700, .top_p = 0.7},
                                   {.min_p = 0.3}}) {
    const auto p = distribution(logits, o);
    std::map<int32_t, int> seen;
    for (int32_t t : draw(logits, o, 500)) {
      EXPECT_GT(p[size_t(t)], 0) << t;
      ++seen[t];
    }
    EXPECT_GT(seen.size(), 10u);
  }
}

TEST(Sampling, GreedyTakesTheFirstOfTheLargest) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    EXPECT_EQ(draw({0, 3, 1, 3}, {.temperature = 0}, 3, 1, dtype), std::vector<int32_t>(3, 1));
    EXPECT_EQ(draw({5}, {.temperature = 0}, 1, 1, dtype)[0], 0);
    EXPECT_EQ(draw({0, -1e4, 7, 3}, {.top_k = 1}, 4, 9, dtype), std::vector<int32_t>(4, 2));
    EXPECT_EQ(draw({0, 3, 2, 3}, {.top_k = 1}, 4, 9, dtype), std::vector<int32_t>(4, 1));
    EXPECT_EQ(draw({0, 3, 2, 1}, {.temperature = 1e-300}, 4, 9, dtype), std::vector<int32_t>(4, 1));
    EXPECT_EQ(draw({0, 9, 2, 1}, {.top_p = 1e-9}, 4, 9, dtype), std::vector<int32_t>(4, 1));
  }
}

TEST(Sampling, TokensOfMinusInfinityAreNeverDrawn) {
  for (double temperature : {0.5, 1.0, 1e30})
    for (int32_t t :
         draw({-HUGE_VAL, 1, -HUGE_VAL, 1, -HUGE_VAL}, {.temperature = temperature, .top_p = 0.999999}, 300))
      EXPECT_TRUE(t == 1 || t == 3) << t;
  // and those of plus infinity share everything
  for (int32_t t : draw({HUGE_VAL, 1, HUGE_VAL}, {}, 100)) EXPECT_TRUE(t == 0 || t == 2) << t;
}

TEST(Sampling, SeedsStepsAndRowsGiveDifferentDrawsAndRepeatExactly) {
  const std::vector<double> flat(64, 0.0);
  EXPECT_EQ(draw(flat, {}, 50, 3), draw(flat, {}, 50, 3));
  EXPECT_NE(draw(flat, {}, 50, 3), draw(flat, {}, 50, 4));
  Buffer logits(DType::f32, {50, 64}), a(DType::i32, {50}), b(DType::i32, {50});
  fill_zero(logits);
  sample({.logits = logits, .tokens = a, .seed = 3, .step = 0}, {});
  sample({.logits = logits, .tokens = b, .seed = 3, .step = 1}, {});
  EXPECT_NE(values(a), values(b));
  // row b of a batch draws what the documented counter says
  for (int64_t row = 0; row < 50; ++row)
    EXPECT_EQ(a.tensor().ptr<int32_t>()[row],
              int(std::ceil(64 * Rng(3, Purpose::sampling, 0).uniform(uint64_t(row)))) - 1);
}

TEST(Sampling, ThreadsStridesAndEmptyBatchesChangeNothing) {
  const int before = thread_count();
  Buffer logits(DType::f32, {40, 33}, 40), dense(DType::f32, {40, 33}), tokens(DType::i32, {40});
  testing::fill_normal(logits, 1, 2);
  testing::assign(dense, values(logits));
  std::vector<double> first;
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    for (const Tensor& l : {logits.tensor(), dense.tensor()}) {
      tokens.poison();
      sample({.logits = l, .tokens = tokens, .options = {.top_k = 9, .top_p = 0.9}, .seed = 8}, {});
      if (first.empty()) first = values(tokens);
      EXPECT_EQ(values(tokens), first);
    }
  }
  set_thread_count(before);
  Buffer none(DType::f32, {0, 5}), nothing(DType::i32, {0});
  sample({.logits = none, .tokens = nothing}, {});
}

struct BadRow {
  std::vector<double> logits;
  const char* expected;
};

TEST(Sampling, RowsWithoutADistributionAreNumericErrorsThatNameTheRow) {
  for (const BadRow& bad : {BadRow{{0, 1, NAN, 2}, "NaN logit in row 1 at token 2"},
                            {{NAN, 1, 1, 2}, "NaN logit in row 1 at token 0"},
                            {{-HUGE_VAL, -HUGE_VAL, -HUGE_VAL, -HUGE_VAL}, "only -inf logits in row 1"}})
    for (double temperature : {0.0, 1.0}) {
      Buffer logits(DType::f32, {2, 4}), tokens(DType::i32, {2});
      testing::assign(logits.tensor().row(0), {0, 1, 2, 3});
      testing::assign(logits.tensor().row(1), bad.logits);
      try {
        sample({.logits = logits, .tokens = tokens, .options = {.temperature = temperature}}, {});
        FAIL() << "no error, expected " << bad.expected;
      } catch (const Error& e) {
        EXPECT_EQ(e.code, ErrorCode::numeric);
        EXPECT_NE(std::string(e.what()).find(bad.expected), std::string::npos) << e.what();
      }
    }
}

TEST(Sampling, StepsAddUp) {
  sampling_cases::steps_add_up<testing::Buffer>([](const Sample& s) { sample(s, {}); });
}

struct BadOption {
  SamplingOptions options;
  const char* expected;
};

TEST(Sampling, OptionsOutsideTheirRangeAreNamed) {
  for (const BadOption& bad : {BadOption{{.temperature = -1}, "temperature -1"},
                               {{.temperature = HUGE_VAL}, "temperature inf"},
                               {{.temperature = NAN}, "temperature"},
                               {{.top_k = -3}, "top_k -3"},
                               {{.top_p = 0}, "top_p 0"},
                               {{.top_p = 1.5}, "top_p 1.5"},
                               {{.top_p = NAN}, "top_p"},
                               {{.min_p = 1}, "min_p 1"},
                               {{.min_p = -0.1}, "min_p -0.1"}}) {
    try {
      check(bad.options);
      FAIL() << "no error, expected " << bad.expected;
    } catch (const Error& e) { EXPECT_NE(std::string(e.what()).find(bad.expected), std::string::npos) << e.what(); }
  }
}

TEST(adjust_logits, adds_biases_in_order_and_forbids_what_is_not_allowed) {
  for (const DType type : {DType::f32, DType::f64}) {
    Buffer row(type, {40}), ids(DType::i32, {4}), biases(DType::f32, {4}), allowed(DType::u32, {2});
    testing::fill_normal(row, 3);
    const std::vector<double> before = values(row);
    testing::assign(ids, {5, 5, 33, 41});  // the last one is no id
    testing::assign(biases, {1e30, -1e30, 2, 7});
    testing::assign(allowed, {double(0xffff'ffffu), double(0xfeu)});  // all but 32
    adjust_logits({.logits = row, .adjusted = row, .bias_ids = ids, .biases = biases, .allowed = allowed}, {});
    EXPECT_TRUE(row.guards_intact());
    const std::vector<double> after = values(row);
    for (size_t v = 0; v < 40; ++v) {
      if (v == 32) continue;
      const double want = v == 5 ? 0 : v == 33 ? before[v] + 2 : before[v];
      EXPECT_NEAR(after[v], want, v == 33 ? 1e-6 : 0) << v;  // 1e30 swallows what it is added to
    }
    EXPECT_EQ(after[32], -HUGE_VAL);
  }
  Buffer row(DType::f32, {40}), words(DType::u32, {1}), half(DType::bf16, {40});
  EXPECT_NE(testing::error_of([&] {
              adjust_logits({.logits = row, .adjusted = row, .allowed = words}, {});
            }).find("found allowed of shape"),
            std::string::npos);
  EXPECT_NE(
      testing::error_of([&] { adjust_logits({.logits = half, .adjusted = half}, {}); }).find("expected f32 or f64"),
      std::string::npos);
  EXPECT_NE(testing::error_of([&] {
              adjust_logits({.logits = row, .adjusted = row, .biases = row}, {});
            }).find("as many i32 as f32, or neither"),
            std::string::npos);
}

TEST(logprobs, are_log_softmax_likeliest_first_and_of_equal_ones_the_lower_id) {
  for (const DType type : {DType::f32, DType::f64}) {
    Buffer row(type, {6}), token(DType::i32, {1}), top(DType::i32, {4}), found(DType::f64, {5});
    testing::assign(row, {1, 3, -HUGE_VAL, 3, 0.5, 2});
    testing::assign(token, {4});
    logprobs({.logits = row, .token = token, .top = top, .values = found}, {});
    const double sum = std::log(std::exp(1.) + 2 * std::exp(3.) + std::exp(0.5) + std::exp(2.));
    EXPECT_EQ(values(top), (std::vector<double>{1, 3, 5, 0}));
    testing::expect_close(found, {0.5 - sum, 3 - sum, 3 - sum, 2 - sum, 1 - sum}, 1e-14, 0);
  }
  Buffer row(DType::f32, {3}), token(DType::i32, {1}), top(DType::i32, {4}), found(DType::f64, {5});
  EXPECT_NE(testing::error_of([&] {
              logprobs({.logits = row, .token = token, .top = top, .values = found}, {});
            }).find("expected at most 3"),
            std::string::npos);
}

}  // namespace
}  // namespace ingot
