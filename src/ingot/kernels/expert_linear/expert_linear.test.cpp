#include "ingot/kernels/expert_linear/expert_linear.h"

#include <gtest/gtest.h>

#include <vector>

#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;

struct Case {
  std::vector<int32_t> offsets;
  int64_t rows, k, n;
};
// Experts without rows at the start, in the middle and at the end; rows behind the last expert; one row; no rows.
const std::vector<Case> kCases = {{{0, 0, 3, 3, 20, 21, 21}, 24, 19, 33},
                                  {{0, 7}, 7, 8, 5},
                                  {{0, 1, 2}, 2, 64, 16},
                                  {{0, 0, 0}, 0, 4, 4},
                                  {{0}, 3, 4, 4}};

struct Operands {
  std::vector<int32_t> at;
  int64_t experts;
  Buffer x, w, b, y, dy, dx, dw, db;

  Operands(DType t, const Case& c, int64_t gap)
      : at(c.offsets),
        experts(int64_t(c.offsets.size()) - 1),
        x(t, {c.rows, c.k}, c.k + gap),
        w(t, {experts, c.n, c.k}),
        b(t, {experts, c.n}),
        y(t, {c.rows, c.n}, c.n + gap),
        dy(t, {c.rows, c.n}, c.n + gap),
        dx(t, {c.rows, c.k}, c.k + gap),
        dw(t, {experts, c.n, c.k}),
        db(t, {experts, c.n}) {
    testing::fill_normal(x, 1);
    testing::fill_normal(w, 2, 0.3);
    testing::fill_normal(b, 3);
    testing::fill_normal(dy, 4);
    testing::fill_normal(dw, 5);
    testing::fill_normal(db, 6);
  }
  Tensor offsets() { return Tensor(at.data(), Shape{int64_t(at.size())}); }
  int64_t expert_of(int64_t row) const {
    for (int64_t e = 0; e < experts; ++e)
      if (at[e] <= row && row < at[e + 1]) return e;
    return -1;
  }
  void forward(bool bias) {
    expert_linear({.x = x, .w = w, .b = bias ? b.tensor() : Tensor(), .offsets = offsets(), .y = y}, {});
  }
  void backward() {
    expert_linear_backward({.dy = dy, .x = x, .w = w, .offsets = offsets(), .dx = dx, .dw = dw, .db = db}, {});
  }
};

struct Expected {
  std::vector<double> y, dx, dw, db;
};
Expected by_formula(const Operands& o, const Case& c, bool bias) {
  const auto x = testing::values(o.x), w = testing::values(o.w), b = testing::values(o.b), dy = testing::values(o.dy);
  Expected r{std::vector<double>(size_t(c.rows * c.n)), std::vector<double>(size_t(c.rows * c.k)),
             testing::values(o.dw), testing::values(o.db)};
  for (int64_t row = 0; row < c.rows; ++row) {
    const int64_t e = o.expert_of(row);
    if (e < 0) continue;
    for (int64_t n = 0; n < c.n; ++n) {
      double sum = bias ? b[size_t(e * c.n + n)] : 0;
      const double d = dy[size_t(row * c.n + n)];
      for (int64_t k = 0; k < c.k; ++k) {
        const size_t at = size_t((e * c.n + n) * c.k + k), of_row = size_t(row * c.k + k);
        sum += w[at] * x[of_row];
        r.dx[of_row] += w[at] * d;
        r.dw[at] += d * x[of_row];
      }
      r.y[size_t(row * c.n + n)] = sum;
      r.db[size_t(e * c.n + n)] += d;
    }
  }
  return r;
}

TEST(ExpertLinear, FollowsItsFormulaForwardAndBackward) {
  for (DType t : {DType::f64, DType::f32})
    for (const Case& c : kCases)
      for (int64_t gap : {0, 3})
        for (bool bias : {false, true}) {
          Operands o(t, c, gap);
          const Expected expected = by_formula(o, c, bias);
          // A sum of at most 64 products, each near 1, in any order.
          const double tolerance = 64 * 4 * testing::roundoff(t);
          o.forward(bias);
          o.backward();
          for (const auto& [name, found, want] :
               {std::tuple<const char*, const Buffer*, const std::vector<double>*>{"y", &o.y, &expected.y},
                {"dx", &o.dx, &expected.dx},
                {"dw", &o.dw, &expected.dw},
                {"db", &o.db, &expected.db}}) {
            const auto agreed = testing::compare(*found, *want, tolerance, tolerance);
            EXPECT_TRUE(agreed.ok) << t << " " << name << ": " << agreed.message;
            EXPECT_TRUE(found->guards_intact()) << name;
          }
        }
}

TEST(ExpertLinear, EachGradientMayBeLeftOut) {
  const Case& c = kCases[0];
  Operands all(DType::f64, c, 0), some(DType::f64, c, 0);
  all.backward();
  expert_linear_backward({.dy = some.dy, .w = some.w, .offsets = some.offsets(), .dx = some.dx}, {});
  expert_linear_backward({.dy = some.dy, .x = some.x, .offsets = some.offsets(), .dw = some.dw}, {});
  expert_linear_backward({.dy = some.dy, .offsets = some.offsets(), .db = some.db}, {});
  EXPECT_EQ(testing::values(some.dx), testing::values(all.dx));
  EXPECT_EQ(testing::values(some.dw), testing::values(all.dw));
  EXPECT_EQ(testing::values(some.db), testing::values(all.db));
}

TEST(ExpertLinear, GradientsAreTheSlopesOfTheForwardPass) {
  const Case& c = kCases[0];
  Operands o(DType::f64, c, 0);
  fill_zero(o.dw);
  fill_zero(o.db);
  o.backward();
  const auto loss = [&] {
    o.forward(true);
    return testing::dot(o.y, o.dy);
  };
  for (const auto& [input, gradient] :
       {std::pair<const Buffer*, const Buffer*>{&o.x, &o.dx}, {&o.w, &o.dw}, {&o.b, &o.db}})
    EXPECT_LT(testing::gradient_error(loss, *input, *gradient, 9), 1e-6);  // central differences in fp64
}

TEST(ExpertLinear, RefusesWhatDoesNotFit) {
  const Case& c = kCases[0];
  for (std::vector<int32_t> at :
       {std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7}, {0, 5, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 25}, {0, 1, 2}}) {
    Operands o(DType::f64, c, 0);
    o.at = at;
    EXPECT_THROW(o.forward(true), Error);
    EXPECT_THROW(o.backward(), Error);
  }
  Operands o(DType::f64, c, 0), narrow(DType::f32, c, 0);
  Buffer transposed(DType::f64, {6, 19, 33});
  EXPECT_THROW(expert_linear({.x = o.x, .w = transposed, .offsets = o.offsets(), .y = o.y}, {}), Error);
  EXPECT_THROW(expert_linear({.x = o.x, .w = narrow.w, .offsets = o.offsets(), .y = o.y}, {}), Error);
  EXPECT_THROW(expert_linear_backward({.dy = o.dy, .x = o.x, .offsets = o.offsets(), .dx = o.dx}, {}), Error);
  EXPECT_THROW(expert_linear_backward({.dy = o.dy, .w = o.w, .offsets = o.offsets(), .dw = o.dw}, {}), Error);
  using Forward = ExpertLinear;
  using Backward = ExpertLinearBackward;
  const auto forward = [](const Forward& a, Stream s) { expert_linear(a, s); };
  const auto backward = [](const Backward& a, Stream s) { expert_linear_backward(a, s); };
  EXPECT_EQ(testing::device_not_checked<Forward>(
                {.x = o.x, .w = o.w, .b = o.b, .offsets = o.offsets(), .y = o.y},
                {&Forward::x, &Forward::w, &Forward::b, &Forward::offsets, &Forward::y}, forward),
            "");
  EXPECT_EQ(
      testing::device_not_checked<Backward>(
          {.dy = o.dy, .x = o.x, .w = o.w, .offsets = o.offsets(), .dx = o.dx, .dw = o.dw, .db = o.db},
          {&Backward::dy, &Backward::x, &Backward::w, &Backward::offsets, &Backward::dx, &Backward::dw, &Backward::db},
          backward),
      "");
}

}  // namespace
}  // namespace ingot
