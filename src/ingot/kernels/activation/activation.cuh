#pragma once
// Activations inside kernels. Approximate is a float whose exponentials come from the special function unit and whose
// log1p is a polynomial: F::value(Approximate(x)) is the formula of activation.h with an error far below the rounding
// to 16 bits, and softplus costs one special-function result (16 a cycle and SM) instead of two.
//   act_value<F, T>(x), act_slope<F, T>(x), act_slope_from_value<F, T>(y)     T: the rounded result's type
// For a formula with a number (activation.h), the first two functions take the number as well.
// The host branches let g++ compile and test the same text.
#include <cmath>

#include "ingot/core/hd.h"
#include "ingot/kernels/activation/activation.h"
#ifdef __CUDACC__
#include "ingot/gpu/ptx/math.cuh"
#endif

namespace ingot {
namespace detail {
INGOT_HD inline float fast_exp2(float x) {
#ifdef __CUDA_ARCH__
  return ptx::exp2_approx(x);
#else
  return std::exp2(x);
#endif
}
INGOT_HD inline float fast_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  return ptx::reciprocal_approx(x);
#else
  return 1 / x;
#endif
}
INGOT_HD inline float fast_sqrt(float x) {
#ifdef __CUDA_ARCH__
  return ptx::sqrt_approx(x);
#else
  return std::sqrt(x);
#endif
}
// max(x, 0), and a NaN for a NaN, in a single instruction.
INGOT_HD inline float fast_relu(float x) {
#ifdef __CUDA_ARCH__
  return ptx::max_nan(x, 0);
#else
  return x <= 0 ? 0 : x;
#endif
}
constexpr float kLog2e = 1.4426950408889634f;
// log1p(e) for e in [0, 1], relative error 5.7e-5.
INGOT_HD inline float log1p_of_unit_4(float e) {
  float q = 0.041347257792949677f;
  q = q * e - 0.157427117228508f;
  q = q * e + 0.3063008785247803f;
  q = q * e - 0.4969778060913086f;
  q = q * e + 0.9999432563781738f;
  return e * q;
}
// The same, relative error 1.6e-7 with its roundings.
INGOT_HD inline float log1p_of_unit_8(float e) {
  float q = 0.0052326880395412445f;
  q = q * e - 0.029505213722586632f;
  q = q * e + 0.07822591066360474f;
  q = q * e - 0.13663242757320404f;
  q = q * e + 0.19106005132198334f;
  q = q * e - 0.2484298199415207f;
  q = q * e + 0.3331909775733948f;
  q = q * e - 0.4999949336051941f;
  q = q * e + 0.9999999403953552f;
  return e * q;
}
}  // namespace detail

struct Approximate {
  float v;
  INGOT_HD explicit Approximate(double x) : v(float(x)) {}
  INGOT_HD explicit Approximate(float x) : v(x) {}
  INGOT_HD explicit Approximate(int x) : v(float(x)) {}

  INGOT_HD friend Approximate operator-(Approximate a) { return Approximate(-a.v); }
  INGOT_HD friend Approximate operator+(Approximate a, Approximate b) { return Approximate(a.v + b.v); }
  INGOT_HD friend Approximate operator-(Approximate a, Approximate b) { return Approximate(a.v - b.v); }
  INGOT_HD friend Approximate operator*(Approximate a, Approximate b) { return Approximate(a.v * b.v); }
  INGOT_HD friend Approximate operator/(Approximate a, Approximate b) {
    return Approximate(a.v * detail::fast_reciprocal(b.v));
  }
  INGOT_HD friend bool operator<(Approximate a, float b) { return a.v < b; }
  INGOT_HD friend bool operator<=(Approximate a, float b) { return a.v <= b; }
  INGOT_HD friend bool operator>(Approximate a, float b) { return a.v > b; }
  INGOT_HD friend bool operator==(Approximate a, float b) { return a.v == b; }

  INGOT_HD friend Approximate abs(Approximate a) { return Approximate(fabsf(a.v)); }
  INGOT_HD friend Approximate exp(Approximate a) { return Approximate(detail::fast_exp2(a.v * detail::kLog2e)); }
  // For arguments in [0, 1]: activations need log1p of e^-|x| only.
  INGOT_HD friend Approximate log1p(Approximate e) { return Approximate(detail::log1p_of_unit_4(e.v)); }
  // Near zero the difference 1 - e^x cancels, so a polynomial is used there: relative error 1e-6 on [-0.35, 0].
  INGOT_HD friend Approximate expm1(Approximate a) {
    const float h = -a.v;
    float p = -0.03623957186937332f;
    p = p * h + 0.1654975861310959f;
    p = p * h - 0.49991777539253235f;
    p = p * h + 0.9999991059303284f;
    return Approximate(fabsf(h) < 0.35f ? -h * p : detail::fast_exp2(a.v * detail::kLog2e) - 1);
  }
  INGOT_HD friend Approximate sqrt(Approximate a) { return Approximate(detail::fast_sqrt(a.v)); }
  INGOT_HD friend Approximate tanh(Approximate a) { return Approximate(tanhf(a.v)); }
  // e^(-z^2) times a polynomial in 1 / (1 + 0.425 z), relative error 9e-6 in both tails; without erfcf's branches, and
  // with a third of its registers.
  INGOT_HD friend Approximate erfc(Approximate a) {
    const float z = fabsf(a.v), t = detail::fast_reciprocal(1 + 0.425f * z);
    float p = -0.1538287252187729f;
    p = p * t + 0.4279579520225525f;
    p = p * t - 0.029821643605828285f;
    p = p * t + 0.2868853211402893f;
    p = p * t + 0.22828207910060883f;
    p = p * t + 0.24053306877613068f;
    const float tail = p * t * detail::fast_exp2(z * z * -detail::kLog2e);
    return Approximate(a.v < 0 ? 2 - tail : tail);
  }
};

// Softplus in fp32 with a single special-function result, for expf; the logarithm is the polynomial of degree 8.
INGOT_HD inline float softplus_value(float x) { return (x <= 0 ? 0 : x) + detail::log1p_of_unit_8(expf(-fabsf(x))); }

// How kernels compute a value: by the formula, or by a cheaper specialisation if one exists.
template <class F> struct KernelForm {
  INGOT_HD static float value(float x) { return F::value(x); }
  INGOT_HD static float narrow(float x) { return F::value(Approximate(x)).v; }  // the result will be rounded to 16 bits
};
// The ternaries of the formulas cost two instructions.
template <> struct KernelForm<Relu> {
  INGOT_HD static float value(float x) { return Relu::value(x); }
  INGOT_HD static float narrow(float x) { return detail::fast_relu(x); }
};
template <> struct KernelForm<Softplus> {
  INGOT_HD static float value(float x) { return softplus_value(x); }
  INGOT_HD static float narrow(float x) {
    return detail::fast_relu(x) + detail::log1p_of_unit_4(detail::fast_exp2(fabsf(x) * -detail::kLog2e));
  }
};

template <class F, class T> INGOT_HD inline float act_value(float x, float number = 0) {
  if constexpr (takes_number<F> && sizeof(T) == 2)
    return F::value(Approximate(x), Approximate(number)).v;
  else if constexpr (takes_number<F>)
    return F::value(x, number);
  else if constexpr (sizeof(T) == 2)
    return KernelForm<F>::narrow(x);
  else
    return KernelForm<F>::value(x);
}
template <class F, class T> INGOT_HD inline float act_slope(float x, float number = 0) {
  if constexpr (takes_number<F> && sizeof(T) == 2)
    return F::slope(Approximate(x), Approximate(number)).v;
  else if constexpr (takes_number<F>)
    return F::slope(x, number);
  else if constexpr (sizeof(T) == 2)
    return F::slope(Approximate(x)).v;
  else
    return F::slope(x);
}
template <class F, class T> INGOT_HD inline float act_slope_from_value(float y) {
  if constexpr (sizeof(T) == 2)
    return F::slope_from_value(Approximate(y)).v;
  else
    return F::slope_from_value(y);
}
template <class F, class T> INGOT_HD inline float act_slope_from_value_and_sign(float y, bool positive) {
  if constexpr (sizeof(T) == 2)
    return F::slope_from_value_and_sign(Approximate(y), positive).v;
  else
    return F::slope_from_value_and_sign(y, positive);
}
// The slope from the number that a training forward pass stores for a layer: the value where the slope follows from the
// value, else the argument.
template <class F, class T> INGOT_HD inline float act_slope_from_saved(float saved) {
  if constexpr (has_slope_from_value<F>)
    return act_slope_from_value<F, T>(saved);
  else
    return act_slope<F, T>(saved);
}
template <class F, class T> INGOT_HD inline float act_value_from_saved(float saved, float number = 0) {
  if constexpr (has_slope_from_value<F>)
    return saved;
  else
    return act_value<F, T>(saved, number);
}

}  // namespace ingot
