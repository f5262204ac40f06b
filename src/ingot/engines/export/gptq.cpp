#include "ingot/engines/export/gptq.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ingot/core/check.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/engines/export/cholesky.h"

namespace ingot {
namespace {

int qmax_of(int bits) { return (1 << (bits - 1)) - 1; }

int8_t nearest(double w, double scale, int qmax) {
  return scale > 0 ? int8_t(std::clamp(std::nearbyint(w / scale), -double(qmax), double(qmax))) : int8_t(0);
}

void check_matrix(const GptqMatrix& m) {
  INGOT_CHECK_EQ(int64_t(m.weights.size()), m.rows * m.cols, "export: ", m.name, ": weights");
  INGOT_CHECK_EQ(int64_t(m.hessian.size()), m.cols * m.cols, "export: ", m.name, ": hessian");
  for (size_t i = 0; i < m.weights.size(); ++i)
    if (!std::isfinite(m.weights[i]))
      fail(ErrorCode::numeric, "export: ", m.name, ": found ", m.weights[i], " in row ", i / size_t(m.cols),
           ", expected finite weights");
}

// The standard deviation of a row of equal weights is 0. The scale is then chosen so that qmax stands for this weight.
f16 scale_of(std::span<const float> row, const GptqOptions& o) {
  double sum = 0, squares = 0, largest = 0;
  for (const float w : row) sum += w, largest = std::max(largest, std::abs(double(w)));
  const double mean = sum / double(row.size());
  for (const float w : row) squares += (w - mean) * (w - mean);
  const double deviation = row.size() > 1 ? std::sqrt(squares / double(row.size() - 1)) : 0;
  return f16(float((deviation > 0 ? o.clip_sigmas * deviation : largest) / qmax_of(o.bits)));
}

QuantizedMatrix scaled(const GptqMatrix& m, const GptqOptions& o) {
  QuantizedMatrix out{.rows = m.rows, .cols = m.cols, .bits = o.bits};
  out.values.resize(m.weights.size());
  for (int64_t r = 0; r < m.rows; ++r) {
    out.scales.push_back(scale_of(m.weights.subspan(size_t(r * m.cols), size_t(m.cols)), o));
    if (!std::isfinite(float(out.scales.back())))
      fail(ErrorCode::numeric, "export: ", m.name, ": the scale of row ", r,
           " is beyond fp16's range, expected at most 65504");
  }
  return out;
}

// The order of the columns, and the correction of each. With H = R R^T in this order, R upper triangular, the error is
// |e R|^2 for e = w - s q. Column k compensates the errors of the earlier columns if it rounds w_k + sum over j < k of
// e_j R_jk / R_kk. This is GPTQ's update by the factor R^-1 of H's inverse, without the inverse and without GPTQ's
// blocks of columns.
struct Feedback {
  std::vector<int64_t> order;
  std::vector<double> owed;  // [n, n], row k: R_jk / R_kk for j < k
};

Feedback feedback_of(const GptqMatrix& m, double damping) {
  const int64_t n = m.cols;
  std::vector<double> diagonal(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    diagonal[size_t(i)] = m.hessian[size_t(i * n + i)];
    if (diagonal[size_t(i)] == 0) diagonal[size_t(i)] = 1;
  }
  const double added = damping * std::accumulate(diagonal.begin(), diagonal.end(), 0.0) / double(n);
  Feedback f;
  f.order.resize(static_cast<size_t>(n));
  std::iota(f.order.begin(), f.order.end(), int64_t(0));
  for (const double d : diagonal)
    if (!std::isfinite(d))
      fail(ErrorCode::numeric, "export: ", m.name, ": its Hessian holds ", d, ", expected finite numbers");
  std::stable_sort(f.order.begin(), f.order.end(),
                   [&](int64_t a, int64_t b) { return diagonal[size_t(a)] > diagonal[size_t(b)]; });

  // The last column first: L of the reversed matrix, reversed again, is R.
  std::vector<double> l(size_t(n * n));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t a = f.order[size_t(n - 1 - i)];
    for (int64_t j = 0; j < i; ++j) {
      const int64_t b = f.order[size_t(n - 1 - j)];
      l[size_t(i * n + j)] = m.hessian[size_t(std::max(a, b) * n + std::min(a, b))];
    }
    l[size_t(i * n + i)] = diagonal[size_t(a)] + added;
  }
  const int64_t done = cholesky(l.data(), n);
  if (done < n)
    fail(ErrorCode::numeric, "export: ", m.name, ": its Hessian is singular at column ", f.order[size_t(n - 1 - done)],
         " with damping ", damping, ", expected more calibration text or more damping");
  f.owed.resize(size_t(n * n));
  for (int64_t k = 0; k < n; ++k)
    for (int64_t j = 0; j < k; ++j)
      f.owed[size_t(k * n + j)] = l[size_t((n - 1 - j) * n + n - 1 - k)] / l[size_t((n - 1 - k) * (n + 1))];
  return f;
}

// Rows are independent. This many rows share each pass over `owed`, one vector lane per row.
constexpr int64_t kLanes = 16;
void quantize_rows(const GptqMatrix& m, const Feedback& f, int64_t first, int64_t last, QuantizedMatrix& out) {
  const int64_t n = m.cols;
  std::vector<double> errors(size_t(n * kLanes));
  for (int64_t k = 0; k < n; ++k) {
    double sums[kLanes] = {};
    const double* owed = &f.owed[size_t(k * n)];
    for (int64_t j = 0; j < k; ++j)
      for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += owed[j] * errors[size_t(j * kLanes + lane)];
    for (int64_t r = first; r < last; ++r) {
      const size_t at = size_t(r * n + f.order[size_t(k)]);
      const double w = m.weights[at], scale = float(out.scales[size_t(r)]);
      out.values[at] = nearest(w + sums[r - first], scale, qmax_of(out.bits));
      errors[size_t(k * kLanes + r - first)] = w - scale * out.values[at];
    }
  }
}

}  // namespace

void check(const GptqOptions& o, const std::string& name) {
  if (o.bits < 4 || o.bits > 8)
    fail(ErrorCode::usage, "export: ", name, ": found int", o.bits, ", expected int4 to int8");
  if (!(o.clip_sigmas > 0) || !std::isfinite(o.clip_sigmas))
    fail(ErrorCode::usage, "export: ", name, ": found clip sigmas ", o.clip_sigmas, ", expected a number above 0");
  if (!(o.damping >= 0) || !std::isfinite(o.damping))
    fail(ErrorCode::usage, "export: ", name, ": found damping ", o.damping, ", expected a number from 0");
}

QuantizedMatrix quantize_gptq(const GptqMatrix& m, const GptqOptions& o) {
  check(o, m.name);
  check_matrix(m);
  QuantizedMatrix out = scaled(m, o);
  if (m.rows == 0 || m.cols == 0) return out;
  const Feedback f = feedback_of(m, o.damping);
  parallel_for(m.rows, kLanes, [&](int64_t first, int64_t last) { quantize_rows(m, f, first, last, out); });
  return out;
}

QuantizedMatrix quantize_to_nearest(const GptqMatrix& m, const GptqOptions& o) {
  check(o, m.name);
  check_matrix(m);
  QuantizedMatrix out = scaled(m, o);
  for (size_t i = 0; i < out.values.size(); ++i)
    out.values[i] = nearest(m.weights[i], float(out.scales[i / size_t(m.cols)]), qmax_of(o.bits));
  return out;
}

std::vector<float> dequantize(const QuantizedMatrix& q) {
  INGOT_CHECK(int64_t(q.values.size()) == q.rows * q.cols && int64_t(q.scales.size()) == q.rows, "export: found ",
              q.values.size(), " integers and ", q.scales.size(), " scales, expected those of ", q.rows, " x ", q.cols);
  std::vector<float> w(q.values.size());
  for (size_t i = 0; i < w.size(); ++i) w[i] = float(q.values[i]) * float(q.scales[i / size_t(q.cols)]);
  return w;
}

double weighted_error(const GptqMatrix& m, const QuantizedMatrix& q) {
  check_matrix(m);
  INGOT_CHECK(q.rows == m.rows && q.cols == m.cols, "export: ", m.name, ": found ", q.rows, " x ", q.cols,
              " integers, expected ", m.rows, " x ", m.cols);
  const std::vector<float> back = dequantize(q);
  const auto error = [&](int64_t r, int64_t c) {
    return double(m.weights[size_t(r * m.cols + c)]) - back[size_t(r * m.cols + c)];
  };
  double sum = 0;
  for (int64_t r = 0; r < m.rows; ++r)
    for (int64_t i = 0; i < m.cols; ++i) {
      double product = 0;
      for (int64_t j = 0; j < m.cols; ++j)
        product += m.hessian[size_t(std::max(i, j) * m.cols + std::min(i, j))] * error(r, j);
      sum += product * error(r, i);
    }
  return sum;
}

}  // namespace ingot
