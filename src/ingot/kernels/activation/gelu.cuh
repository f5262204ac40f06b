#pragma once
// Gelu with one exponential and one reciprocal of the special function unit, for results that are rounded to 16 bits.
//   Phi(-t) = e^(-t^2 / 2) R(t), t >= 0      R(t) = u P(u), u = 1 / (1 + p t)
//   x Phi(x) = max(x, 0) - |x| Phi(-|x|)     slope: s(t) = e^(-t^2 / 2) (R(t) - t / sqrt(2 pi)) for x < 0, else 1 - s
// P of degree 6 by least relative error on [0, 14.5], where e^(-t^2 / 2) has vanished: 1.1e-6 with its roundings.
#include <cmath>

#include "ingot/core/hd.h"
#include "ingot/kernels/activation/activation.cuh"
#ifdef __CUDACC__
#include "ingot/gpu/ptx/max_or_nan.cuh"
#endif

namespace ingot::detail {

// max(x, 0), and a NaN for a NaN. Unlike fast_relu(), the function also compiles for compute capability 7.5.
INGOT_HD inline float relu_or_nan(float x) {
#ifdef __CUDA_ARCH__
  return ptx::max_or_nan(x, 0);
#else
  return fast_relu(x);
#endif
}

// e^(-x^2 / 2), and R of |x|. An infinite x would give 0 * inf further on.
struct NormalTail {
  float e, t, r;
};
INGOT_HD inline NormalTail normal_tail(float x) {
  NormalTail n;
  n.t = fminf(fabsf(x), 20.f);
  n.e = fast_exp2(x * (-0.5f * kLog2e) * x);
  const float u = fast_reciprocal(0.3621428608894348f * n.t + 1);
  float p = 0.047726020216941833f;
  p = p * u - 0.17909877002239227f;
  p = p * u + 0.17506767809391022f;
  p = p * u + 0.02983083203434944f;
  p = p * u + 0.13910922408103943f;
  p = p * u + 0.14280842244625092f;
  p = p * u + 0.1445566713809967f;
  n.r = p * u;
  return n;
}
INGOT_HD inline float gelu_value(float x) {
  const NormalTail n = normal_tail(x);
  return relu_or_nan(x) - n.t * (n.e * n.r);
}
INGOT_HD inline float gelu_slope(float x) {
  const NormalTail n = normal_tail(x);
  const float s = n.e * (n.r - 0.3989422804014327f * n.t);
  return x < 0 ? s : 1 - s;
}

}  // namespace ingot::detail
