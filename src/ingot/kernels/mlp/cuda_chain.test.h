#pragma once
// The references of the CUDA suite of MLPs: a loop in fp64, the chain of correctly rounded operations whose error is
// the measure, and the comparison.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>

#include "ingot/kernels/mlp/cuda_cases.test.h"

namespace ingot::mlp_cuda_test {

inline void round_to(DType dtype, Vector& v) {
  const auto round = [&](auto type) {
    using T = decltype(type);
    for (double& x : v) x = double(float(T(float(x))));
  };
  if (dtype == DType::f32) round(float());
  if (dtype == DType::bf16) round(bf16());
  if (dtype == DType::f16) round(f16());
}

// (m, k) times (k, n) on the GPU, summed in fp64 or like a plain fp32 product; operands may be stored transposed.
constexpr size_t kProductRestart = 128;  // terms of a plain fp32 product that are added before the sum starts again
Vector product_on_gpu(const Vector& a, bool transpose_a, const Vector& q, bool transpose_q, size_t m, size_t k,
                      size_t n, bool as_fp32);

// A sum of products of two vectors, by the same rules on the CPU. A weight norm needs one for each row of a weight:
// thousands of launches for a single case, each of which waits for the GPU's other processes.
inline double dot(const double* a, const double* q, size_t k, bool as_fp32) {
  double sum = 0;
  if (!as_fp32) {
    for (size_t p = 0; p < k; ++p) sum = std::fma(a[p], q[p], sum);
    return sum;
  }
  float all = 0, run = 0;
  for (size_t p = 0; p < k; ++p) {
    run = float(double(float(a[p])) * double(float(q[p])) + double(run));
    if ((p + 1) % kProductRestart != 0 && p + 1 < k) continue;
    all += run, run = 0;
  }
  return double(all);
}

// Small loops over fp64 vectors with a rounding after each operation: f64 gives the reference, the narrower types the
// chain.
struct Chain {
  const Problem& p;
  DType round;
  std::vector<Vector> w, b, g, r, z, h, dw, db, dg;
  Vector y, dx, saved;

  Chain(const Problem& problem, DType t) : p(problem), round(t) {
    forward();
    backward();
  }
  size_t width(size_t l) const { return size_t(p.c.widths[l]); }
  size_t rows() const { return size_t(p.c.rows); }
  bool active(size_t l) const { return p.c.activate_last || l + 1 < p.c.depth(); }
  bool keeps_value() const { return slope_follows_from_value(p.c.act); }

  Vector product(const Vector& a, size_t m, size_t k, bool ta, const Vector& q, size_t n, bool tb) const {
    return product_on_gpu(a, ta, q, tb, m, k, n, round == DType::f32);
  }
  void form_weight(size_t l) {
    w.push_back(values(p.w[l].host()));
    b.push_back(p.c.bias ? values(p.b[l].host()) : Vector(width(l + 1), 0.0));
    g.push_back(values(p.g[l].host()));
    r.emplace_back();
    if (!p.c.weight_norm) return;
    const size_t k = width(l);
    for (size_t n = 0; n < width(l + 1); ++n) {
      double sum = 1e-12;
      for (size_t j = 0; j < k; ++j) sum += w[l][n * k + j] * w[l][n * k + j];
      r[l].push_back(1 / std::sqrt(sum));
      for (size_t j = 0; j < k; ++j) w[l][n * k + j] *= g[l][n] * r[l][n];
    }
    round_to(round, w[l]);
  }
  Vector apply(const Vector& v, bool slope, bool from_value) const {
    Vector out(v.size());
    with_activation(p.c.act, [&](auto f) {
      using F = decltype(f);
      for (size_t i = 0; i < v.size(); ++i) {
        if constexpr (has_slope_from_value<F>) {
          if (slope && from_value) {
            out[i] = F::slope_from_value(v[i]);
            continue;
          }
        }
        out[i] = slope ? F::slope(v[i]) : F::value(v[i]);
      }
    });
    return out;
  }
  void forward() {
    Vector in = values(p.x.host());
    for (size_t l = 0; l < p.c.depth(); ++l) {
      form_weight(l);
      if (l == 0) h.push_back(in);
      Vector sum = product(in, rows(), width(l), false, w[l], width(l + 1), true);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += b[l][i % width(l + 1)];
      in = active(l) ? apply(sum, false, false) : sum;
      round_to(round, in);
      round_to(round, sum);
      if (active(l)) {
        const Vector& kept = keeps_value() ? in : sum;
        saved.insert(saved.end(), kept.begin(), kept.end());
      }
      z.push_back(keeps_value() ? in : sum);
      // The input of the next layer's dW, computed from the kept values.
      Vector input = active(l) && !keeps_value() ? apply(sum, false, false) : in;
      round_to(round, input);
      h.push_back(input);
    }
    y = in;
  }
  void times_slope(Vector& d, size_t l) const {
    const Vector slope = apply(z[l], true, keeps_value());
    for (size_t i = 0; i < d.size(); ++i) d[i] *= slope[i];
  }
  void backward() {
    const size_t depth = p.c.depth();
    dw.resize(depth), db.resize(depth), dg.resize(depth);
    Vector d = values(p.dy.host());
    if (p.c.activate_last) {
      times_slope(d, depth - 1);
      round_to(round, d);
    }
    for (size_t l = depth; l-- > 0;) {
      const size_t n = width(l + 1), k = width(l);
      dw[l] = product(d, n, rows(), true, h[l], k, false);
      db[l] = product(Vector(rows(), 1.0), 1, rows(), false, d, n, false);
      if (p.c.weight_norm) weight_norm_backward(l, n, k);
      d = product(d, rows(), n, false, w[l], k, false);
      if (l > 0) times_slope(d, l - 1);
      round_to(round, d);
    }
    dx = d;
  }
  void weight_norm_backward(size_t l, size_t n, size_t k) {
    const Vector v = values(p.w[l].host());
    dg[l].assign(n, 0.0);
    Vector u(k);
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < k; ++j) u[j] = v[i * k + j] * r[l][i];
      dg[l][i] = dot(&dw[l][i * k], u.data(), k, round == DType::f32);
      for (size_t j = 0; j < k; ++j)
        dw[l][i * k + j] = g[l][i] * r[l][i] * (dw[l][i * k + j] - v[i * k + j] * r[l][i] * dg[l][i]);
    }
  }
};

struct Errors {
  double rms = 0, worst = 0, size = 0;
  size_t at = 0;
};
inline Errors errors(const Vector& got, const Vector& want) {
  Errors e;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = std::abs(got[i] - want[i]);
    e.rms += d * d;
    e.size += want[i] * want[i];
    if (!(d <= e.worst)) e.worst = d, e.at = i;  // also catches NaN
  }
  const double n = double(std::max<size_t>(want.size(), 1));
  e.rms = std::sqrt(e.rms / n), e.size = std::sqrt(e.size / n);
  return e;
}
// At most 1.5 times the chain's error, and no single value further off than twice the chain's furthest value. A root
// mean square over few values is uncertain, so small results get more room: up to a rounding of a value of usual size.
// The furthest of a few rows' values is uncertain too: a dW of a single row is a vector's errors times another vector,
// and the worst of a hundred sums' errors is 3 to 6 times their root mean square (fp32, 64 products, 200 seeds).
// independent: the number of independent errors in the result.
inline void expect_as_good_as(const char* what, const Vector& got, const Vector& want, const Vector& chain,
                              int64_t rows, double unit, size_t independent = SIZE_MAX) {
  ASSERT_EQ(got.size(), want.size()) << what;
  const Errors ours = errors(got, want), theirs = errors(chain, want);
  const bool few = std::min(want.size(), independent) < 1024;
  const double floor = unit * ours.size;
  const double rms = few ? 2 * theirs.rms + floor : 1.5 * theirs.rms + 0.1 * floor;
  const double worst = few || rows < 16 ? 3 * theirs.worst + 2 * floor : 2 * theirs.worst + floor;
  EXPECT_TRUE(ours.rms <= rms && ours.worst <= worst)
      << what << ": error rms " << ours.rms << " (chain " << theirs.rms << ", allowed " << rms << "), worst "
      << ours.worst << " (chain " << theirs.worst << ", allowed " << worst << ") at " << ours.at << ": found "
      << got[ours.at] << ", expected " << want[ours.at] << ", values' rms " << ours.size;
}
inline Vector difference(Vector a, const Vector& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

inline void compare_all(const Problem& p, const Chain& want, const Chain& chain,
                        const std::map<std::string, Vector>& before) {
  const double unit = testing::roundoff(p.dtype);
  expect_as_good_as("y", values(p.y.host()), want.y, chain.y, p.c.rows, unit);
  if (p.c.keep != Keep::nothing)
    expect_as_good_as("saved", values(p.saved.host()), want.saved, chain.saved, p.c.rows, unit);
  if (p.need_dx) expect_as_good_as("dx", values(p.dx.host()), want.dx, chain.dx, p.c.rows, unit);
  for (size_t l = 0; l < p.c.depth(); ++l) {
    if (p.frozen[l]) continue;
    const auto gradient = [&](const char* name, const DeviceBuffer& got, const Vector& exact, const Vector& rounded) {
      const std::string what = name + std::to_string(l);
      expect_as_good_as(what.c_str(), difference(values(got.host()), before.at(what)), exact, rounded, p.c.rows,
                        p.dtype == DType::f32 ? 4 * unit : unit,        // f32: the accumulator rounds as well
                        size_t(p.c.rows) * size_t(p.c.widths[l + 1]));  // the errors of dz
    };
    gradient("dw", p.dw[l], want.dw[l], chain.dw[l]);
    if (p.c.bias) gradient("db", p.db[l], want.db[l], chain.db[l]);
    if (p.c.weight_norm) gradient("dg", p.dg[l], want.dg[l], chain.dg[l]);
  }
}
inline void expect_only_outputs_written(Problem& p) {
  EXPECT_TRUE(p.x.untouched(true) && p.dy.untouched(true)) << "an input was written";
  for (size_t l = 0; l < p.c.depth(); ++l) {
    EXPECT_TRUE(p.w[l].untouched(true) && p.b[l].untouched(true) && p.g[l].untouched(true))
        << "a parameter was written";
    EXPECT_TRUE(p.dw[l].untouched(p.frozen[l]) && p.db[l].untouched(p.frozen[l] || !p.c.bias) &&
                p.dg[l].untouched(p.frozen[l] || !p.c.weight_norm))
        << "written beside a gradient of layer " << l;
  }
  EXPECT_TRUE(p.y.untouched() && p.dx.untouched(!p.need_dx)) << "written beside an output";
  EXPECT_TRUE(p.saved.untouched(p.c.keep == Keep::nothing) && p.ahead.untouched() && p.workspace.untouched())
      << "written beside a buffer";
}

}  // namespace ingot::mlp_cuda_test
