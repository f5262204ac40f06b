#include "ingot/engines/export/gptq.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ingot/core/check.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/rng.h"
#include "ingot/engines/export/cholesky.h"

namespace ingot {
namespace {

// Inputs that resemble activations: neighbouring columns are correlated, and scales differ a hundredfold. Weights have
// the size of a trained model's weights.
struct Case {
  int64_t rows, cols;
  std::vector<float> weights;
  std::vector<double> hessian;
  GptqMatrix matrix() const { return {"blocks.3.mlp.up", rows, cols, weights, hessian}; }
};
Case correlated(int64_t rows, int64_t cols, uint64_t seed) {
  const Rng rng(seed, Purpose::test);
  Case c{rows, cols, std::vector<float>(size_t(rows * cols)), std::vector<double>(size_t(cols * cols))};
  uint64_t index = 0;
  for (float& w : c.weights) w = float(0.03 * rng.normal(index++));
  std::vector<double> x(static_cast<size_t>(cols));
  for (int64_t t = 0; t < 3 * cols; ++t) {
    double carried = rng.normal(index++);
    for (int64_t i = 0; i < cols; ++i) {
      carried = 0.9 * carried + 0.436 * rng.normal(index++);
      x[size_t(i)] = carried * std::pow(10.0, -2 * double(i * 7 % cols) / double(cols));
    }
    for (int64_t i = 0; i < cols; ++i)
      for (int64_t j = 0; j < cols; ++j) c.hessian[size_t(i * cols + j)] += x[size_t(i)] * x[size_t(j)];
  }
  return c;
}

using Matrix = std::vector<std::vector<double>>;

Matrix inverse(Matrix a) {  // by Gauss-Jordan elimination
  const size_t n = a.size();
  Matrix inv(n, std::vector<double>(n));
  for (size_t i = 0; i < n; ++i) inv[i][i] = 1;
  for (size_t p = 0; p < n; ++p) {
    const double pivot = a[p][p];
    for (size_t j = 0; j < n; ++j) a[p][j] /= pivot, inv[p][j] /= pivot;
    for (size_t i = 0; i < n; ++i) {
      if (i == p) continue;
      const double times = a[i][p];
      for (size_t j = 0; j < n; ++j) a[i][j] -= times * a[p][j], inv[i][j] -= times * inv[p][j];
    }
  }
  return inv;
}

Matrix upper_factor(const Matrix& a) {  // U with a = U^T U
  const size_t n = a.size();
  Matrix u(n, std::vector<double>(n));
  for (size_t i = 0; i < n; ++i)
    for (size_t j = i; j < n; ++j) {
      double sum = a[i][j];
      for (size_t k = 0; k < i; ++k) sum -= u[k][i] * u[k][j];
      u[i][j] = i == j ? std::sqrt(sum) : sum / u[i][i];
    }
  return u;
}

// The algorithm as published, with the inverse, its factor and an update of all later columns.
std::vector<int8_t> published(const Case& c, const GptqOptions& o, const std::vector<f16>& scales) {
  const size_t n = size_t(c.cols);
  Matrix h(n, std::vector<double>(n));
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < n; ++j) h[i][j] = c.hessian[i * n + j];
  double mean = 0;
  for (size_t i = 0; i < n; ++i) {
    if (h[i][i] == 0) h[i][i] = 1;
    mean += h[i][i] / double(n);
  }
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return h[a][a] > h[b][b]; });
  Matrix permuted(n, std::vector<double>(n));
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < n; ++j) permuted[i][j] = h[order[i]][order[j]] + (i == j ? o.damping * mean : 0);
  const Matrix u = upper_factor(inverse(permuted));
  std::vector<int8_t> q(c.weights.size());
  const double qmax = double((1 << (o.bits - 1)) - 1);
  for (size_t r = 0; r < size_t(c.rows); ++r) {
    std::vector<double> w(n);
    for (size_t k = 0; k < n; ++k) w[k] = c.weights[r * n + order[k]];
    const double scale = float(scales[r]);
    for (size_t k = 0; k < n; ++k) {
      const double rounded = std::clamp(std::nearbyint(w[k] / scale), -qmax, qmax);
      q[r * n + order[k]] = int8_t(rounded);
      const double error = (w[k] - rounded * scale) / u[k][k];
      for (size_t j = k + 1; j < n; ++j) w[j] -= error * u[k][j];
    }
  }
  return q;
}

std::string message_of(const Case& c, const GptqOptions& o, ErrorCode code) {
  try {
    quantize_gptq(c.matrix(), o);
  } catch (const Error& e) {
    EXPECT_EQ(e.code, code);
    return e.what();
  }
  return "no error";
}

TEST(Cholesky, FactorTimesItsTransposeIsTheMatrix) {
  for (const int64_t n : {1, 7, 64, 65, 200}) {
    const Case c = correlated(1, n, 5);
    std::vector<double> l = c.hessian;
    ASSERT_EQ(cholesky(l.data(), n), n);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        double sum = 0;
        for (int64_t k = 0; k <= j; ++k) sum += l[size_t(i * n + k)] * l[size_t(j * n + k)];
        // Higham, Accuracy and Stability, theorem 10.3: |A - L L^T| <= (n + 1) u |L| |L|^T <= (n + 1) u sqrt(a_ii
        // a_jj), doubled for this sum.
        const double bound =
            2 * double(n + 2) * 0x1p-53 * std::sqrt(c.hessian[size_t(i * n + i)] * c.hessian[size_t(j * n + j)]);
        EXPECT_NEAR(sum, c.hessian[size_t(i * n + j)], bound) << n << ": " << i << ", " << j;
      }
  }
}

TEST(Cholesky, NamesTheRowOfABadPivot) {
  std::vector<double> a = {4, 0, 0, 2, 1, 0, 0, 0, 1};
  EXPECT_EQ(cholesky(a.data(), 3), 1);
  a = {4, 0, 0, 2, 5, 0, 0, 0, std::numeric_limits<double>::quiet_NaN()};
  EXPECT_EQ(cholesky(a.data(), 3), 2);
}

TEST(Gptq, IsThePublishedAlgorithm) {
  for (const int bits : {4, 5, 6, 7, 8}) {
    const Case c = correlated(19, 70, uint64_t(bits));
    // Few sigmas clip some weights; large errors of clipped weights are passed on like small errors.
    for (const double sigmas : {2.0, 12.85}) {
      const GptqOptions o{.bits = bits, .clip_sigmas = sigmas};
      const QuantizedMatrix q = quantize_gptq(c.matrix(), o);
      EXPECT_EQ(q.values, published(c, o, q.scales)) << bits << " bits, " << sigmas;
    }
  }
}

TEST(Gptq, ScaleIsClipSigmasOfTheRow) {
  Case c = correlated(2, 4, 1);
  c.weights = {1, 2, 3, 4, 0.5f, 0.5f, 0.5f, 0.5f};
  const QuantizedMatrix q = quantize_to_nearest(c.matrix(), {.bits = 6, .clip_sigmas = 10});
  EXPECT_EQ(q.scales[0].bits, f16(float(10 * std::sqrt(5.0 / 3) / 31)).bits);
  EXPECT_EQ(q.values[4], 31);  // a row without deviation
  EXPECT_NEAR(dequantize(q)[4], 0.5, 0.5 * 0x1p-11);
}

TEST(Gptq, BeatsRoundingWhereTheErrorMatters) {
  const Case c = correlated(64, 192, 9);
  for (const int bits : {4, 6, 8}) {
    const GptqOptions o{.bits = bits};
    const double gptq = weighted_error(c.matrix(), quantize_gptq(c.matrix(), o));
    const double nearest = weighted_error(c.matrix(), quantize_to_nearest(c.matrix(), o));
    EXPECT_LT(gptq, 0.7 * nearest) << bits << " bits";
    EXPECT_GT(gptq, 0);
  }
}

TEST(Gptq, DoesNotDependOnThreads) {
  const Case c = correlated(50, 150, 3);
  const int threads = thread_count();
  set_thread_count(1);
  const QuantizedMatrix one = quantize_gptq(c.matrix(), {});
  set_thread_count(3);
  const QuantizedMatrix three = quantize_gptq(c.matrix(), {});
  set_thread_count(threads);
  EXPECT_EQ(one.values, three.values);
}

TEST(Gptq, AColumnNeverSeenIsRoundedAlone) {
  Case c = correlated(8, 40, 4);
  for (int64_t i = 0; i < 40; ++i) c.hessian[size_t(17 * 40 + i)] = c.hessian[size_t(i * 40 + 17)] = 0;
  const QuantizedMatrix q = quantize_gptq(c.matrix(), {}), alone = quantize_to_nearest(c.matrix(), {});
  for (int64_t r = 0; r < 8; ++r) EXPECT_EQ(q.values[size_t(r * 40 + 17)], alone.values[size_t(r * 40 + 17)]);
  EXPECT_EQ(q.values, published(c, {}, q.scales));
}

TEST(Gptq, RowsAndColumnsMayBeNone) {
  EXPECT_TRUE(quantize_gptq(correlated(0, 5, 1).matrix(), {}).values.empty());
  const Case zeros{2, 3, std::vector<float>(6), std::vector<double>(9)};
  EXPECT_EQ(quantize_gptq(zeros.matrix(), {}).values, std::vector<int8_t>(6));
}

TEST(Gptq, BadInputIsNamed) {
  const Case good = correlated(3, 6, 2);
  EXPECT_EQ(message_of(good, {.bits = 3}, ErrorCode::usage),
            "export: blocks.3.mlp.up: found int3, expected int4 to int8");
  Case c = good;
  c.weights[7] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(message_of(c, {}, ErrorCode::numeric),
            "export: blocks.3.mlp.up: found nan in row 1, expected finite weights");
  c = good;
  c.hessian[14] = std::numeric_limits<double>::infinity();
  EXPECT_EQ(message_of(c, {}, ErrorCode::numeric),
            "export: blocks.3.mlp.up: its Hessian holds inf, expected finite numbers");
  c = good;
  std::fill(c.hessian.begin(), c.hessian.end(), 1.0);
  EXPECT_NE(message_of(c, {.damping = 0}, ErrorCode::numeric).find("its Hessian is singular at column"),
            std::string::npos);
  c = good;
  c.weights[0] = 1e7f;
  EXPECT_NE(message_of(c, {}, ErrorCode::numeric).find("the scale of row 0 is beyond fp16's range"), std::string::npos);
  QuantizedMatrix other = quantize_to_nearest(correlated(2, 6, 2).matrix(), {});
  EXPECT_THROW(weighted_error(good.matrix(), other), Error);
  other.scales.pop_back();
  EXPECT_THROW(dequantize(other), Error);
}

}  // namespace
}  // namespace ingot
