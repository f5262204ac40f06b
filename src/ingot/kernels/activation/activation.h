#pragma once
// Pointwise activations. Each formula is written only here. CPU loops, CUDA epilogues, tests and the names in other
// languages all use the list `Activations`. value(x) = f(x), slope(x) = f'(x); T is float or double (or, in kernels,
// the Approximate of activation.cuh). slope_from_value(f(x)) = f'(x) where the value determines the slope.
#include <cmath>
#include <iterator>
#include <string_view>

#include "ingot/core/check.h"
#include "ingot/core/hd.h"
#include "ingot/core/tensor.h"
#include "ingot/kernels/activation/vector_act.h"

namespace ingot {

namespace detail {
// x * s where s = 0 wins over an infinite x: the limit of x * (something that decays faster than 1 / x).
template <class T> INGOT_HD T product_or_zero(T x, T s) { return s == 0 ? T(0) : x * s; }
// 1 / (1 + e^-x) and its slope, each with a small relative error in both tails, because the argument of the exponential
// is never positive.
template <class T> INGOT_HD T logistic(T x) {
  using std::abs;
  using std::exp;
  const T e = exp(-abs(x));
  return (x < 0 ? e : T(1)) / (T(1) + e);
}
template <class T> INGOT_HD T logistic_slope(T x) {
  using std::abs;
  using std::exp;
  const T e = exp(-abs(x));
  return e / ((T(1) + e) * (T(1) + e));
}
}  // namespace detail

// The formula by which a slope follows from a value h, for kernels that take the formula as a kind and numbers instead
// of compiled code: 1 - e^-h; h > 0 ? number[0] : number[1]; number[0] + h (number[1] + h number[2]).
enum class SlopeKind { exponential, step, quadratic };
struct SlopeFormula {
  SlopeKind kind = SlopeKind::step;
  float number[3] = {};
};

// How many registers a formula leaves to a Hopper kernel that holds a network's rows in registers (kernels/mlp). The
// values were found by compiling and by measuring. The defaults are right for most activations; tools/check_cuda.py
// reports the activations for which they are wrong.
struct KernelFit {
  // The most warpgroups of a block with 128 columns: with results alone, with stored values, and with streamed weights.
  int warpgroups = 3, warpgroups_storing = 3, warpgroups_streaming = 3;
  // Computes the elements in turn, because the compiler would otherwise interleave the formulas of several elements and
  // run out of registers.
  bool one_by_one = false;
  // Whether special kernels for the common cases exist for layers up to this width. Otherwise the general kernel
  // computes these cases; its branches keep the compiler from interleaving the formulas.
  bool own_to_256 = true, own_to_512 = true;
};

// An activation has name, value and slope, and may have
//   slope_from_value    training then keeps values and no arguments
//   slope_formula       the same as coefficients: backward passes for Hopper then need no array of slopes
//   fit                 a KernelFit
//   Formula, number     for activations that differ by a number c: value(x, c) and slope(x, c) of all of them, and c.
//                       Kernels that are compiled per activation (kernels/mlp) are then compiled for the formula, and
//                       use the formula's fit
// Kernels may have a cheaper form of an activation (KernelForm in activation.cuh), CPU loops a form over vectors
// (vector_act.h); without such a form, both run value() and slope().
// The result of a NaN is a NaN: comparisons are written so that a NaN takes the branch that keeps x.
// x > 0 ? x : c x
struct LeakyFormula {
  template <class T> INGOT_HD static T value(T x, T c) { return x > 0 ? x : c * x; }
  template <class T> INGOT_HD static T slope(T x, T c) { return x > 0 ? T(1) : c; }
  template <class T> INGOT_HD static T slope_from_value(T y, T c) { return y > 0 ? T(1) : c; }
};
// max(x, c x)^2
struct SquareFormula {
  template <class T> INGOT_HD static T value(T x, T c) {
    const T y = x <= 0 ? detail::product_or_zero(x, c) : x;
    return y * y;
  }
  template <class T> INGOT_HD static T slope(T x, T c) {
    return x <= 0 ? detail::product_or_zero(x, T(2) * c * c) : T(2) * x;
  }
};
// x sigmoid(c x)
struct SwishFormula {
  static constexpr KernelFit fit = {.warpgroups_streaming = 2};
  template <class T> INGOT_HD static T value(T x, T c) { return detail::product_or_zero(x, detail::logistic(c * x)); }
  template <class T> INGOT_HD static T slope(T x, T c) {
    return detail::logistic(c * x) + detail::product_or_zero(c * x, detail::logistic_slope(c * x));
  }
};

struct Identity {
  static constexpr std::string_view name = "identity";
  using Formula = LeakyFormula;
  static constexpr float number = 1;
  static constexpr SlopeFormula slope_formula = {SlopeKind::step, {1, 1}};
  template <class T> INGOT_HD static T value(T x) { return x; }
  template <class T> INGOT_HD static T slope(T) { return T(1); }
  template <class T> INGOT_HD static T slope_from_value(T) { return T(1); }
};
struct Relu {
  static constexpr std::string_view name = "relu";
  static constexpr SlopeFormula slope_formula = {SlopeKind::step, {1, 0}};
  template <class T> INGOT_HD static T value(T x) { return x <= 0 ? T(0) : x; }
  template <class T> INGOT_HD static T slope(T x) { return x > 0 ? T(1) : T(0); }
  template <class T> INGOT_HD static T slope_from_value(T y) { return y > 0 ? T(1) : T(0); }
};
struct LeakyRelu {
  static constexpr std::string_view name = "leaky_relu";
  using Formula = LeakyFormula;
  static constexpr float number = 0.01f;
  static constexpr SlopeFormula slope_formula = {SlopeKind::step, {1, number}};
  template <class T> INGOT_HD static T value(T x) { return Formula::value(x, T(0.01)); }
  template <class T> INGOT_HD static T slope(T x) { return Formula::slope(x, T(0.01)); }
  template <class T> INGOT_HD static T slope_from_value(T y) { return Formula::slope_from_value(y, T(0.01)); }
};
// max(x, x / 2)^2
struct LeakyReluSquared {
  static constexpr std::string_view name = "leaky_relu_squared";
  using Formula = SquareFormula;
  static constexpr float number = 0.5f;
  template <class T> INGOT_HD static T value(T x) {
    const T y = x > 0 ? x : T(0.5) * x;
    return y * y;
  }
  template <class T> INGOT_HD static T slope(T x) { return x > 0 ? T(2) * x : T(0.5) * x; }
  template <class T> INGOT_HD static T slope_from_value_and_sign(T y, bool positive) {
    using std::sqrt;
    return positive ? T(2) * sqrt(y) : -sqrt(y);
  }
};
struct ReluSquared {
  static constexpr std::string_view name = "relu_squared";
  using Formula = SquareFormula;
  static constexpr float number = 0;
  template <class T> INGOT_HD static T value(T x) { return x <= 0 ? T(0) : x * x; }
  template <class T> INGOT_HD static T slope(T x) { return x <= 0 ? T(0) : T(2) * x; }
  template <class T> INGOT_HD static T slope_from_value_and_sign(T y, bool) {
    using std::sqrt;
    return T(2) * sqrt(y);
  }
};
// x sigmoid(x)
struct Silu {
  static constexpr std::string_view name = "silu";
  using Formula = SwishFormula;
  static constexpr float number = 1;
  template <class T> INGOT_HD static T value(T x) { return detail::product_or_zero(x, detail::logistic(x)); }
  template <class T> INGOT_HD static T slope(T x) {
    return detail::logistic(x) + detail::product_or_zero(x, detail::logistic_slope(x));
  }
};
// x Phi(x), Phi the normal distribution: 0.5 x (1 + erf(x / sqrt 2)), written with erfc to keep the left tail
struct Gelu {
  static constexpr std::string_view name = "gelu";
  static constexpr KernelFit fit = {.one_by_one = true};
  template <class T> INGOT_HD static T distribution(T x) {
    using std::erfc;
    return T(0.5) * erfc(x * T(-0.70710678118654752440));
  }
  template <class T> INGOT_HD static T value(T x) { return detail::product_or_zero(x, distribution(x)); }
  template <class T> INGOT_HD static T slope(T x) {
    using std::exp;
    const T density = T(0.39894228040143267794) * exp(T(-0.5) * x * x);
    return distribution(x) + detail::product_or_zero(x, density);
  }
};
// 0.5 x (1 + tanh u) = x sigmoid(2 u),   u = sqrt(2 / pi) (x + 0.044715 x^3)
struct GeluTanh {
  static constexpr std::string_view name = "gelu_tanh";
  template <class T> INGOT_HD static T twice_u(T x) {
    return x * (T(1.5957691216057307118) + T(1.5957691216057307118 * 0.044715) * (x * x));
  }
  template <class T> INGOT_HD static T value(T x) { return detail::product_or_zero(x, detail::logistic(twice_u(x))); }
  template <class T> INGOT_HD static T slope(T x) {
    const T inner = T(1.5957691216057307118) + T(3 * 1.5957691216057307118 * 0.044715) * (x * x);
    return detail::logistic(twice_u(x)) + detail::product_or_zero(x * inner, detail::logistic_slope(twice_u(x)));
  }
};
// x sigmoid(1.702 x)
struct QuickGelu {
  static constexpr std::string_view name = "quick_gelu";
  using Formula = SwishFormula;
  static constexpr float number = 1.702f;
  template <class T> INGOT_HD static T value(T x) { return Formula::value(x, T(1.702)); }
  template <class T> INGOT_HD static T slope(T x) { return Formula::slope(x, T(1.702)); }
};
struct Tanh {
  static constexpr std::string_view name = "tanh";
  static constexpr SlopeFormula slope_formula = {SlopeKind::quadratic, {1, 0, -1}};
  static constexpr KernelFit fit = {
      .warpgroups_storing = 2, .warpgroups_streaming = 2, .one_by_one = true, .own_to_256 = false};
  template <class T> INGOT_HD static T value(T x) {
    using std::tanh;
    return tanh(x);
  }
  template <class T> INGOT_HD static T slope(T x) { return T(4) * detail::logistic_slope(T(2) * x); }
  template <class T> INGOT_HD static T slope_from_value(T y) { return (T(1) - y) * (T(1) + y); }
};
struct Sigmoid {
  static constexpr std::string_view name = "sigmoid";
  static constexpr SlopeFormula slope_formula = {SlopeKind::quadratic, {0, 1, -1}};
  static constexpr KernelFit fit = {
      .warpgroups = 2, .warpgroups_storing = 2, .warpgroups_streaming = 2, .own_to_256 = false, .own_to_512 = false};
  template <class T> INGOT_HD static T value(T x) { return detail::logistic(x); }
  template <class T> INGOT_HD static T slope(T x) { return detail::logistic_slope(x); }
  template <class T> INGOT_HD static T slope_from_value(T y) { return y * (T(1) - y); }
};
// log(1 + e^x) = max(x, 0) + log1p(e^-|x|)
struct Softplus {
  static constexpr std::string_view name = "softplus";
  static constexpr SlopeFormula slope_formula = {SlopeKind::exponential};
  static constexpr KernelFit fit = {.warpgroups = 4};
  template <class T> INGOT_HD static T value(T x) {
    using std::abs;
    using std::exp;
    using std::log1p;
    return (x <= 0 ? T(0) : x) + log1p(exp(-abs(x)));
  }
  template <class T> INGOT_HD static T slope(T x) { return detail::logistic(x); }
  template <class T> INGOT_HD static T slope_from_value(T y) {
    using std::expm1;
    return -expm1(-y);
  }
};

template <class... Fs> struct ActivationList { static constexpr int size = sizeof...(Fs); };
using Activations = ActivationList<Identity, Relu, LeakyRelu, LeakyReluSquared, ReluSquared, Silu, Gelu, GeluTanh,
                                   QuickGelu, Tanh, Sigmoid, Softplus>;

// Whether f'(x) follows from f(x) alone: the backward pass of a layer then needs only the layer's output.
template <class F> inline constexpr bool has_slope_from_value = requires { F::slope_from_value(1.0); }
|| requires { F::slope_from_value(1.0, 1.0); };

// Whether f'(x) follows from f(x) and the sign of x: a square loses nothing but the sign.
template <class F> inline constexpr bool has_slope_from_value_and_sign = requires {
  F::slope_from_value_and_sign(1.0, true);
};

template <class F> constexpr KernelFit kernel_fit_of() {
  if constexpr (requires { F::fit; })
    return F::fit;
  else
    return {};
}
template <class F> inline constexpr KernelFit kernel_fit = kernel_fit_of<F>();
template <class F> inline constexpr bool has_slope_formula = requires { F::slope_formula; };

// The formula of an activation: its own, or the shared formula with a number.
template <class F> inline constexpr bool takes_number = requires { F::value(1.0, 1.0); };
template <class F> inline constexpr bool shares_formula = requires { typename F::Formula; };
template <class F> constexpr auto formula_of(F f) {
  if constexpr (shares_formula<F>)
    return typename F::Formula{};
  else
    return f;
}
template <class F> constexpr float number_of(F) {
  if constexpr (shares_formula<F>)
    return F::number;
  else
    return 0;
}

// An activation chosen at run time: its place in the list.
enum class Act : int { identity = 0 };
Act activation_named(std::string_view name);  // throws for an unknown name, and lists the known ones
std::string_view name_of(Act act);

// Calls use(F{}) for the activation `act`.
template <class Use, class... Fs> void with_activation(Act act, Use&& use, ActivationList<Fs...>) {
  int i = 0;
  const bool known = ((int(act) == i++ && (use(Fs{}), true)) || ...);
  INGOT_CHECK(known, "activation: found number ", int(act), ", expected less than ", sizeof...(Fs));
}
template <class Use> void with_activation(Act act, Use&& use) { with_activation(act, use, Activations{}); }
// Calls use(formula of the activation); several activations may share a formula, and their number is number_of(act).
template <class Use> void with_formula(Act act, Use&& use) {
  with_activation(act, [&](auto f) { use(formula_of(f)); });
}
template <class Use, class... Fs> void for_each_activation(Use&& use, ActivationList<Fs...>) { (use(Fs{}), ...); }
template <class Use> void for_each_activation(Use&& use) { for_each_activation(use, Activations{}); }

// The place of F in the list, known at compile time: act_of<Silu>.
template <class F, class... Fs> constexpr Act act_in(ActivationList<Fs...>) {
  int i = 0;
  const bool found = ((std::string_view(Fs::name) == F::name || (++i, false)) || ...);
  return Act(found ? i : -1);
}
template <class F> inline constexpr Act act_of = act_in<F>(Activations{});

bool slope_follows_from_value(Act act);  // has_slope_from_value of the activation `act`
bool slope_follows_from_value_and_sign(Act act);

template <class F> constexpr VectorAct vector_form() {
  for (int i = 0; i < int(std::size(kVectorActNames)); ++i)
    if (kVectorActNames[i] == F::name) return VectorAct(i);
  return VectorAct::none;
}
VectorAct vector_form_of(Act act);
float number_of(Act act);  // 0 where the formula takes none

// y = f(x)             x, y (T, C) of one floating type, any row stride; y may alias x
struct Activate {
  Act act = Act::identity;
  Tensor x, y;
};
void activate(const Activate& a, Stream stream);
// dx = dy * f'(x)      dx may alias dy
struct ActivateBackward {
  Act act = Act::identity;
  Tensor dy, x, dx;
  Tensor y;  // receives f(x), at less than the cost of a separate call; or left out
};
void activate_backward(const ActivateBackward& a, Stream stream);

}  // namespace ingot
