#pragma once
// The operands of products of experts, and the products by their formula in fp64: for the tests on the CPU, on the
// emulator and on a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "ingot/kernels/expert_linear/expert_linear.h"
#include "ingot/testing/any_buffer.h"

namespace ingot::expert_linear_cases {

struct Case {
  std::vector<int32_t> offsets;
  int64_t rows, k, n;
  int64_t experts() const { return int64_t(offsets.size()) - 1; }
};
inline std::ostream& operator<<(std::ostream& o, const Case& c) {
  return o << c.experts() << " experts, " << c.rows << " rows, " << c.k << " to " << c.n;
}
// Experts without rows at the start, in the middle and at the end; rows behind the last expert; one row; no rows; no
// experts; no columns.
inline const std::vector<Case> kSmall = {{{0, 0, 3, 3, 20, 21, 21}, 24, 19, 33},
                                         {{0, 7}, 7, 8, 5},
                                         {{0, 1, 2}, 2, 64, 16},
                                         {{0, 0, 0}, 0, 4, 4},
                                         {{0}, 3, 4, 4},
                                         {{0, 1, 2}, 2, 0, 3}};

// Results hold numbers before the call, to which gradients of weights are added. Rows behind the last expert's are NaN
// in x and dy: no sum may read them.
template <class B> struct Operands {
  Case c;
  B x, w, b, y, dy, dx, dw, db, offsets;

  Operands(DType t, const Case& c, int64_t gap)
      : c(c),
        x(t, {c.rows, c.k}, c.k + gap),
        w(t, {c.experts(), c.n, c.k}, c.k + gap),
        b(t, {c.experts(), c.n}),
        y(t, {c.rows, c.n}, c.n + gap),
        dy(t, {c.rows, c.n}, c.n + gap),
        dx(t, {c.rows, c.k}, c.k + gap),
        dw(t, {c.experts(), c.n, c.k}, c.k + gap),
        db(t, {c.experts(), c.n}),
        offsets(DType::i32, {c.experts() + 1}) {
    using testing::host_of;
    std::copy(c.offsets.begin(), c.offsets.end(), host_of(offsets).template ptr<int32_t>());
    testing::fill_normal(host_of(x), 1);
    testing::fill_normal(host_of(w), 2, 0.3);
    testing::fill_normal(host_of(b), 3);
    testing::fill_normal(host_of(dy), 4);
    testing::fill_normal(host_of(dw), 5);
    testing::fill_normal(host_of(db), 6);
    for (const B* of : {&x, &dy}) {
      const Tensor behind = host_of(*of).slice(0, c.offsets.back(), c.rows);
      testing::assign(behind, std::vector<double>(size_t(behind.numel()), std::numeric_limits<double>::quiet_NaN()));
    }
    for (B* of : {&x, &w, &b, &y, &dy, &dx, &dw, &db, &offsets}) testing::send(*of);
  }
  ExpertLinear forward(bool bias) const {
    return {.x = x, .w = w, .b = bias ? Tensor(b) : Tensor(), .offsets = offsets, .y = y};
  }
  ExpertLinearBackward backward() const {
    return {.dy = dy, .x = x, .w = w, .offsets = offsets, .dx = dx, .dw = dw, .db = db};
  }
};

// The elements of a result, and the sums of the absolute values of their terms.
struct Sums {
  explicit Sums(int64_t count) : value(size_t(count)), size(size_t(count)) {}
  std::vector<double> value, size;
  void add(int64_t i, double term) {
    value[size_t(i)] += term;
    size[size_t(i)] += std::abs(term);
  }
  void add(const std::vector<double>& terms) {
    for (size_t i = 0; i < terms.size(); ++i) add(int64_t(i), terms[i]);
  }
};
struct Expected {
  Sums y, dx, dw, db;
};
template <class B> Expected by_formula(const Operands<B>& o, bool bias, bool overwrite) {
  const Case& c = o.c;
  const auto of = [](const B& b) { return testing::values(testing::host_of(b)); };
  const auto x = of(o.x), w = of(o.w), b = of(o.b), dy = of(o.dy);
  Expected r{Sums(c.rows * c.n), Sums(c.rows * c.k), Sums(c.experts() * c.n * c.k), Sums(c.experts() * c.n)};
  if (!overwrite) r.dw.add(of(o.dw)), r.db.add(of(o.db));
  for (int64_t e = 0; e < c.experts(); ++e)
    for (int64_t row = c.offsets[size_t(e)]; row < c.offsets[size_t(e) + 1]; ++row)
      for (int64_t n = 0; n < c.n; ++n) {
        const double d = dy[size_t(row * c.n + n)];
        if (bias) r.y.add(row * c.n + n, b[size_t(e * c.n + n)]);
        for (int64_t k = 0; k < c.k; ++k) {
          const int64_t at = (e * c.n + n) * c.k + k, of_row = row * c.k + k;
          r.y.add(row * c.n + n, w[size_t(at)] * x[size_t(of_row)]);
          r.dx.add(of_row, w[size_t(at)] * d);
          r.dw.add(at, d * x[size_t(of_row)]);
        }
        r.db.add(e * c.n + n, d);
      }
  return r;
}

// A sum of `terms` products: tensor cores truncate each addition, 2^-23 of the terms' size, and fp32 and fp64 round
// better. The result is rounded, and a sum that is added to a gradient is rounded before and after. Numbers of f16
// below 2^-14 are multiples of 2^-24, so each rounding there errs by at most 2^-25.
template <class B> void expect_sums(const char* name, B& found, const Sums& want, int64_t terms) {
  testing::fetch(found);
  const Tensor host = testing::host_of(found);
  const std::vector<double> got = testing::values(host);
  const double u = testing::roundoff(host.dtype), step = host.dtype == DType::f64 ? u : 0x1p-23,
               least = host.dtype == DType::f16 ? 2 * 0x1p-25 : 0;
  int wrong = 0;
  for (size_t i = 0; i < got.size() && wrong < 3; ++i) {
    const double allowed = least + 2.02 * u * want.size[i] + double(terms) * step * want.size[i];
    if (std::abs(got[i] - want.value[i]) <= allowed) continue;
    ++wrong;
    ADD_FAILURE() << name << " element " << i << ": found " << got[i] << ", expected " << want.value[i] << " within "
                  << allowed;
  }
}

// Calls forward(ExpertLinear) and backward(ExpertLinearBackward) for a case, and compares every result.
template <class B, class Forward, class Backward>
void follows_its_formula(DType t, const Case& c, int64_t gap, Forward&& forward, Backward&& backward) {
  for (const bool bias : {false, true}) {
    const bool overwrite = bias;
    SCOPED_TRACE(::testing::Message() << t << ", " << c << ", gap " << gap << ", bias and overwrite " << bias);
    Operands<B> o(t, c, gap);
    const Expected expected = by_formula(o, bias, overwrite);
    forward(o.forward(bias));
    ExpertLinearBackward back = o.backward();
    back.overwrite = overwrite;
    backward(back);
    expect_sums("y", o.y, expected.y, c.k + 1);
    expect_sums("dx", o.dx, expected.dx, c.n);
    expect_sums("dw", o.dw, expected.dw, c.rows + 1);
    expect_sums("db", o.db, expected.db, c.rows + 1);
  }
}

// Infinities of one expert stay in its own results, although a stage of the kernels also holds rows of its neighbours.
template <class B, class Backward> void infinities_stay_with_their_expert(DType t, const Case& c, Backward&& backward) {
  for (int64_t infinite = 0; infinite < c.experts(); ++infinite) {
    Operands<B> o(t, c, 0);
    Expected expected = by_formula(o, false, true);
    const int64_t from = c.offsets[size_t(infinite)], to = c.offsets[size_t(infinite) + 1];
    for (B* of : {&o.x, &o.dy}) {
      const Tensor rows = testing::host_of(*of).slice(0, from, to);
      testing::assign(rows, std::vector<double>(size_t(rows.numel()), std::numeric_limits<double>::infinity()));
      testing::send(*of);
    }
    ExpertLinearBackward back = o.backward();
    back.overwrite = true;
    backward(back);
    testing::fetch(o.dw);
    const std::vector<double> dw = testing::values(testing::host_of(o.dw));
    const int64_t matrix = c.n * c.k;
    for (int64_t i = 0; i < int64_t(dw.size()); ++i) {
      const bool own = i / matrix == infinite && from < to;
      ASSERT_EQ(std::isfinite(dw[size_t(i)]), !own) << "expert " << i / matrix << " beside the infinite " << infinite;
    }
  }
}

}  // namespace ingot::expert_linear_cases
