#pragma once
// Pointwise activations: the one place where each formula is written. CPU loops, CUDA epilogues, tests and names in other
// languages all iterate or look up `Activations`. value(x) = f(x), slope(x) = f'(x); T is float or double.
#include <cmath>
#include <string_view>

#include "ingot/core/check.h"
#include "ingot/core/hd.h"
#include "ingot/core/tensor.h"

namespace ingot {

struct Identity {
  static constexpr std::string_view name = "identity";
  template <class T> INGOT_HD static T value(T x) { return x; }
  template <class T> INGOT_HD static T slope(T) { return T(1); }
};
struct Relu {
  static constexpr std::string_view name = "relu";
  template <class T> INGOT_HD static T value(T x) { return x > 0 ? x : T(0); }
  template <class T> INGOT_HD static T slope(T x) { return x > 0 ? T(1) : T(0); }
};

template <class... Fs> struct ActivationList { static constexpr int size = sizeof...(Fs); };
using Activations = ActivationList<Identity, Relu>;

// An activation chosen at run time: its place in the list.
enum class Act : int { identity = 0 };
Act activation_named(std::string_view name);  // throws for an unknown name, and lists the known ones
std::string_view name_of(Act act);

// Calls use(F{}) for the activation `act`.
template <class Use, class... Fs>
void with_activation(Act act, Use&& use, ActivationList<Fs...>) {
  int i = 0;
  const bool known = ((int(act) == i++ && (use(Fs{}), true)) || ...);
  INGOT_CHECK(known, "activation: found number ", int(act), ", expected less than ", sizeof...(Fs));
}
template <class Use> void with_activation(Act act, Use&& use) { with_activation(act, use, Activations{}); }
template <class Use, class... Fs> void for_each_activation(Use&& use, ActivationList<Fs...>) { (use(Fs{}), ...); }
template <class Use> void for_each_activation(Use&& use) { for_each_activation(use, Activations{}); }

// y = f(x)             x, y (T, C), any row stride; y may alias x
struct Activate { Act act = Act::identity; Tensor x, y; };
void activate(const Activate& a, Stream stream);
// dx = dy * f'(x)      dx may alias dy
struct ActivateBackward { Act act = Act::identity; Tensor dy, x, dx; };
void activate_backward(const ActivateBackward& a, Stream stream);

}  // namespace ingot
