#include "ingot/kernels/adamw/adamw.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/adamw/adamw_cases.test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::values;

const int64_t kSizes[] = {0, 1, 7, 16, 33, 1000, 40001};

struct State {
  State(DType dtype, int64_t n) : p(dtype, {n}), g(dtype, {n}), m(dtype, {n}), v(dtype, {n}) {
    testing::fill_normal(p, 1, 0.5);
    testing::fill_normal(g, 2, 1e-2);
    fill_zero(m);
    fill_zero(v);
  }
  Buffer p, g, m, v;
};
const AdamW kOptions{.lr = 3e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_scale = 0.7};

AdamW step_of(const State& s, int64_t step) {
  AdamW a = kOptions;
  a.p = s.p, a.g = s.g, a.m = s.m, a.v = s.v, a.step = step;
  return a;
}

TEST(AdamW, FollowsThePublishedFormula) {
  State s(DType::f64, 50);
  std::vector<double> p = values(s.p), m(50, 0), v(50, 0);
  for (int64_t step = 1; step <= 5; ++step) {
    testing::fill_normal(s.g, uint64_t(step), 1e-2);
    const auto g = values(s.g);
    adamw(step_of(s, step), {});
    for (size_t i = 0; i < 50; ++i) {
      const double grad = g[i] * 0.7;
      m[i] = 0.9 * m[i] + 0.1 * grad;
      v[i] = 0.95 * v[i] + 0.05 * grad * grad;
      const double mean = m[i] / (1 - std::pow(0.9, double(step))), square = v[i] / (1 - std::pow(0.95, double(step)));
      p[i] = p[i] * (1 - 3e-3 * 0.1) - 3e-3 * mean / (std::sqrt(square) + 1e-8);
    }
  }
  // some ten roundings per step of numbers of size 1
  EXPECT_TRUE(testing::compare(s.p, p, 1e-14, 0).ok) << testing::compare(s.p, p, 1e-14, 0).message;
  EXPECT_TRUE(testing::compare(s.m, m, 1e-16, 1e-14).ok);
  EXPECT_TRUE(testing::compare(s.v, v, 1e-18, 1e-14).ok);
}

TEST(AdamW, Fp32IsAsCloseToFp64AsItsRoundingsAllow) {
  for (int64_t n : kSizes) {
    State fast(DType::f32, n), exact(DType::f64, n);
    testing::assign(exact.p, values(fast.p));
    for (int64_t step = 1; step <= 3; ++step) {
      testing::fill_normal(fast.g, uint64_t(step), 1e-2);
      testing::assign(exact.g, values(fast.g));
      adamw(step_of(fast, step), {});
      adamw(step_of(exact, step), {});
    }
    const double unit = testing::roundoff(DType::f32);
    // p is rounded once a step, and the step (3e-3 at most three times over) is off by some roundings of its own
    const auto p = testing::compare(fast.p, values(exact.p), 20 * 1e-2 * unit, 4 * unit);
    EXPECT_TRUE(p.ok) << p.message;
    EXPECT_TRUE(testing::compare(fast.m, values(exact.m), 10 * 1e-2 * unit, 6 * unit).ok);
    EXPECT_TRUE(testing::compare(fast.v, values(exact.v), 0, 12 * unit).ok);
    EXPECT_TRUE(fast.p.guards_intact() && fast.m.guards_intact() && fast.v.guards_intact() && fast.g.guards_intact());
  }
}

TEST(AdamW, TheFirstStepMovesByTheLearningRateWhateverTheGradientsSize) {
  for (double size : {1e-4, 1.0, 1e8}) {
    State s(DType::f32, 3);
    testing::assign(s.p, {1, 1, 1});
    testing::assign(s.g, {size, -size, 0});
    AdamW a = step_of(s, 1);
    a.weight_decay = 0;
    adamw(a, {});
    const auto p = values(s.p);
    EXPECT_NEAR(p[0], 1 - 3e-3, 1e-6);
    EXPECT_NEAR(p[1], 1 + 3e-3, 1e-6);
    EXPECT_EQ(p[2], 1);
  }
}

TEST(AdamW, ASmallDecayIsNotRoundedAway) {
  State s(DType::f32, 4000);
  fill_zero(s.g);
  const auto before = values(s.p);
  AdamW a = step_of(s, 1);
  a.lr = 1e-4, a.weight_decay = 1e-2;  // 1 - 1e-6 in fp32 is 1 - 9.54e-7
  adamw(a, {});
  const auto after = values(s.p);
  double moved = 0, size = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    moved += std::abs(before[i]) - std::abs(after[i]);
    size += std::abs(before[i]);
  }
  EXPECT_NEAR(moved / size, 1e-6, 1e-8);  // each p is rounded by up to 6e-8 of itself, in either direction
}

TEST(Ema, MovesTheAverageTowardsTheParameters) {
  for (DType dtype : {DType::f64, DType::f32})
    for (int64_t n : kSizes) {
      Buffer p(dtype, {n}), average(dtype, {n});
      testing::fill_normal(p, 1);
      testing::fill_normal(average, 2);
      auto want = values(average);
      const auto from = values(p);
      for (size_t i = 0; i < want.size(); ++i) want[i] = 0.98 * want[i] + 0.02 * from[i];
      ema({.p = p, .average = average, .decay = 0.98}, {});
      const auto r = testing::compare(average, want, 3 * testing::roundoff(dtype), 2 * testing::roundoff(dtype));
      EXPECT_TRUE(r.ok) << r.message;
      EXPECT_TRUE(average.guards_intact());
    }
}

double squares_of(const Tensor& t) {
  Buffer sum(DType::f64, {1});
  sum_of_squares({.x = t, .sum = sum}, {});
  EXPECT_TRUE(sum.guards_intact());
  return testing::values(sum)[0];
}

TEST(ClipFactor, IsTheNormAndTheFactorThatScalesItToTheLimit) {
  for (const auto& [squares, limit, factor] :
       {std::tuple(25.0, 1.0, 1 / (5 + 1e-6)), {25.0, 5.0, 1.0}, {25.0, 0.0, 1.0}, {0.0, 1.0, 1.0}}) {
    Buffer sum(DType::f64, {1}), norm(DType::f64, {1}), got(DType::f64, {1});
    testing::assign(sum, {squares});
    clip_factor({.sum_of_squares = sum, .norm = norm, .factor = got, .max_norm = limit}, {});
    EXPECT_EQ(values(norm)[0], std::sqrt(squares));
    EXPECT_EQ(values(got)[0], factor);
    EXPECT_TRUE(norm.guards_intact() && got.guards_intact());
  }
}

// A step on a device skips a gradient that is not finite, without a check on the host.
TEST(ClipFactor, AFactorThatIsNotFiniteSkipsUpdates) {
  for (double squares : {double(NAN), HUGE_VAL}) {
    Buffer number(DType::f64, {1}), factor(DType::f64, {1}), average(DType::f32, {100});
    testing::assign(number, {squares});
    clip_factor({.sum_of_squares = number, .norm = number, .factor = factor, .max_norm = 1}, {});
    EXPECT_FALSE(std::isfinite(values(number)[0])) << "the norm tells why";
    State s(DType::f32, 100);
    const auto p = values(s.p), m = values(s.m), v = values(s.v);
    AdamW a = step_of(s, 1);
    a.factor = factor;
    adamw(a, {});
    testing::fill_normal(average, 2);
    const auto before = values(average);
    ema({.p = s.p, .average = average, .decay = 0.5, .factor = factor}, {});
    EXPECT_TRUE(values(s.p) == p && values(s.m) == m && values(s.v) == v && values(average) == before);
  }
}

TEST(ClipFactor, MultipliesTheGradientAsGradScaleDoes) {
  State a(DType::f32, 1000), b(DType::f32, 1000);
  Buffer factor(DType::f64, {1});
  testing::assign(factor, {0.375});
  AdamW with = step_of(a, 1), scaled = step_of(b, 1);
  with.factor = factor, scaled.grad_scale *= 0.375;
  adamw(with, {}), adamw(scaled, {});
  EXPECT_EQ(values(a.p), values(b.p));
}

struct CpuOps {
  static void adamw(const AdamW& a) { ingot::adamw(a, {}); }
  static void ema(const Ema& e) { ingot::ema(e, {}); }
};
TEST(AdamW, RatesServeInPlaceOfTheNumbers) { adamw_cases::rates_serve_in_place_of_the_numbers<CpuOps, Buffer>(); }

TEST(SumOfSquares, IsTheSumInFp64) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (int64_t n : kSizes) {
      Buffer t(dtype, {n});
      testing::fill_normal(t, 3);
      long double want = 0;
      for (double v : values(t)) want += (long double)(v)*v;
      EXPECT_NEAR(squares_of(t), double(want), 1e-12 * double(want)) << n;  // far below sqrt(n) fp64 roundings
    }
}

TEST(SumOfSquares, DoesNotOverflowFp32) {
  Buffer t(DType::f32, {3});
  testing::assign(t, {1e30, 1e30, 1e-30});
  EXPECT_NEAR(squares_of(t) / 2e60, 1, 1e-6);
}

TEST(AllFinite, FindsOneBadElementAnywhere) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (int64_t n : kSizes) {
      Buffer t(dtype, {n});
      testing::fill_normal(t, 4);
      EXPECT_TRUE(all_finite(t));
      for (int64_t at : {int64_t(0), n / 2, n - 1}) {
        if (n == 0) continue;
        const auto good = values(t);
        for (double bad : {double(NAN), HUGE_VAL, -HUGE_VAL}) {
          auto v = good;
          v[size_t(at)] = bad;
          testing::assign(t, v);
          EXPECT_FALSE(all_finite(t)) << bad << " at " << at << " of " << n;
        }
        testing::assign(t, good);
      }
    }
  Buffer large(DType::f32, {2});
  testing::assign(large, {3.4e38, -3.4e38});
  EXPECT_TRUE(all_finite(large));
}

TEST(AdamW, ThreadsDoNotChangeABit) {
  const int before = thread_count();
  std::vector<double> first;
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    State s(DType::f32, 100003);
    adamw(step_of(s, 1), {});
    auto all = values(s.p);
    all.push_back(squares_of(s.p));
    if (threads == 1) first = all;
    EXPECT_EQ(all, first);
  }
  set_thread_count(before);
}

template <class Call> std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) { return e.what(); }
  return "no error";
}

TEST(AdamW, WithoutAMomentTheStepFollowsTheGradientAlone) {
  for (const DType type : {DType::f32, DType::f64}) {
    State with(type, 77), without(type, 77);
    for (int64_t step = 1; step <= 3; ++step) {
      for (State* s : {&with, &without}) {
        testing::fill_normal(s->g, uint64_t(step), 1e-2);
        AdamW a = step_of(*s, step);
        a.beta1 = 0;
        if (s == &without) a.m = Tensor();
        adamw(a, {});
      }
      EXPECT_EQ(values(with.p), values(without.p));
      EXPECT_EQ(values(with.v), values(without.v));
    }
    AdamW a = step_of(with, 1);
    a.m = Tensor();
    EXPECT_EQ(message_of([&] { adamw(a, {}); }), "adamw: found beta1 0.9 without m, expected m, or a beta1 of 0");
  }
}

TEST(AdamW, ErrorsNameTheValueFoundAndTheValueExpected) {
  State s(DType::f32, 5), other(DType::f32, 6);
  AdamW a = step_of(s, 0);
  EXPECT_EQ(message_of([&] { adamw(a, {}); }), "adamw: step counts from 1: found 0, expected at least 1");
  a.step = 1, a.g = other.g;
  const std::string shape = message_of([&] { adamw(a, {}); });
  EXPECT_NE(shape.find("(6)"), std::string::npos) << shape;
  EXPECT_NE(shape.find("(5)"), std::string::npos) << shape;
  a.g = s.g, a.rates = s.g;
  EXPECT_EQ(message_of([&] { adamw(a, {}); }), "adamw: rates: found f32 of shape (5), expected 3 of f64");
  a.rates = Tensor(), a.beta2 = 1;
  EXPECT_NE(message_of([&] { adamw(a, {}); }).find("beta2 1"), std::string::npos);
  EXPECT_NE(message_of([&] { ema({.p = s.p, .average = other.p}, {}); }).find("(6)"), std::string::npos);
}

}  // namespace
}  // namespace ingot
