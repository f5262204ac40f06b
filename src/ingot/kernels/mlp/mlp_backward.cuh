#pragma once
// What the kernels of the two fast backward forms share: slopes from values, of the activations that allow it.
#include <cstdint>

#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/kernels/activation/activation.cuh"

namespace ingot::cuda {

// Calls use(F{}) for the activation, one of those whose slope follows from its value.
template <class Use, class... Fs>
__device__ __forceinline__ void with_slope(Act act, Use&& use, ActivationList<Fs...>) {
  const auto consider = [&](auto f) {
    using F = decltype(f);
    if constexpr (has_slope_from_value<F>)
      if (act == act_of<F>) use(f);
  };
  (consider(Fs{}), ...);
}

// f' of two values of h.
template <class F, class T> __device__ __forceinline__ void slopes_of(uint32_t h, float (&slope)[2]) {
  float at[2];
  ptx::unpack(T{}, h, at[0], at[1]);
#pragma unroll
  for (int e = 0; e < 2; ++e)
    if constexpr (F::name == Softplus::name) {
      // 1 - e^-h, or h where the difference would cancel: at worst 3e-4 off, less than a rounding to f16.
      const float elsewhere = 1 - ptx::exp2_approx(at[e] * -detail::kLog2e);
      slope[e] = at[e] < 0x1.3p-11f ? at[e] : elsewhere;
    } else {
      slope[e] = act_slope_from_value<F, T>(at[e]);
    }
}

}  // namespace ingot::cuda
