#define INGOT_SIMD simd_test
#include "ingot/core/cpu/simd.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace ingot {
namespace {

using Function = simd_test::Vec<float> (*)(simd_test::Vec<float>);
constexpr int L = simd_test::kLanes<float>;

struct Case {
  const char* name;
  Function vector;
  double (*exact)(double);
  float low, high;  // range of x
  double relative;  // stated in core/cpu/simd.h
  double at_least;  // results below this may be flushed to zero
};
const float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

const Case kCases[] = {
    {"exp", [](simd_test::Vec<float> x) { return simd_test::exp(x); }, [](double x) { return std::exp(x); }, -kInf,
     88.37f, 1.0e-7, 1.2e-38},
    {"expm1_negative", [](simd_test::Vec<float> x) { return simd_test::expm1_negative(x); },
     [](double x) { return std::expm1(x); }, -kInf, 0, 2.0e-7, 1e-37},
    {"log1p_unit", [](simd_test::Vec<float> x) { return simd_test::log1p_unit(x); },
     [](double x) { return std::log1p(x); }, 0, 1, 2.5e-7, 1e-37},
    {"logistic", [](simd_test::Vec<float> x) { return simd_test::logistic(x); },
     [](double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }, -kInf, kInf, 3.0e-7,
     1e-37},
    {"tanh", [](simd_test::Vec<float> x) { return simd_test::tanh(x); }, [](double x) { return std::tanh(x); }, -kInf,
     kInf, 3.0e-7, 1e-37},
    {"the normal tail", [](simd_test::Vec<float> x) { return simd_test::normal_tail(x).phi; },
     [](double x) { return 0.5 * std::erfc(std::abs(x) * M_SQRT1_2); }, -kInf, kInf, 5.0e-7, 1e-37},
    {"the normal density", [](simd_test::Vec<float> x) { return simd_test::normal_tail(x).density; },
     [](double x) { return std::exp(-0.5 * x * x); }, -kInf, kInf, 1.0e-7, 1e-37},
};

// Every `step`-th float of the range, in both signs.
template <class Use> void for_each_float(float low, float high, uint32_t step, Use&& use) {
  for (const uint32_t sign : {0u, 0x80000000u}) {
    float x[L];
    int filled = 0;
    for (uint32_t bits = 0; bits <= 0x7f800000u; bits += step) {
      const float v = std::bit_cast<float>(bits | sign);
      if (v < low || v > high) continue;
      x[filled++] = v;
      if (filled == L) {
        use(x);
        filled = 0;
      }
    }
  }
}

TEST(Simd, EveryFunctionKeepsItsStatedErrorOverItsWholeRange) {
  for (const Case& c : kCases) {
    double worst = 0, worst_at = 0;
    for_each_float(c.low, c.high, 1009, [&](const float* x) {
      const auto y = c.vector(simd_test::load(x));
      for (int i = 0; i < L; ++i) {
        const double want = c.exact(x[i]);
        const double off = std::abs(y[i] - want) / std::max(std::abs(want), c.at_least);
        const double allowed = std::abs(want) < c.at_least ? 1 : c.relative;
        if (!(off / allowed <= worst)) worst = off / allowed, worst_at = x[i];
      }
    });
    EXPECT_LE(worst, 1) << c.name << " at " << worst_at;
  }
}

TEST(Simd, EveryFunctionGivesNanForNan) {
  for (const Case& c : kCases) {
    const auto y = c.vector(simd_test::splat(kNan));
    for (int i = 0; i < L; ++i) EXPECT_TRUE(std::isnan(y[i])) << c.name;
  }
}

TEST(Simd, ExpHasItsLimits) {
  EXPECT_EQ(simd_test::exp(simd_test::splat(-kInf))[0], 0);
  EXPECT_EQ(simd_test::exp(simd_test::splat(-88.f))[0], 0);
  EXPECT_EQ(simd_test::exp(simd_test::splat(0.f))[0], 1);
  EXPECT_GT(simd_test::exp(simd_test::splat(kInf))[0], 2e38f);
}

TEST(Simd, TailsAreReadAndWrittenToTheElement) {
  float memory[2 * L];
  for (int n = 0; n < L; ++n) {
    for (int i = 0; i < 2 * L; ++i) memory[i] = float(i + 1);
    const auto v = simd_test::load_tail(memory, n);
    for (int i = 0; i < L; ++i) EXPECT_EQ(v[i], i < n ? float(i + 1) : 0);
    simd_test::store_tail(memory, v + 100.f, n);
    for (int i = 0; i < 2 * L; ++i) EXPECT_EQ(memory[i], float(i + 1) + (i < n ? 100 : 0));
  }
}

}  // namespace
}  // namespace ingot
