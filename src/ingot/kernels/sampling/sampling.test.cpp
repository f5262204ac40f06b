#include "ingot/kernels/sampling/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/sampling/filters.h"
#include "ingot/kernels/sampling/logprobs.h"
#include "ingot/kernels/sampling/noise.h"
#include "ingot/kernels/sampling/sampling_cases.test.h"
#include "ingot/kernels/sampling/sampling_config.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::values;

// The tokens of `count` rows that all have the same logits.
std::vector<int32_t> tokens_of(const std::vector<double>& logits, const SamplingOptions& options, int64_t count,
                               uint64_t seed = 1, DType dtype = DType::f32) {
  const int64_t V = int64_t(logits.size());
  Buffer rows(dtype, {count, V}), tokens(DType::i32, {count});
  for (int64_t b = 0; b < count; ++b) testing::assign(rows.tensor().row(b), logits);
  sample({.logits = rows, .tokens = tokens, .options = options, .seed = seed}, {});
  EXPECT_TRUE(tokens.guards_intact() && rows.guards_intact());
  const int32_t* t = tokens.tensor().ptr<int32_t>();
  return {t, t + count};
}

// The probabilities of the tokens, computed from the definitions: sort all ids, filter, normalise.
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

TEST(Sampling, TokensFollowTheDistribution) {
  constexpr int64_t kTokens = 20000;
  for (const SamplingOptions& o : kOptions) {
    const auto p = distribution(kLogits, o);
    std::vector<double> counts(p.size(), 0);
    for (int32_t t : tokens_of(kLogits, o, kTokens)) ++counts[size_t(t)];
    double chi2 = 0;
    int free = -1;
    for (size_t v = 0; v < p.size(); ++v) {
      if (p[v] == 0) {
        EXPECT_EQ(counts[v], 0) << "token " << v << " was cut";
        continue;
      }
      ++free;
      chi2 += (counts[v] - kTokens * p[v]) * (counts[v] - kTokens * p[v]) / (kTokens * p[v]);
    }
    // chi2 has mean `free` and variance 2 `free`; the seed is fixed, so the test is deterministic
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
    for (int32_t t : tokens_of(logits, o, 500)) {
      EXPECT_GT(p[size_t(t)], 0) << t;
      ++seen[t];
    }
    EXPECT_GT(seen.size(), 10u);
  }
}

// At a temperature of log2(e) a logit is an octave, exactly.
TEST(Sampling, MinPKeepsAnIdThatIsExactlyAsLikelyAsItsBound) {
  std::map<int32_t, int> seen;
  for (const int32_t t : tokens_of({2, 1, 0.999, 0}, {.temperature = 1.4426950408889634, .min_p = 0.5}, 300)) ++seen[t];
  EXPECT_GT(seen[0], 150);
  EXPECT_GT(seen[1], 50);
  EXPECT_EQ(seen[0] + seen[1], 300);
}

TEST(Sampling, GreedyTakesTheFirstOfTheLargest) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    EXPECT_EQ(tokens_of({0, 3, 1, 3}, {.temperature = 0}, 3, 1, dtype), std::vector<int32_t>(3, 1));
    EXPECT_EQ(tokens_of({5}, {.temperature = 0}, 1, 1, dtype)[0], 0);
    EXPECT_EQ(tokens_of({0, -1e4, 7, 3}, {.top_k = 1}, 4, 9, dtype), std::vector<int32_t>(4, 2));
    EXPECT_EQ(tokens_of({0, 3, 2, 3}, {.top_k = 1}, 4, 9, dtype), std::vector<int32_t>(4, 1));
    EXPECT_EQ(tokens_of({0, 3, 2, 1}, {.temperature = 1e-300}, 4, 9, dtype), std::vector<int32_t>(4, 1));
    EXPECT_EQ(tokens_of({0, 9, 2, 1}, {.top_p = 1e-9}, 4, 9, dtype), std::vector<int32_t>(4, 1));
  }
}

TEST(Sampling, LogitsOfMinusInfinityAreNeverSampled) {
  for (double temperature : {0.5, 1.0, 1e30})
    for (int32_t t :
         tokens_of({-HUGE_VAL, 1, -HUGE_VAL, 1, -HUGE_VAL}, {.temperature = temperature, .top_p = 0.999999}, 300))
      EXPECT_TRUE(t == 1 || t == 3) << t;
  // Among the ids with a logit of plus infinity the sums are equal.
  EXPECT_EQ(tokens_of({1, HUGE_VAL, HUGE_VAL}, {}, 9), std::vector<int32_t>(9, 1));
  EXPECT_EQ(tokens_of({1, HUGE_VAL, HUGE_VAL}, {.top_p = 0.5}, 9), std::vector<int32_t>(9, 1));
}

// The noise in fp64, from the random bits that noise.h describes.
double exact_noise(uint64_t seed, uint32_t step, uint32_t lane, uint32_t id) {
  const Rng rng(seed, Purpose::sampling, step);
  const uint64_t block = uint64_t(lane) << 30 | id / 4;
  const double complement = 0x1p32 - double(rng.block(block)[id % 4] | 1u);  // exact, odd
  double v = complement * 0x1p-32;
  if (complement < 65536)
    v = (complement - 1) * 0x1p-32 + (double(rng.block(block | uint64_t(1) << 63)[id % 4] >> 1) + 0.5) * 0x1p-62;
  return -std::log(-std::log1p(-v));
}

TEST(SamplingNoise, IsGumbelNoiseToThreeMillionths) {
  double worst = 0, tail = 0;
  const auto error = [](uint32_t word) {
    const double v = double(sampling::complement(word)) * 0x1p-32;
    return std::abs(sampling::noise_of(word) + std::log(-std::log1p(-v)));
  };
  // a sample of all words; the largest error over all words is 5.5e-7
  for (uint64_t i = 0; i < uint64_t(1) << 32; i += 2 * 4093)
    if (sampling::complement(uint32_t(i)) >= sampling::kTail) worst = std::max(worst, error(uint32_t(i)));
  for (uint32_t i = 0; i < 65536; ++i) worst = std::max({worst, error(i), error(~(sampling::kTail + i))});
  for (int bit = 0; bit < 32; ++bit)  // where exponents change
    for (uint32_t i = 0; i < 2000; ++i)
      for (const uint32_t word : {(1u << bit) + i - 1000, ~((1u << bit) + i - 1000)})
        if (sampling::complement(word) >= sampling::kTail) worst = std::max(worst, error(word));
  for (uint32_t i = 0; i < 2000; ++i) worst = std::max(worst, error(sampling::kRootHalf - 1000 + i));
  EXPECT_LT(worst, 6e-7);
  for (uint32_t c = 1; c < sampling::kTail; c += 2)
    for (const uint32_t more : {0u, ~0u, 0x9e3779b9u * c}) {
      const double v = (c - 1) * 0x1p-32 + (double(more >> 1) + 0.5) * 0x1p-62;
      tail = std::max(tail, std::abs(sampling::noise_of_tail(0u - c, more) + std::log(-std::log1p(-v))));
    }
  EXPECT_LT(tail, 2e-6);
  // The ends of both ranges: no noise is infinite, and the tail is continuous with the rest.
  EXPECT_NEAR(sampling::noise_of(0), -std::log(32 * std::log(2.)), 1e-6);
  EXPECT_NEAR(sampling::noise_of_tail(~0u, 0), 63 * std::log(2.), 1e-5);
  EXPECT_NEAR(sampling::noise_of_tail(0u - (sampling::kTail - 1), ~0u), sampling::noise_of(0u - sampling::kTail - 1),
              1e-4);
}

// RowNoise computes the noise of one id at a time, by less code than Noise::of(). Some of these ids need additional
// random bits.
TEST(SamplingNoise, ARowAtATemperatureHasTheSameNoise) {
  int large = 0;
  for (const uint64_t seed : {uint64_t(0), uint64_t(7), ~uint64_t(5)}) {
    const uint32_t step = uint32_t(seed) / 3;
    const sampling::Noise noise(seed, step, 0);
    const sampling::RowNoise row{.seed = seed, .step = step, .temperature = 0.3f};
    for (uint32_t id = 0; id < 400000; ++id) {
      const float expected = noise.of(id);
      ASSERT_EQ(row.of(id), expected) << id;
      large += expected > 11.5f ? 1 : 0;
    }
  }
  EXPECT_GT(large, 5);
  EXPECT_EQ((sampling::RowNoise{.seed = 3, .step = 1, .temperature = 0}.of(9)), 0);
}

TEST(SamplingNoise, TheBoundIsNeverBelowTheNoise) {
  for (uint64_t i = 0; i < uint64_t(1) << 32; i += 1021)
    if (const uint32_t word = uint32_t(i); sampling::complement(word) >= sampling::kTail)
      ASSERT_GE(sampling::noise_bound(word), sampling::noise_of(word)) << word;
  for (int bit = 16; bit < 32; ++bit)
    for (uint32_t i = 0; i < 200; ++i)
      if (const uint32_t word = 0u - ((1u << bit) + i - 100); sampling::complement(word) >= sampling::kTail)
        ASSERT_GE(sampling::noise_bound(word), sampling::noise_of(word)) << word;
}

TEST(Sampling, TokensAreTheArgmaxOfLogitsAndNoise) {
  std::vector<double> logits(1003);
  const Rng rng(8, Purpose::test);
  for (size_t v = 0; v < logits.size(); ++v) logits[v] = 3 * rng.normal(v);
  for (const double T : {0.3, 1., 2.5, 1e5}) {
    const std::vector<int32_t> found = tokens_of(logits, {.temperature = T}, 60, 3);
    for (uint32_t row = 0; row < 60; ++row) {
      const auto sum = [&](int32_t v) { return float(logits[size_t(v)]) / T + exact_noise(3, 0, row, uint32_t(v)); };
      double largest = -HUGE_VAL;
      for (int32_t v = 0; v < int32_t(logits.size()); ++v) largest = std::max(largest, sum(v));
      EXPECT_GE(sum(found[row]), largest - 1e-5) << T << ", row " << row;
    }
  }
}

TEST(Sampling, IdsOfProbability1eMinus5AreSampledAsOftenAsTheyShould) {
  // Each of 400 rows has 6,000 unlikely ids beside an id that is 1e5 times as likely. The expected number of unlikely
  // tokens is 400 * 6,000 / 106,000, or 22.6, which is well within the bounds around 24.
  std::vector<double> logits(6001, 0);
  logits[3000] = std::log(1e5);
  int found = 0;
  for (const int32_t t : tokens_of(logits, {}, 400)) found += t != 3000;
  EXPECT_NEAR(found, 24, 4 * std::sqrt(24));
}

TEST(Sampling, SeedsStepsAndRowsGiveDifferentTokensAndRepeatExactly) {
  const std::vector<double> flat(64, 0.0);
  EXPECT_EQ(tokens_of(flat, {}, 50, 3), tokens_of(flat, {}, 50, 3));
  EXPECT_NE(tokens_of(flat, {}, 50, 3), tokens_of(flat, {}, 50, 4));
  Buffer logits(DType::f32, {50, 64}), a(DType::i32, {50}), b(DType::i32, {50});
  fill_zero(logits);
  sample({.logits = logits, .tokens = a, .seed = 3, .step = 0}, {});
  sample({.logits = logits, .tokens = b, .seed = 3, .step = 1}, {});
  EXPECT_NE(values(a), values(b));
  std::map<double, int> seen;  // rows of equal logits differ
  for (const double t : values(a)) ++seen[t];
  EXPECT_GT(seen.size(), 25u);
}

// The kept ids by the definition in sampling.h: all ids sorted, weights added in order.
std::vector<bool> kept_by_definition(const std::vector<double>& logits, const SamplingOptions& o) {
  const SampleRow row = row_of(o, int64_t(logits.size()));
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  if (row.top_k > 0) order.resize(size_t(row.top_k));
  const auto octaves = [&](size_t v) {
    return sampling::octaves_below(float(logits[order[0]]), float(logits[v]), row.octaves_per_logit);
  };
  if (row.top_p > 0) {
    std::vector<sampling::Wide> sums = {0};
    for (const size_t v : order) {
      const int octave = int(std::min(octaves(v), 100.f));
      sums.push_back(sums.back() +
                     (octave < 48 ? sampling::Wide(sampling::mantissa_of(octaves(v))) << (48 - octave) : 0));
    }
    size_t n = 1;
    while (sums[n] * 0x100000000u < sums.back() * row.top_p) ++n;
    order.resize(n);
  }
  std::vector<bool> kept(logits.size(), false);
  for (const size_t v : order) kept[v] = octaves(v) <= row.most_octaves;
  return kept;
}

TEST(Sampling, FiltersKeepExactlyTheIdsOfTheirDefinition) {
  for (const bool ties : {false, true}) {
    // Logits so close to each other that each kept id is sampled at least about 20 times.
    std::vector<double> logits(150);
    const Rng rng(6, Purpose::test);
    for (size_t v = 0; v < logits.size(); ++v)
      logits[v] = float(0.1 * (ties ? std::round(2 * rng.normal(v)) : 2 * rng.normal(v)));
    for (const SamplingOptions& o : {SamplingOptions{.top_k = 1},
                                     {.top_k = 37},
                                     {.top_k = 149},
                                     {.top_p = 0.01},
                                     {.top_p = 0.5},
                                     {.top_p = 0.9999},
                                     {.temperature = 0.5, .top_k = 60, .top_p = 0.97, .min_p = 0.4},
                                     {.temperature = 50, .top_p = 0.7},
                                     {.min_p = 0.7},
                                     {.min_p = 1}}) {
      SCOPED_TRACE(::testing::Message() << "ties " << ties << " top_k " << o.top_k << " top_p " << o.top_p);
      const std::vector<bool> kept = kept_by_definition(logits, o);
      std::vector<bool> seen(logits.size(), false);
      for (const int32_t t : tokens_of(logits, o, 8000)) seen[size_t(t)] = true;
      EXPECT_EQ(seen, kept);
    }
    // Logits far from each other: no other id is ever sampled.
    for (double& x : logits) x *= 30;
    for (const double top_p : {0.3, 0.9, 0.99, 0.99999}) {
      const std::vector<bool> kept = kept_by_definition(logits, {.top_p = top_p});
      for (const int32_t t : tokens_of(logits, {.top_p = top_p}, 3000)) EXPECT_TRUE(kept[size_t(t)]) << t;
    }
  }
}

TEST(Sampling, RowsDoNotDependOnTheOtherRows) {
  sampling_cases::rows_with_their_own_options_are_the_cpus<testing::Buffer>(
      [](int64_t) { return int64_t(0); },
      [](const Sample& all) {  // one row at a time
        for (int64_t i = 0; i < all.rows.size(0); ++i) {
          Sample one = all;
          one.rows = all.rows.slice(0, i, i + 1);
          sample(one, {});
        }
      });
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
  sampling_cases::steps_add_up<testing::Buffer>([](int64_t) { return int64_t(0); },
                                                [](const Sample& s) { sample(s, {}); });
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
                               {{.min_p = 1.5}, "min_p 1.5"},
                               {{.min_p = -0.1}, "min_p -0.1"}}) {
    try {
      check(bad.options);
      FAIL() << "no error, expected " << bad.expected;
    } catch (const Error& e) { EXPECT_NE(std::string(e.what()).find(bad.expected), std::string::npos) << e.what(); }
  }
}

TEST(Sampling, ATemperatureBeyondTheRangeOfFloatsIsTheLargestOne) {
  const std::vector<double> logits{3, 0, -2, 8, 1, -HUGE_VAL, 5};
  for (const int64_t top_k : {0, 3})
    for (const double temperature : {1e31, 1e60, 1e300})
      EXPECT_EQ(tokens_of(logits, {.temperature = temperature, .top_k = top_k}, 200),
                tokens_of(logits, {.temperature = 1e30, .top_k = top_k}, 200))
          << temperature;
}

TEST(Sampling, BiasesAreAddedInOrderAndMasksForbid) {
  for (const DType type : {DType::f32, DType::f64, DType::bf16}) {
    Buffer row(type, {1, 40}), ids(DType::i32, {1, 4}), biases(DType::f32, {1, 4}), allowed(DType::u32, {1, 2}),
        token(DType::i32, {1});
    std::vector<double> logits(40, 0);
    logits[5] = 9, logits[7] = 1, logits[32] = 8, logits[33] = 2;
    testing::assign(row, logits);
    testing::assign(ids, {5, 5, 33, 41});  // the last one is no id
    testing::assign(biases, {1e30, -1e30, -1.5, 70});
    testing::assign(allowed, {double(0xffff'ffffu), double(0xfeu)});  // all ids but 32
    Sample s{.logits = row, .tokens = token, .options = {.temperature = 0}};
    const auto found = [&] {
      sample(s, {});
      return values(token)[0];
    };
    EXPECT_EQ(found(), 5);
    s.bias_ids = ids, s.biases = biases;  // the addition of 9 is lost to rounding, and 2 becomes 0.5
    EXPECT_EQ(found(), 32);
    s.allowed = allowed;
    EXPECT_EQ(found(), 7);
    EXPECT_EQ(values(row), logits);
    s.options = {.temperature = 3};  // ids that a mask forbids are not sampled with noise either
    for (s.seed = 1; s.seed < 500; ++s.seed) EXPECT_NE(found(), 32);
  }
  Buffer row(DType::f32, {1, 40}), token(DType::i32, {1}), words(DType::u32, {1, 1});
  EXPECT_NE(testing::error_of([&] {
              sample({.logits = row, .tokens = token, .allowed = words}, {});
            }).find("found allowed of shape"),
            std::string::npos);
  EXPECT_NE(testing::error_of([&] {
              sample({.logits = row, .tokens = token, .biases = row}, {});
            }).find("as many i32 as f32"),
            std::string::npos);
}

TEST(logprobs, are_log_softmax_in_falling_order_and_equal_logits_by_rising_id) {
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
            }).find("rows of at most 3"),
            std::string::npos);
}

TEST(Sampling, RowsWithFiltersTakeTheClustersThatEndFirst) {
  cuda::ResidentClusters resident{0, 132, 66, 39, 30, 22, 17, 15, 15};  // of an H200
  resident[16] = 7;
  for (const auto& [rows, cluster] :
       std::map<int64_t, int>{{1, 16}, {7, 16}, {8, 8}, {15, 8}, {16, 6}, {32, 3}, {64, 2}})
    EXPECT_EQ(cuda::pick_filter_cluster(rows, 50, 13, resident), cluster) << rows << " rows of 201,088 ids";
  EXPECT_EQ(cuda::pick_filter_cluster(132, 4, 13, resident), 1) << "short rows, all of which run at once";
  EXPECT_EQ(cuda::pick_filter_cluster(16, 50, 13, {0, 132}), 1) << "no clusters";
}

}  // namespace
}  // namespace ingot
