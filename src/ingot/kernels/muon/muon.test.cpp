#include "ingot/kernels/muon/muon.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::assign;
using testing::Buffer;
using testing::fill_normal;
using testing::values;

using Matrix = std::vector<double>;

Matrix multiply(const Matrix& a, const Matrix& b, size_t m, size_t k, size_t n) {
  Matrix c(m * n, 0);
  for (size_t i = 0; i < m; ++i)
    for (size_t p = 0; p < k; ++p)
      for (size_t j = 0; j < n; ++j) c[i * n + j] += a[i * k + p] * b[p * n + j];
  return c;
}
Matrix transposed(const Matrix& a, size_t rows, size_t cols) {
  Matrix t(a.size());
  for (size_t i = 0; i < rows; ++i)
    for (size_t j = 0; j < cols; ++j) t[j * rows + i] = a[i * cols + j];
  return t;
}

// The iteration as in the header, with an explicit transpose.
Matrix orthogonal_factor(Matrix x, size_t rows, size_t cols, int steps, double a, double b, double c) {
  double norm = 0;
  for (double v : x) norm += v * v;
  norm = std::sqrt(norm) + 1e-7;
  for (double& v : x) v /= norm;
  const bool tall = rows > cols;
  if (tall) x = transposed(x, rows, cols);
  const size_t r = std::min(rows, cols), n = std::max(rows, cols);
  for (int s = 0; s < steps; ++s) {
    const Matrix square = multiply(x, transposed(x, r, n), r, n, r);
    Matrix poly = multiply(square, square, r, r, r);
    for (size_t i = 0; i < poly.size(); ++i) poly[i] = b * square[i] + c * poly[i];
    const Matrix moved = multiply(poly, x, r, r, n);
    for (size_t i = 0; i < x.size(); ++i) x[i] = a * x[i] + moved[i];
  }
  return tall ? transposed(x, n == rows ? cols : rows, n) : x;
}

struct State {
  Matrix p, momentum;
};
State reference(const Muon& m, size_t rows, size_t cols, Matrix p, const Matrix& g, Matrix buf) {
  Matrix u(g.size());
  for (size_t i = 0; i < g.size(); ++i) {
    buf[i] = m.mu * buf[i] + m.grad_scale * g[i];
    u[i] = m.nesterov ? m.grad_scale * g[i] + m.mu * buf[i] : buf[i];
  }
  if (m.row_normalise)
    for (size_t r = 0; r < rows; ++r) {
      double norm = 0;
      for (size_t j = 0; j < cols; ++j) norm += u[r * cols + j] * u[r * cols + j];
      for (size_t j = 0; j < cols; ++j) u[r * cols + j] /= std::max(std::sqrt(norm), 1e-7);
    }
  const Matrix x = orthogonal_factor(u, rows, cols, m.steps, m.a, m.b, m.c);
  const double scale = std::sqrt(std::max(1.0, double(rows) / double(cols)));
  for (size_t i = 0; i < p.size(); ++i) p[i] = p[i] * (1 - m.lr * m.weight_decay) - m.lr * scale * x[i];
  return {p, buf};
}

struct Bank {
  int64_t count, rows, cols, pad = 0;
};
const std::vector<Bank> kBanks = {{1, 1, 1},  {1, 1, 7},      {2, 7, 1},   {3, 5, 33, 2},
                                  {2, 33, 5}, {9, 16, 16, 1}, {1, 65, 31}, {2, 32, 65, 3}};

void run(const Bank& s, DType dtype, Muon m, double tolerance) {
  Buffer p(dtype, {s.count, s.rows, s.cols}, s.cols + s.pad), g(dtype, {s.count, s.rows, s.cols}, s.cols + s.pad),
      momentum(dtype, {s.count, s.rows, s.cols});
  Buffer workspace(DType::u8, {muon_workspace_bytes(s.count, s.rows, s.cols, dtype, {})});
  fill_normal(p, 1);
  fill_normal(g, 2, 0.01);
  fill_normal(momentum, 3, 0.02);
  const Matrix p0 = values(p), g0 = values(g), m0 = values(momentum);
  m.p = p;
  m.g = g;
  m.momentum = momentum;
  m.workspace = workspace;
  muon(m, {});
  Matrix want_p, want_m;
  const size_t n = size_t(s.rows * s.cols);
  for (size_t i = 0; i < size_t(s.count); ++i) {
    const auto cut = [&](const Matrix& v) { return Matrix(v.begin() + long(i * n), v.begin() + long((i + 1) * n)); };
    const State want = reference(m, size_t(s.rows), size_t(s.cols), cut(p0), cut(g0), cut(m0));
    want_p.insert(want_p.end(), want.p.begin(), want.p.end());
    want_m.insert(want_m.end(), want.momentum.begin(), want.momentum.end());
  }
  const auto result = testing::compare(p, want_p, tolerance, 0);
  EXPECT_TRUE(result.ok) << s.count << "x" << s.rows << "x" << s.cols << ": " << result.message;
  const double unit = testing::roundoff(dtype);  // two products and a sum of numbers below 0.1
  EXPECT_TRUE(testing::compare(momentum, want_m, 0.1 * unit, 3 * unit).ok);
  EXPECT_EQ(values(g), g0);
  EXPECT_TRUE(p.guards_intact() && momentum.guards_intact() && workspace.guards_intact());
}

TEST(muon, follows_the_formula_in_f64) {
  for (const Bank& s : kBanks)
    for (bool nesterov : {false, true})
      for (bool row_normalise : {false, true})
        run(s, DType::f64,
            {.lr = 0.1,
             .mu = 0.9,
             .weight_decay = 0.3,
             .grad_scale = 0.5,
             .nesterov = nesterov,
             .row_normalise = row_normalise},
            1e-11);
}
TEST(muon, f32_stays_near_the_formula) {
  // A step multiplies an error by |a| + 3 |b| + 5 |c| < 30 at most for singular values below 1, in practice by the
  // polynomial's slope of 3.4 near 0: 5 steps from 6e-8 times sqrt(terms) stay below 3e-4; times lr.
  for (const Bank& s : kBanks) run(s, DType::f32, {.lr = 0.1, .weight_decay = 0.3}, 3e-5);
}
TEST(muon, other_coefficients_and_numbers_of_steps_follow_the_formula) {
  for (int steps : {0, 1, 2, 6})
    for (const Bank& s : kBanks) run(s, DType::f64, {.lr = 1, .steps = steps, .a = 2, .b = -1.5, .c = 0.5}, 1e-11);
}

TEST(muon, rates_serve_in_place_of_the_numbers) {
  Buffer g(DType::f64, {2, 5, 7}), rates(DType::f64, {3}),
      workspace(DType::u8, {muon_workspace_bytes(2, 5, 7, DType::f64, {})});
  fill_normal(g, 1);
  assign(rates, {0.1, 0.9, 0.3});
  Matrix result[2];
  for (bool given : {false, true}) {
    Buffer p(DType::f64, {2, 5, 7}), momentum(DType::f64, {2, 5, 7});
    fill_normal(p, 2), fill_normal(momentum, 3);
    Muon m{.p = p, .g = g, .momentum = momentum, .workspace = workspace, .lr = 0.1, .mu = 0.9, .weight_decay = 0.3};
    if (given) m.rates = rates, m.lr = 5, m.mu = 0, m.weight_decay = 1;
    muon(m, {});
    result[given] = values(p);
  }
  EXPECT_EQ(result[0], result[1]);
}
TEST(muon, a_zero_gradient_gives_a_zero_update) {
  for (DType dtype : {DType::f32, DType::f64})
    for (Products products : {Products::fp32, Products::bf16}) {
      Buffer p(dtype, {3, 8, 20}), g(dtype, {3, 8, 20}), momentum(dtype, {3, 8, 20});
      Buffer workspace(DType::u8, {muon_workspace_bytes(3, 8, 20, dtype, {})});
      fill_normal(p, 1);
      fill_zero(g);
      fill_zero(momentum);
      const Matrix before = values(p);
      muon({.p = p, .g = g, .momentum = momentum, .workspace = workspace, .products = products}, {});
      EXPECT_EQ(values(p), before);
    }
}

TEST(muon, tiny_and_huge_gradients_give_the_update_of_their_direction) {
  const auto update = [](double scale) {
    Buffer p(DType::f32, {1, 12, 20}), g(DType::f32, {1, 12, 20}), momentum(DType::f32, {1, 12, 20});
    Buffer workspace(DType::u8, {muon_workspace_bytes(1, 12, 20, DType::f32, {})});
    fill_zero(p);
    fill_zero(momentum);
    fill_normal(g, 2);
    Matrix v = values(g);
    for (double& x : v) x *= scale;
    assign(g, v);
    muon({.p = p, .g = g, .momentum = momentum, .workspace = workspace, .lr = 1}, {});
    return values(p);
  };
  const Matrix want = update(1);
  for (double scale : {0x1p-16, 0x1p100}) {
    const Matrix got = update(scale);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-4);
  }
}

TEST(muon, a_zero_row_stays_zero_and_does_not_change_other_rows) {
  Buffer p(DType::f64, {1, 6, 9}), g(DType::f64, {1, 6, 9}), momentum(DType::f64, {1, 6, 9});
  Buffer workspace(DType::u8, {muon_workspace_bytes(1, 6, 9, DType::f64, {})});
  fill_zero(p);
  fill_zero(momentum);
  fill_normal(g, 2);
  fill_zero(g.tensor().select(0, 0).slice(0, 3, 4));
  muon({.p = p, .g = g, .momentum = momentum, .workspace = workspace, .lr = 1}, {});
  const Matrix got = values(p);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i] == 0, i / 9 == 3) << i;
}

TEST(muon, the_number_of_threads_changes_no_bit) {
  const int before = thread_count();
  for (const Bank& s : {Bank{5, 40, 70}, Bank{2, 300, 260}}) {
    Matrix first;
    for (int threads : {1, 2, 3}) {
      set_thread_count(threads);
      Buffer p(DType::f32, {s.count, s.rows, s.cols}), g(DType::f32, {s.count, s.rows, s.cols}),
          momentum(DType::f32, {s.count, s.rows, s.cols});
      Buffer workspace(DType::u8, {muon_workspace_bytes(s.count, s.rows, s.cols, DType::f32, {})});
      fill_normal(p, 1);
      fill_normal(g, 2);
      fill_zero(momentum);
      muon({.p = p, .g = g, .momentum = momentum, .workspace = workspace}, {});
      if (threads == 1) first = values(p);
      EXPECT_EQ(values(p), first);
    }
  }
  set_thread_count(before);
}

// Singular values are the roots of the eigenvalues of x x^T; their spread is bounded by |x x^T - I| (Weyl).
double distance_from_orthogonal(const Matrix& x, size_t rows, size_t cols) {
  const bool tall = rows > cols;
  const Matrix y = tall ? transposed(x, rows, cols) : x;
  const size_t r = std::min(rows, cols), n = std::max(rows, cols);
  Matrix gram = multiply(y, transposed(y, r, n), r, n, r);
  for (size_t i = 0; i < r; ++i) gram[i * r + i] -= 1;
  double sum = 0;
  for (double v : gram) sum += v * v;
  return std::sqrt(sum);  // Frobenius bounds the spectral norm
}

TEST(newton_schulz, singular_values_of_the_result_are_near_one) {
  // Jordan's coefficients trade exactness for speed: values land in about [0.68, 1.14], |s^2 - 1| <= 0.54 each.
  for (const Bank& s : {Bank{1, 24, 48}, Bank{1, 48, 24}, Bank{1, 20, 21}})
    for (Products products : {Products::fp32, Products::bf16}) {
      Buffer x(DType::f32, {s.rows, s.cols}, s.cols + 3),
          workspace(DType::u8, {muon_workspace_bytes(s.count, s.rows, s.cols, DType::f32, {})});
      fill_normal(x, 5);
      newton_schulz({.x = x, .workspace = workspace, .steps = 7, .products = products}, {});
      EXPECT_LT(distance_from_orthogonal(values(x), size_t(s.rows), size_t(s.cols)),
                0.6 * std::sqrt(double(std::min(s.rows, s.cols))));
      EXPECT_TRUE(x.guards_intact());
    }
}
TEST(newton_schulz, singular_values_from_one_to_a_millionth_come_out_near_the_formula) {
  // On the square, small eigenvalues have an absolute error of some 2^-24 sqrt(terms), multiplied by a^2 per step: 2e-3
  // after four. This error enters the last polynomial times |b|. It is multiplied by singular values below 5e-2, which
  // are 3.4^4 times those whose squares the error hides: 5e-4 at most. Rounding in P, whose norm reaches 3.4^5, adds
  // 500 * 2^-24 sqrt(terms).
  for (const Bank& s : {Bank{1, 24, 96}, Bank{1, 160, 48}, Bank{1, 40, 50}}) {
    const bool tall = s.rows > s.cols;
    const size_t small = size_t(std::min(s.rows, s.cols)), large = size_t(std::max(s.rows, s.cols));
    Buffer left(DType::f64, {int64_t(small), int64_t(small)}), right(DType::f64, {int64_t(small), int64_t(large)});
    fill_normal(left, 7, 1 / std::sqrt(double(small)));
    fill_normal(right, 8, 1 / std::sqrt(double(large)));
    Matrix scaled = values(right);
    for (size_t i = 0; i < small; ++i)
      for (size_t j = 0; j < large; ++j) scaled[i * large + j] *= std::pow(10, -6 * double(i) / double(small - 1));
    Matrix start = multiply(values(left), scaled, small, small, large);
    if (tall) start = transposed(start, small, large);
    Buffer x(DType::f32, {s.rows, s.cols}),
        workspace(DType::u8, {muon_workspace_bytes(s.count, s.rows, s.cols, DType::f32, {})});
    assign(x, start);
    const Matrix want = orthogonal_factor(values(x), size_t(s.rows), size_t(s.cols), 5, 3.4445, -4.7750, 2.0315);
    newton_schulz({.x = x, .workspace = workspace}, {});
    const auto result = testing::compare(x, want, 1e-3, 0);
    EXPECT_TRUE(result.ok) << s.rows << "x" << s.cols << ": " << result.message;
  }
}
// A matrix of rank one, whose other singular values are zero: steps on the square multiply roundings in their
// directions by a^steps, 485 after five steps, and begin again with X itself. Twenty steps are four such parts; a
// part's error of 485 sums of 8 products each, half a unit a product, comes into the last one's result by a slope of at
// most 1.6.
TEST(newton_schulz, many_steps_on_a_long_matrix_of_low_rank_stay_near_the_formula) {
  constexpr int64_t kRows = 8, kCols = 33;
  for (const bool tall : {false, true}) {
    Buffer x(DType::f32, tall ? Shape{kCols, kRows} : Shape{kRows, kCols});
    Matrix given(size_t(kRows * kCols));
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t c = 0; c < kCols; ++c)
        given[size_t(tall ? c * kRows + r : r * kCols + c)] = std::sin(double(3 * r + 1));
    testing::assign(x, given);
    const Matrix want = orthogonal_factor(values(x), size_t(x.tensor().size(0)), size_t(x.tensor().size(1)), 20, 3.4445,
                                          -4.7750, 2.0315);
    Buffer workspace(DType::u8, {muon_workspace_bytes(1, x.tensor().size(0), x.tensor().size(1), DType::f32, {})});
    newton_schulz({.x = x, .workspace = workspace, .steps = 20}, {});
    const double part = 485 * 8 * testing::roundoff(DType::f32);
    const auto result = testing::compare(x, want, (1 + 1.6 + 1.6 * 1.6 + 1.6 * 1.6 * 1.6) * part, 0);
    EXPECT_TRUE(result.ok) << result.message;
  }
}
TEST(newton_schulz, converging_coefficients_reach_an_orthogonal_matrix) {
  for (const Bank& s : {Bank{1, 24, 48}, Bank{1, 48, 24}, Bank{1, 16, 16}}) {
    Buffer x(DType::f64, {s.rows, s.cols}),
        workspace(DType::u8, {muon_workspace_bytes(s.count, s.rows, s.cols, DType::f64, {})});
    fill_normal(x, 6);
    newton_schulz({.x = x, .workspace = workspace, .steps = 40, .a = 1.875, .b = -1.25, .c = 0.375}, {});
    EXPECT_LT(distance_from_orthogonal(values(x), size_t(s.rows), size_t(s.cols)), 1e-10);
  }
}

TEST(muon, errors_name_the_found_and_the_expected_value) {
  Buffer p(DType::f32, {2, 4, 6}), g(DType::f32, {2, 4, 5}), ok(DType::f32, {2, 4, 6}), small(DType::u8, {8});
  const auto message = [](const Muon& m) {
    try {
      muon(m, {});
    } catch (const Error& e) { return std::string(e.what()); }
    return std::string();
  };
  EXPECT_EQ(message({.p = p, .g = g, .momentum = ok, .workspace = small}),
            "muon: g: found (2, 4, 5), expected (2, 4, 6)");
  EXPECT_NE(
      message({.p = p, .g = ok, .momentum = ok, .workspace = small}).find("found 8 elements of u8, expected at least"),
      std::string::npos);
  Buffer enough(DType::u8, {muon_workspace_bytes(2, 4, 6, DType::f32, {})});
  EXPECT_EQ(message({.p = p, .g = ok, .momentum = ok, .workspace = enough, .rates = ok}),
            "muon: rates: found f32 of shape (2, 4, 6) on cpu, expected 3 of f64 on cpu");
  const Muon m{.p = p, .g = ok, .momentum = ok, .workspace = enough};
  EXPECT_EQ(testing::device_not_checked(m, {&Muon::p, &Muon::g, &Muon::momentum, &Muon::workspace}, muon), "");
}

}  // namespace
}  // namespace ingot
