#include "ingot/kernels/activation/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/activation/gelu.cuh"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

template <class Use> void for_each_act(Use&& use) {
  int i = 0;
  for_each_activation([&](auto f) { use(f, Act(i++)); });
}

// Points where an activation may behave specially, and a sweep of the range where it bends.
std::vector<double> interesting_inputs() {
  std::vector<double> x = {0,  -0.0, 1e-40, -1e-40, 1e-30, -1e-30, 1e-8, -1e-8,
                           90, -90,  104,   -104,   1e4,   -1e4,   1e18, -1e18};
  for (double v = -20; v <= 20; v += 0.0371) x.push_back(v);
  return x;
}

// A vector form evaluates f at an x with some rounding errors, and rounds the result a few times.
template <class F> double value_allowance(double x, double roundings) {
  return roundings * testing::roundoff(DType::f32) * (std::abs(F::value(x)) + std::abs(x * F::slope(x))) + 1e-37;
}
template <class F> double slope_allowance(double x, double roundings) {
  const double h = 1e-4 * std::max(1.0, std::abs(x));
  const double bend = (F::slope(x + h) - F::slope(x - h)) / (2 * h);
  return roundings * testing::roundoff(DType::f32) * (std::abs(F::slope(x)) + std::abs(x * bend)) + 1e-37;
}

TEST(Activation, SlopesAreTheDerivativesOfValues) {
  for_each_act([](auto f, Act) {
    for (double x = -12; x < 12; x += 0.0137) {
      const double h = 1e-5, numeric = (f.value(x + h) - f.value(x - h)) / (2 * h);
      if (std::abs(x) < 2 * h) continue;  // a kink may lie between the two points
      EXPECT_NEAR(f.slope(x), numeric, 1e-8 * std::max(1.0, std::abs(numeric))) << f.name << " at " << x;
    }
  });
}

TEST(Activation, SharedFormulasAreTheActivationsWithTheirNumbers) {
  int sharing = 0;
  for_each_act([&](auto f, Act act) {
    using F = decltype(f);
    EXPECT_EQ(number_of(act), number_of(f)) << f.name;
    if constexpr (shares_formula<F>) {
      ++sharing;
      using Formula = decltype(formula_of(f));
      EXPECT_EQ(has_slope_from_value<Formula>, has_slope_from_value<F>) << f.name;
      const auto compare = [&](double x, float got, float want, const char* what) {
        // The number is rounded to fp32 once, and multiplies; its exponentials are off by this rounding times their
        // argument.
        const double allowed = (8 + std::abs(x)) * testing::roundoff(DType::f32) * std::abs(want) + 1e-36;
        if (std::isfinite(want) && std::isfinite(x))
          EXPECT_NEAR(got, want, allowed) << f.name << " " << what << " at " << x;
        else
          EXPECT_TRUE(std::isnan(want) ? std::isnan(got) : got == want) << f.name << " " << what << " at " << x;
      };
      std::vector<double> inputs = interesting_inputs();
      for (double special : {kInf, -kInf, kNan}) inputs.push_back(special);
      for (double v : inputs) {
        const float x = float(v);
        compare(v, act_value<Formula, float>(x, F::number), F::value(x), "value");
        compare(v, act_value<Formula, bf16>(x, F::number), act_value<F, bf16>(x), "narrow value");
        compare(v, act_slope<Formula, float>(x, F::number), F::slope(x), "slope");
        compare(v, act_slope<Formula, bf16>(x, F::number), act_slope<F, bf16>(x), "narrow slope");
      }
    }
  });
  EXPECT_EQ(sharing, 6);
}

TEST(Activation, SlopesFromValuesAreTheDerivatives) {
  int have = 0;
  for_each_act([&](auto f, Act act) {
    using F = decltype(f);
    EXPECT_EQ(slope_follows_from_value(act), has_slope_from_value<F>) << f.name;
    if constexpr (has_slope_from_value<F>) {
      ++have;
      for (double x = -30; x < 12; x += 0.0137) {
        const double h = 1e-5 * std::max(1.0, std::abs(x)), numeric = (f.value(x + h) - f.value(x - h)) / (2 * h);
        if (std::abs(x) < 2 * h) continue;
        const double slope = F::slope_from_value(F::value(x));
        EXPECT_NEAR(slope, numeric, 1e-8 * std::max(1.0, std::abs(numeric))) << f.name << " at " << x;
        // Softplus keeps the left tail, where the value itself vanishes.
        if (f.name == "softplus") EXPECT_NEAR(slope / F::slope(x), 1, 1e-12) << x;
      }
    }
  });
  EXPECT_EQ(have, 6);
  EXPECT_FALSE(has_slope_from_value<Silu>);
}

// The formulas of kernels with 16-bit outputs: the error must vanish in the rounding of the result (2^-12 for f16).
TEST(Activation, ApproximateFormsKeepTwelveBitsInBothTails) {
  for_each_act([](auto f, Act) {
    using F = decltype(f);
    const auto value = [](float x) { return F::value(Approximate(x)).v; };
    const auto slope = [](float x) { return F::slope(Approximate(x)).v; };
    for (double at = -24; at < 24; at += 0.00713) {
      const float x = float(at);
      const double d = x;
      // A left tail that ends below the smallest f16 (6e-8) only has to be as small.
      EXPECT_NEAR(value(x), F::value(d), 1e-4 * std::abs(F::value(d)) + 1e-9) << f.name << " of " << x;
      EXPECT_NEAR(slope(x), F::slope(d), 1e-4 * std::abs(F::slope(d)) + 1e-6) << f.name << "' of " << x;
      if (f.name == "softplus") {
        EXPECT_NEAR(value(x) / F::value(d), 1, 7e-5) << x;
        EXPECT_NEAR(slope(x) / F::slope(d), 1, 1e-5) << x;
      }
      if constexpr (has_slope_from_value<F>) {
        const float y = float(F::value(d));
        const double want = F::slope_from_value(double(y));
        EXPECT_NEAR(F::slope_from_value(Approximate(y)).v, want, 1e-5 * std::abs(want)) << f.name << " at " << x;
      }
    }
    for (double x : {kInf, -kInf}) EXPECT_EQ(double(value(float(x))), F::value(x)) << f.name;
    for (double x : {kInf, -kInf}) EXPECT_FALSE(std::isnan(slope(float(x)))) << f.name;
    EXPECT_TRUE(std::isnan(value(float(kNan)))) << f.name;
  });
}

TEST(Activation, TheOneExponentialGeluKeepsItsLeftTail) {
  for (double at = -13; at < 13; at += 0.00093) {
    const float x = float(at);
    const double d = x, value = Gelu::value(d), slope = Gelu::slope(d), u = testing::roundoff(DType::f32);
    // The exponent is off by some roundings; the slope changes sign, and its terms cancel there.
    const double relative = 1.5e-6 + 2 * u * d * d;
    EXPECT_NEAR(detail::gelu_value(x), value, relative * std::abs(value) + 1e-37) << x;
    EXPECT_NEAR(detail::gelu_slope(x), slope, relative * std::abs(slope) + (std::abs(d) < 4 ? 4e-7 : 1e-37)) << x;
  }
  for (double x : {kInf, -kInf}) {
    EXPECT_EQ(detail::gelu_value(float(x)), Gelu::value(x));
    EXPECT_EQ(detail::gelu_slope(float(x)), Gelu::slope(x));
  }
  EXPECT_TRUE(std::isnan(detail::gelu_value(float(kNan))) && std::isnan(detail::gelu_slope(float(kNan))));
}

TEST(Activation, TheOneExponentialSoftplusOfF32IsAsGoodAsF32) {
  for (double at = -80; at < 30; at += 0.00713) {
    const float x = float(at);
    const double want = Softplus::value(double(x));
    EXPECT_NEAR(softplus_value(x), want, 3e-7 * want) << x;
  }
}

TEST(Activation, TailsAreMonotoneAndNeverUndershootTheirLimits) {
  for_each_act([](auto f, Act) {
    const bool falls_on_the_left = f.value(-3.0) < f.value(-700.0);
    for (double x = 3; x < 700; x *= 1.01) {
      EXPECT_LE(f.value(x), f.value(x * 1.01)) << f.name << " at " << x;
      if (falls_on_the_left)
        EXPECT_LE(f.value(-x), f.value(-x * 1.01)) << f.name << " at " << -x;
      else
        EXPECT_GE(f.value(-x), f.value(-x * 1.01)) << f.name << " at " << -x;
    }
  });
}

TEST(Activation, InfinityGivesTheLimitAndNanStaysNan) {
  for_each_act([](auto f, Act act) {
    for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      Buffer x(dtype, {1, 3}), y(dtype, {1, 3});
      testing::assign(x, {kInf, -kInf, kNan});
      activate({.act = act, .x = x, .y = y}, {});
      const auto v = testing::values(y);
      const bool squashed = f.name == "tanh" || f.name == "sigmoid";
      EXPECT_EQ(v[0], squashed ? 1 : kInf) << f.name;
      const double left = f.name == "identity" || f.name == "leaky_relu" ? -kInf
                          : f.name == "leaky_relu_squared"               ? kInf
                          : f.name == "tanh"                             ? -1
                                                                         : 0;
      EXPECT_EQ(v[1], left) << f.name;
      EXPECT_TRUE(std::isnan(v[2])) << f.name << " " << dtype;
      Buffer dy(dtype, {1, 3}), dx(dtype, {1, 3});
      testing::assign(dy, {1, 1, 1});
      activate_backward({.act = act, .dy = dy, .x = x, .dx = dx}, {});
      const auto d = testing::values(dx);
      EXPECT_FALSE(std::isnan(d[0])) << f.name;
      EXPECT_FALSE(std::isnan(d[1])) << f.name;
    }
  });
}

TEST(Activation, EveryTypeAgreesWithFp64AtEveryKindOfInput) {
  const std::vector<double> inputs = interesting_inputs();
  for_each_act([&](auto f, Act act) {
    for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      const int64_t n = int64_t(inputs.size());
      Buffer x(dtype, {n}), dy(dtype, {n}), y(dtype, {n}), dx(dtype, {n});
      testing::assign(x, inputs);
      testing::fill_normal(dy, 3);
      activate({.act = act, .x = x, .y = y}, {});
      activate_backward({.act = act, .dy = dy, .x = x, .dx = dx}, {});
      const auto rounded = testing::values(x), g = testing::values(dy), value = testing::values(y),
                 slope = testing::values(dx);
      const double wide = dtype == DType::f64 ? 1e-8 : 1, unit = testing::roundoff(dtype);
      for (size_t i = 0; i < inputs.size(); ++i) {
        const double v = rounded[i], want = f.value(v), want_slope = g[i] * f.slope(v);
        const double top = dtype == DType::f16 ? 65504 : dtype == DType::f64 ? 1e300 : 3e38;
        if (!std::isfinite(v) || std::abs(want) > top || std::abs(want_slope) > top) continue;
        // the last term: subnormal f16 results are rounded to a grid of 2^-24
        const double grid = dtype == DType::f16 ? 0x1p-25 : 0;
        EXPECT_NEAR(value[i], want, 6 * wide * value_allowance<decltype(f)>(v, 1) + unit * std::abs(want) + grid)
            << f.name << " of " << v << " in " << dtype;
        EXPECT_NEAR(slope[i], want_slope,
                    10 * wide * (std::abs(g[i]) * slope_allowance<decltype(f)>(v, 1) + 1e-37) +
                        unit * std::abs(want_slope) + grid)
            << f.name << "' of " << v << " in " << dtype;
      }
    }
  });
}

TEST(Activation, AnyShapeStrideAndAliasGivesTheSameNumbers) {
  struct Case {
    int64_t rows, cols, gap;
  };
  for (const Case& c :
       {Case{0, 5, 0}, {1, 1, 0}, {1, 7, 0}, {3, 8, 0}, {5, 17, 3}, {2, 33, 1}, {70, 300, 4}, {1, 40000, 0}}) {
    for (DType dtype : {DType::f64, DType::f32, DType::bf16}) {
      const Act act = act_of<Gelu>;
      Buffer x(dtype, {c.rows, c.cols}, c.cols + c.gap), y(dtype, {c.rows, c.cols}, c.cols + 2 * c.gap);
      Buffer dy(dtype, {c.rows, c.cols}), dx(dtype, {c.rows, c.cols}, c.cols + c.gap);
      testing::fill_normal(x, 1, 2);
      testing::fill_normal(dy, 2);
      activate({.act = act, .x = x, .y = y}, {});
      activate_backward({.act = act, .dy = dy, .x = x, .dx = dx}, {});
      // Single elements are the reference here: rounding may differ only where a tail is computed differently.
      const auto in = testing::values(x), out = testing::values(y);
      for (size_t i = 0; i < in.size(); ++i)
        ASSERT_NEAR(out[i], Gelu::value(in[i]),
                    4 * (testing::roundoff(dtype) + 1e-8 * (dtype == DType::f32)) * std::abs(in[i]) + 1e-15);
      EXPECT_TRUE(y.guards_intact() && dx.guards_intact());
      // A value formed beside the slope is the value. The slope may be contracted otherwise: its terms, at most 1.5 in
      // all, round in another place.
      Buffer beside(dtype, {c.rows, c.cols}, c.cols + c.gap), slope(dtype, {c.rows, c.cols});
      activate_backward({.act = act, .dy = dy, .x = x, .dx = slope, .y = beside}, {});
      EXPECT_EQ(testing::values(beside), out);
      const auto plain = testing::values(dx), factor = testing::values(dy), got = testing::values(slope);
      for (size_t i = 0; i < in.size(); ++i)
        ASSERT_NEAR(got[i], plain[i], 4 * testing::roundoff(dtype) * std::abs(factor[i]));
      EXPECT_TRUE(beside.guards_intact() && slope.guards_intact());
      activate_backward({.act = act, .dy = dy, .x = x, .dx = dy}, {});
      EXPECT_EQ(testing::values(dy), testing::values(dx));
      activate({.act = act, .x = x, .y = x}, {});
      EXPECT_EQ(testing::values(x), out);
    }
  }
}

TEST(Activation, ThreadsDoNotChangeABit) {
  const int before = thread_count();
  Buffer x(DType::f32, {70, 1001}), y(DType::f32, {70, 1001});
  testing::fill_normal(x, 5);
  std::vector<double> first;
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    y.poison();
    activate({.act = act_of<Silu>, .x = x, .y = y}, {});
    if (threads == 1) first = testing::values(y);
    EXPECT_EQ(testing::values(y), first);
  }
  set_thread_count(before);
}

TEST(Activation, NamesAndNumbersAgree) {
  for_each_act([](auto f, Act act) {
    EXPECT_EQ(activation_named(f.name), act);
    EXPECT_EQ(name_of(act), f.name);
    EXPECT_EQ(act_of<decltype(f)>, act);
  });
  EXPECT_EQ(vector_form_of(act_of<Silu>), VectorAct::silu);
}

TEST(Activation, TraitsForKernelsAgreeWithTheFormulas) {
  int formulas = 0;
  for_each_act([&](auto f, Act) {
    using F = decltype(f);
    constexpr KernelFit fit = kernel_fit<F>;
    for (const int groups : {fit.warpgroups, fit.warpgroups_storing, fit.warpgroups_streaming})
      EXPECT_TRUE(groups >= 1 && groups <= 4) << f.name;
    EXPECT_LE(fit.warpgroups_storing, fit.warpgroups) << f.name;
    if constexpr (has_slope_formula<F>) {
      ++formulas;
      const SlopeFormula& s = f.slope_formula;
      for (double x = -9; x < 9; x += 0.037) {
        const double h = f.value(x), polynomial = s.number[0] + h * (s.number[1] + h * s.number[2]);
        const double slope = s.kind == SlopeKind::exponential ? -std::expm1(-h)
                             : s.kind == SlopeKind::step      ? double(h > 0 ? s.number[0] : s.number[1])
                                                              : polynomial;
        EXPECT_NEAR(slope, f.slope(x), 1e-9) << f.name << " at " << x;  // 0.01f is off by 2e-10
      }
    }
  });
  EXPECT_EQ(formulas, 6);
}

template <class Call> std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) { return e.what(); }
  return "no error";
}

TEST(Activation, ErrorsNameTheValueFoundAndTheValueExpected) {
  const std::string unknown = message_of([] { activation_named("rleu"); });
  EXPECT_NE(unknown.find("'rleu'"), std::string::npos) << unknown;
  EXPECT_NE(unknown.find("leaky_relu_squared"), std::string::npos) << unknown;
  Buffer x(DType::f32, {2, 3}), y(DType::f32, {3, 2}), wide(DType::f64, {2, 3});
  const std::string shape = message_of([&] { activate({.x = x, .y = y}, {}); });
  EXPECT_NE(shape.find("(3, 2)"), std::string::npos) << shape;
  EXPECT_NE(shape.find("(2, 3)"), std::string::npos) << shape;
  const std::string dtype = message_of([&] { activate({.x = x, .y = wide}, {}); });
  EXPECT_NE(dtype.find("f64"), std::string::npos) << dtype;
  EXPECT_NE(dtype.find("f32"), std::string::npos) << dtype;
  EXPECT_NE(message_of([&] { activate({.act = Act(99), .x = x, .y = x}, {}); }).find("99"), std::string::npos);
}

}  // namespace
}  // namespace ingot
