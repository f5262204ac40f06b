#pragma once
// Shared by the tests of gated_linear on a CPU and on a GPU: a case, and its results in fp64 by plain loops.
#include <cmath>
#include <ostream>
#include <vector>

#include "ingot/kernels/swiglu/swiglu.h"
#include "ingot/testing/testing.h"

namespace ingot::testing {

struct GatedCase {
  int64_t rows, channels, hidden;
  DType type = DType::f64, sums = DType::f64;
  GateOptions options = {};
  bool bias = false, keeps = true, transposed = false, overwrite = false;
  enum Weights { apart, packed, even_and_odd_rows } weights = apart;
  bool in_place = false;  // dgate and dup overwrite gate and up, halves of a single tensor
  bool up_first = false;  // where gate and up, weights or biases are halves
};

// The shape of a tensor with both weights (or their gradients), and the part of the gate (0) or of up (1).
inline Shape gated_weights_shape(const GatedCase& c) {
  const int64_t gap = c.weights == GatedCase::apart ? 8 : 0;
  return c.transposed ? Shape{c.channels, 2 * c.hidden + gap} : Shape{2 * c.hidden + gap, c.channels};
}
inline Tensor gated_weights_half(const GatedCase& c, const Tensor& all, int which) {
  const int axis = c.transposed ? 1 : 0;
  if (c.up_first) which = 1 - which;
  if (c.transposed || c.weights != GatedCase::even_and_odd_rows)
    return which == 0 ? all.slice(axis, 0, c.hidden) : all.slice(axis, all.size(axis) - c.hidden, all.size(axis));
  Tensor t(static_cast<char*>(all.data) + which * c.channels * size_of(all.dtype), all.dtype, {c.hidden, c.channels},
           all.device);
  t.stride[0] = 2 * c.channels;
  return t;
}
// The gate's or up's half of (T, 2H) or of (2H).
inline Tensor gated_half(const GatedCase& c, const Tensor& both, int which) {
  if (c.up_first) which = 1 - which;
  return both.slice(both.rank() - 1, which * c.hidden, (which + 1) * c.hidden);
}
inline std::ostream& operator<<(std::ostream& o, const GatedCase& c) {
  return o << c.rows << " x " << c.channels << " x " << c.hidden << ' ' << c.type << " sums " << c.sums << " limit "
           << c.options.limit << " cubic " << c.options.cubic << (c.bias ? " bias" : "") << (c.keeps ? " keeps" : "")
           << (c.transposed ? " transposed" : "") << (c.overwrite ? " overwrite" : "") << " weights " << int(c.weights)
           << (c.in_place ? " in place" : "") << (c.up_first ? " up first" : "");
}
inline std::vector<GateOptions> gate_kinds() { return {{}, {.limit = 3, .alpha = 1.702, .up_offset = 1}, gelu_gate()}; }

// For all rows: the sums, and the sums of absolute values, which scale the rounding error.
struct GatedTruth {
  std::vector<double> gate, up, size_gate, size_up, h, dgate, dup, dx, size_dx, dw_gate, dw_up, size_dw_gate,
      size_dw_up, db_gate, db_up;
};
// x (T, C), weights (H, C), biases (H) or empty, dh (T, H). `through`: rounds gate and up as stored.
struct GatedInputs {
  std::vector<double> x, w_gate, w_up, b_gate, b_up, dh;
};

inline std::vector<double> plain_product(const std::vector<double>& a, const std::vector<double>& b, int64_t m,
                                         int64_t n, int64_t k, bool transpose_a, bool transpose_b, bool absolute) {
  const Buffer x(DType::f64, transpose_a ? Shape{k, m} : Shape{m, k}),
      y(DType::f64, transpose_b ? Shape{n, k} : Shape{k, n}), z(DType::f64, {m, n});
  const auto fill = [&](const Tensor& t, std::vector<double> v) {
    if (absolute)
      for (double& e : v) e = std::fabs(e);
    assign(t, v);
  };
  fill(x, a), fill(y, b);
  matmul({.a = x, .b = y, .c = z, .transpose_a = transpose_a, .transpose_b = transpose_b}, {});
  return values(z);
}

inline GatedTruth gated_truth(const GatedCase& c, const GatedInputs& in) {
  const int64_t T = c.rows, C = c.channels, H = c.hidden;
  GatedTruth t;
  const auto projection = [&](const std::vector<double>& w, const std::vector<double>& b, std::vector<double>& sum,
                              std::vector<double>& size) {
    sum = plain_product(in.x, w, T, H, C, false, true, false);
    size = plain_product(in.x, w, T, H, C, false, true, true);
    for (size_t i = 0; i < sum.size() && !b.empty(); ++i)
      sum[i] += b[i % size_t(H)], size[i] += std::fabs(b[i % size_t(H)]);
  };
  projection(in.w_gate, in.b_gate, t.gate, t.size_gate);
  projection(in.w_up, in.b_up, t.up, t.size_up);
  const GateOptions& o = c.options;
  const double limit = o.limit > 0 ? o.limit : HUGE_VAL;
  const size_t n = t.gate.size();
  t.h.resize(n), t.dgate.resize(n), t.dup.resize(n);
  for (size_t i = 0; i < n; ++i) {
    const double g = std::min(t.gate[i], limit), u = std::min(std::max(t.up[i], -limit), limit) + o.up_offset;
    const double s = 1 / (1 + std::exp(-(o.alpha * g + o.cubic * g * g * g)));
    t.h[i] = g * s * u;
    t.dgate[i] = t.gate[i] > limit ? 0 : in.dh[i] * u * (s + g * (o.alpha + 3 * o.cubic * g * g) * s * (1 - s));
    t.dup[i] = std::fabs(t.up[i]) > limit ? 0 : in.dh[i] * g * s;
  }
  const auto both = [&](bool absolute) {
    std::vector<double> sum = plain_product(t.dgate, in.w_gate, T, C, H, false, false, absolute);
    const std::vector<double> other = plain_product(t.dup, in.w_up, T, C, H, false, false, absolute);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
    return sum;
  };
  t.dx = both(false), t.size_dx = both(true);
  t.dw_gate = plain_product(t.dgate, in.x, H, C, T, true, false, false);
  t.dw_up = plain_product(t.dup, in.x, H, C, T, true, false, false);
  t.size_dw_gate = plain_product(t.dgate, in.x, H, C, T, true, false, true);
  t.size_dw_up = plain_product(t.dup, in.x, H, C, T, true, false, true);
  t.db_gate.resize(size_t(H)), t.db_up.resize(size_t(H));
  for (size_t i = 0; i < n; ++i) t.db_gate[i % size_t(H)] += t.dgate[i], t.db_up[i % size_t(H)] += t.dup[i];
  return t;
}

}  // namespace ingot::testing
