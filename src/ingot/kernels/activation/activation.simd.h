#pragma once
// Vector forms of the activations, for *.simd.cpp files: the formulas of activation.h on Vec<float>, with the same
// limits at infinity and the same treatment of NaN.
#include "ingot/core/cpu/simd.h"
#include "ingot/kernels/activation/vector_act.h"

#define INGOT_VECTOR_FORM static inline __attribute__((always_inline)) Vec<float>

namespace ingot::INGOT_SIMD {

template <VectorAct act> struct VectorForm;

template <> struct VectorForm<VectorAct::identity> {
  INGOT_VECTOR_FORM value(Vec<float> x) { return x; }
  INGOT_VECTOR_FORM slope(Vec<float>) { return splat(1.f); }
};
template <> struct VectorForm<VectorAct::relu> {
  INGOT_VECTOR_FORM value(Vec<float> x) { return x <= 0.f ? Vec<float>{} : x; }
  INGOT_VECTOR_FORM slope(Vec<float> x) { return x > 0.f ? splat(1.f) : Vec<float>{}; }
};
template <> struct VectorForm<VectorAct::leaky_relu> {
  INGOT_VECTOR_FORM value(Vec<float> x) { return x > 0.f ? x : x * 0.01f; }
  INGOT_VECTOR_FORM slope(Vec<float> x) { return x > 0.f ? splat(1.f) : splat(0.01f); }
};
template <> struct VectorForm<VectorAct::leaky_relu_squared> {
  INGOT_VECTOR_FORM value(Vec<float> x) {
    const Vec<float> y = x > 0.f ? x : x * 0.5f;
    return y * y;
  }
  INGOT_VECTOR_FORM slope(Vec<float> x) { return x * (x > 0.f ? splat(2.f) : splat(0.5f)); }
};
template <> struct VectorForm<VectorAct::relu_squared> {
  INGOT_VECTOR_FORM value(Vec<float> x) { return x <= 0.f ? Vec<float>{} : x * x; }
  INGOT_VECTOR_FORM slope(Vec<float> x) { return x <= 0.f ? Vec<float>{} : x * 2.f; }
};

// x sigmoid(u) and its slope sigmoid(u) + x u' sigmoid'(u), from one exponential of -|u|.
INGOT_VECTOR_FORM gated_value(Vec<float> x, Vec<float> u) { return product_or_zero(x, logistic(u)); }
INGOT_VECTOR_FORM gated_slope(Vec<float> x_times_du, Vec<float> u) {
  const Vec<float> e = exp(-abs(u)), inverse = 1.f / (e + 1.f);
  return (u < 0.f ? e : splat(1.f)) * inverse + product_or_zero(x_times_du, e * inverse * inverse);
}
template <> struct VectorForm<VectorAct::silu> {
  INGOT_VECTOR_FORM value(Vec<float> x) { return gated_value(x, x); }
  INGOT_VECTOR_FORM slope(Vec<float> x) { return gated_slope(x, x); }
};
template <> struct VectorForm<VectorAct::quick_gelu> {
  INGOT_VECTOR_FORM value(Vec<float> x) { return gated_value(x, x * 1.702f); }
  INGOT_VECTOR_FORM slope(Vec<float> x) { return gated_slope(x * 1.702f, x * 1.702f); }
};
template <> struct VectorForm<VectorAct::gelu_tanh> {
  INGOT_VECTOR_FORM twice_u(Vec<float> x) { return x * (x * x * 0.071354816f + 1.5957691216f); }
  INGOT_VECTOR_FORM value(Vec<float> x) { return gated_value(x, twice_u(x)); }
  INGOT_VECTOR_FORM slope(Vec<float> x) { return gated_slope(x * (x * x * 0.21406445f + 1.5957691216f), twice_u(x)); }
};
template <> struct VectorForm<VectorAct::gelu> {
  INGOT_VECTOR_FORM value(Vec<float> x) {
    const Vec<float> phi = normal_tail(x).phi;
    return product_or_zero(x, x > 0.f ? 1.f - phi : phi);
  }
  INGOT_VECTOR_FORM slope(Vec<float> x) {
    const NormalTail n = normal_tail(x);
    return (x > 0.f ? 1.f - n.phi : n.phi) + product_or_zero(x, n.density * 0.3989422804f);
  }
};
template <> struct VectorForm<VectorAct::tanh> {
  INGOT_VECTOR_FORM value(Vec<float> x) { return ingot::INGOT_SIMD::tanh(x); }
  INGOT_VECTOR_FORM slope(Vec<float> x) {
    const Vec<float> e = exp(abs(x) * -2.f), inverse = 1.f / (e + 1.f);
    return e * 4.f * inverse * inverse;
  }
};
template <> struct VectorForm<VectorAct::sigmoid> {
  INGOT_VECTOR_FORM value(Vec<float> x) { return logistic(x); }
  INGOT_VECTOR_FORM slope(Vec<float> x) {
    const Vec<float> e = exp(-abs(x)), inverse = 1.f / (e + 1.f);
    return e * inverse * inverse;
  }
};
template <> struct VectorForm<VectorAct::softplus> {
  INGOT_VECTOR_FORM value(Vec<float> x) { return (x <= 0.f ? Vec<float>{} : x) + log1p_unit(exp(-abs(x))); }
  INGOT_VECTOR_FORM slope(Vec<float> x) { return logistic(x); }
};

// Calls use(VectorForm<act>{}).
template <class Use> static inline void with_vector_form(VectorAct act, Use use) {
  switch (act) {
    case VectorAct::none: return;
#define INGOT_CASE(act) \
  case VectorAct::act: return use(VectorForm<VectorAct::act>{});
      INGOT_VECTOR_ACTS(INGOT_CASE)
#undef INGOT_CASE
  }
}

}  // namespace ingot::INGOT_SIMD
#undef INGOT_VECTOR_FORM
