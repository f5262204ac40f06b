#pragma once
// Compares the updates of a step on another backend with the CPU's in fp64. `Ops` names the functions, B the buffers.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ingot/kernels/adamw/adamw.h"
#include "ingot/testing/any_buffer.h"

namespace ingot::adamw_cases {

using testing::Buffer;
using testing::exact;
using testing::expect_close;
using testing::holding;
using testing::normal;
using testing::poisoned;
using testing::values;

// Counts of f32 numbers, from an aligned address or not.
constexpr int64_t kCounts[] = {0, 1, 3, 4, 1000, 70001};

template <class B> Tensor after(const B& b, int64_t first) { return b.tensor().slice(0, first, b.tensor().numel()); }

template <class Ops, class B> void adamw_follows_its_formula() {
  for (int64_t n : kCounts)
    for (int64_t shift : {0, 1}) {
      const int64_t all = n + shift;
      B p = normal<B>(DType::f32, {all}, 1), g = normal<B>(DType::f32, {all}, 2, 0.1);
      B m = normal<B>(DType::f32, {all}, 3, 0.01), v = normal<B>(DType::f32, {all}, 4, 0.1);
      testing::fetch(v);
      std::vector<double> squares = values(testing::host_of(v));
      for (double& x : squares) x = x * x;
      v = holding<B>(DType::f32, {all}, squares);
      B factor = holding<B>(DType::f64, {1}, {0.25});
      Buffer p64 = exact(p), g64 = exact(g), m64 = exact(m), v64 = exact(v), f64 = exact(factor);
      const auto call = [&](const Tensor& p, const Tensor& g, const Tensor& m, const Tensor& v, const Tensor& f) {
        return AdamW{.p = p,
                     .g = g,
                     .m = m,
                     .v = v,
                     .lr = 0.01,
                     .beta2 = 0.95,
                     .weight_decay = 0.1,
                     .grad_scale = 0.5,
                     .factor = f,
                     .step = 7};
      };
      AdamW a = call(after(p, shift), after(g, shift), after(m, shift), after(v, shift), factor);
      B copy = poisoned<B>(n % 2 != 0 ? DType::f16 : DType::bf16, {all});
      a.copy = after(copy, shift);
      Ops::adamw(a);
      adamw(call(after(p64, shift), after(g64, shift), after(m64, shift), after(v64, shift), f64), {});
      // A handful of roundings of numbers of size 1 to 5; the step itself is of size lr.
      const double u = testing::roundoff(DType::f32);
      expect_close(p, values(p64), 8 * u, 4 * u);
      expect_close(m, values(m64), 2 * u, 4 * u);
      expect_close(v, values(v64), 2 * u, 4 * u);
      testing::fetch(copy);
      const std::vector<double> wide = values(testing::host_of(p)), narrow = values(testing::host_of(copy));
      for (int64_t i = shift; i < all; ++i)
        ASSERT_EQ(narrow[size_t(i)],
                  n % 2 != 0 ? double(f16(float(wide[size_t(i)]))) : double(bf16(float(wide[size_t(i)]))));
    }
}

template <class Ops, class B> void ema_follows_its_formula() {
  for (int64_t n : kCounts) {
    B p = normal<B>(DType::f32, {n}, 1), average = normal<B>(DType::f32, {n}, 2);
    Buffer p64 = exact(p), average64 = exact(average);
    Ops::ema({.p = p, .average = average, .decay = 0.97});
    ema({.p = p64, .average = average64, .decay = 0.97}, {});
    expect_close(average, values(average64), 8 * testing::roundoff(DType::f32), 4 * testing::roundoff(DType::f32));
  }
}

template <class Ops, class B> void rates_serve_in_place_of_the_numbers() {
  B g = normal<B>(DType::f32, {1001}, 2, 0.1), rates = poisoned<B>(DType::f64, {3}),
    rate = holding<B>(DType::f64, {1}, {0.97});
  std::vector<double> result[2], averages[2];
  for (bool given : {false, true}) {
    B p = normal<B>(DType::f32, {1001}, 1), m = normal<B>(DType::f32, {1001}, 3, 0.01),
      v = holding<B>(DType::f32, {1001}, std::vector<double>(1001, 0.5)), average = normal<B>(DType::f32, {1001}, 4);
    AdamW a{.p = p, .g = g, .m = m, .v = v, .lr = 0.01, .beta2 = 0.95, .weight_decay = 0.1, .step = 7};
    Ema e{.p = p, .average = average, .decay = 0.97};
    if (given) {
      const auto now = adamw_rates(a);
      rates = holding<B>(DType::f64, {3}, {now.begin(), now.end()});
      a.rates = rates, a.lr = 5, a.weight_decay = 1, a.step = 1;
      e.rate = rate, e.decay = 0;
    }
    Ops::adamw(a);
    Ops::ema(e);
    testing::fetch(p), testing::fetch(average);
    result[given] = values(testing::host_of(p)), averages[given] = values(testing::host_of(average));
  }
  EXPECT_EQ(result[0], result[1]);
  EXPECT_EQ(averages[0], averages[1]);
}

template <class Ops, class B> void a_factor_that_is_not_finite_writes_nothing() {
  for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    B p = normal<B>(DType::f32, {100}, 1), g = normal<B>(DType::f32, {100}, 2), m = normal<B>(DType::f32, {100}, 3),
      v = holding<B>(DType::f32, {100}, std::vector<double>(100, 1)), average = normal<B>(DType::f32, {100}, 4);
    B factor = holding<B>(DType::f64, {1}, {bad});
    const auto p0 = values(testing::host_of(p)), m0 = values(testing::host_of(m)),
               a0 = values(testing::host_of(average));
    Ops::adamw({.p = p, .g = g, .m = m, .v = v, .factor = factor});
    Ops::ema({.p = p, .average = average, .factor = factor});
    expect_close(p, p0, 0, 0);
    expect_close(m, m0, 0, 0);
    expect_close(v, std::vector<double>(100, 1), 0, 0);
    expect_close(average, a0, 0, 0);
  }
}

template <class Ops, class B> void sums_of_squares_are_those_of_fp64() {
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (int64_t n : kCounts) {
      B x = normal<B>(type, {n}, 5, 3), sum = poisoned<B>(DType::f64, {1});
      B workspace = poisoned<B>(DType::u8, {sum_of_squares_workspace_bytes(n, x.tensor().device)});
      Ops::sum_of_squares({.x = x, .sum = sum, .workspace = workspace});
      double want = 0;
      for (double v : values(testing::host_of(x))) want += v * v;
      expect_close(sum, {want}, 0, double(n + 1) * 1e-16);
    }
}

template <class Ops, class B> void clipping_is_by_the_norm() {
  struct Case {
    double sum, max_norm, norm, factor;
  };
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const Case& c :
       {Case{16, 0, 4, 1}, {16, 5, 4, 1}, {16, 1, 4, 1 / (4 + 1e-6)}, {inf, 1, inf, nan}, {nan, 1, nan, nan}}) {
    B sum = holding<B>(DType::f64, {1}, {c.sum}), norm = poisoned<B>(DType::f64, {1}),
      factor = poisoned<B>(DType::f64, {1});
    Ops::clip_factor({.sum_of_squares = sum, .norm = norm, .factor = factor, .max_norm = c.max_norm});
    expect_close(norm, {c.norm}, 0, 1e-15);
    expect_close(factor, {c.factor}, 0, 1e-15);
  }
}

template <class Ops, class B> void everything_holds() {
  adamw_follows_its_formula<Ops, B>();
  ema_follows_its_formula<Ops, B>();
  rates_serve_in_place_of_the_numbers<Ops, B>();
  a_factor_that_is_not_finite_writes_nothing<Ops, B>();
  sums_of_squares_are_those_of_fp64<Ops, B>();
  clipping_is_by_the_norm<Ops, B>();
}

}  // namespace ingot::adamw_cases
