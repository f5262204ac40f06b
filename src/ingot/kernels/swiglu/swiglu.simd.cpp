#include "ingot/kernels/swiglu/swiglu.simd.h"

#include "ingot/core/cpu/simd.h"

namespace ingot::INGOT_SIMD {
namespace {

using V = Vec<float>;

struct Parts {
  V gate, up;        // after the clamp, up with its offset
  V grown;           // gate times the slope of z
  V sigmoid, slope;  // of z = alpha gate + cubic gate^3; slope = sigmoid (1 - sigmoid), accurate in both tails
};

INGOT_SIMD_INLINE Parts parts(V gate, V up, const detail::GateConstants& k) {
  const V limit = splat(k.limit);
  Parts p;
  // Comparisons with a NaN are false, so a NaN is kept.
  p.gate = gate > limit ? limit : gate;
  p.up = (up > limit ? limit : up < -limit ? -limit : up) + k.up_offset;
  // An infinite gate must not meet cubic = 0.
  const V z = k.cubic == 0 ? p.gate * k.alpha : p.gate * (p.gate * p.gate * k.cubic + k.alpha);
  p.grown = k.cubic == 0 ? z : p.gate * (p.gate * p.gate * (3 * k.cubic) + k.alpha);
  const V e = exp(z < V{} ? z : -z);
  const V inverse = 1.f / (1.f + e);
  p.sigmoid = (z < V{} ? e : splat(1.f)) * inverse;
  p.slope = e * inverse * inverse;
  return p;
}

INGOT_SIMD_INLINE V forward(V gate, V up, const detail::GateConstants& k) {
  const Parts p = parts(gate, up, k);
  return product_or_zero(p.gate, p.sigmoid) * p.up;
}
INGOT_SIMD_INLINE void backward(V gate, V up, V dh, const detail::GateConstants& k, V* dgate, V* dup) {
  const Parts p = parts(gate, up, k);
  const V limit = splat(k.limit);
  const V dg = dh * p.up * (p.sigmoid + product_or_zero(p.grown, p.slope));
  const V du = dh * product_or_zero(p.gate, p.sigmoid);
  *dgate = gate > limit ? V{} : dg;
  *dup = up > limit ? V{} : up < -limit ? V{} : du;
}

}  // namespace

void swiglu_gate_span(int64_t n, const float* gate, const float* up, float* h, const detail::GateConstants& k) {
  int64_t i = 0;
  for (; i + kLanes<float> <= n; i += kLanes<float>) store(h + i, forward(load(gate + i), load(up + i), k));
  if (i < n) store_tail(h + i, forward(load_tail(gate + i, n - i), load_tail(up + i, n - i), k), n - i);
}

void swiglu_gate_backward_span(int64_t n, const float* gate, const float* up, const float* dh, float* dgate, float* dup,
                               const detail::GateConstants& k) {
  V dg, du;
  int64_t i = 0;
  for (; i + kLanes<float> <= n; i += kLanes<float>) {
    backward(load(gate + i), load(up + i), load(dh + i), k, &dg, &du);
    store(dgate + i, dg);
    store(dup + i, du);
  }
  if (i < n) {
    backward(load_tail(gate + i, n - i), load_tail(up + i, n - i), load_tail(dh + i, n - i), k, &dg, &du);
    store_tail(dgate + i, dg, n - i);
    store_tail(dup + i, du, n - i);
  }
}

}  // namespace ingot::INGOT_SIMD
