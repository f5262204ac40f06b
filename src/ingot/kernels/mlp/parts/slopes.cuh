#pragma once
// Shared code of the kernels of the backward forms for Hopper: slopes from values, where the activation allows this.
#include <cstdint>
#include <type_traits>

#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/mlp/parts/backward_plan.h"

namespace ingot::cuda::mlp_parts {

// Calls use(F{}) for the activation, whose slope must follow from its value.
template <class Use, class... Fs>
__device__ __forceinline__ void with_slope(Act act, Use&& use, ActivationList<Fs...>) {
  const auto consider = [&](auto f) {
    using F = decltype(f);
    if constexpr (has_slope_from_value<F>)
      if (act == act_of<F>) use(f);
  };
  (consider(Fs{}), ...);
}

// 1 - e^-h, or h where the difference would cancel: at worst 3e-4 off, less than a rounding to f16.
__device__ __forceinline__ float exponential_slope(float h) {
  const float elsewhere = 1 - ptx::exp2_approx(h * -detail::kLog2e);
  return h < 0x1.3p-11f ? h : elsewhere;
}
template <class F> constexpr bool exponential_slope_of() {
  if constexpr (has_slope_formula<F>) return F::slope_formula.kind == Slope::exponential;
  return false;
}
template <class F> constexpr bool kExponentialSlope = exponential_slope_of<F>();
// f' of two values of h.
template <class F, class T> __device__ __forceinline__ void slopes_of(uint32_t h, float (&slope)[2]) {
  float at[2];
  ptx::unpack(T{}, h, at[0], at[1]);
#pragma unroll
  for (int e = 0; e < 2; ++e)
    if constexpr (kExponentialSlope<F>)
      slope[e] = exponential_slope(at[e]);
    else
      slope[e] = act_slope_from_value<F, T>(at[e]);
}
// Calls use(the slope's kind, as a constant of a type).
template <class Use> void with_slope_kind(Slope slope, Use&& use) {
  switch (slope) {
    case Slope::exponential: return use(std::integral_constant<Slope, Slope::exponential>());
    case Slope::step: return use(std::integral_constant<Slope, Slope::step>());
    case Slope::quadratic: return use(std::integral_constant<Slope, Slope::quadratic>());
  }
}
// The slopes of two values of h by their kind.
template <class T, Slope kSlope>
__device__ __forceinline__ void slopes_at(uint32_t h, const float (&number)[3], float (&slope)[2]) {
  float at[2];
  ptx::unpack(T{}, h, at[0], at[1]);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if constexpr (kSlope == Slope::exponential)
      slope[e] = exponential_slope(at[e]);
    else if constexpr (kSlope == Slope::step)
      slope[e] = at[e] > 0 ? number[0] : number[1];
    else
      slope[e] = fmaf(fmaf(number[2], at[e], number[1]), at[e], number[0]);
  }
}

// A counter of blocks, below a mark. The workspace has arbitrary contents at the start, so the first block writes the
// mark, four 16-bit values impossible as results of arithmetic (each a NaN with a special payload); the last block to
// leave sets the count to 0 again. One thread per block.
constexpr uint64_t kMark = 0xffa5'7fd3'ff96'0000, kCount = 0xffff;
__device__ inline void mark_counter(uint64_t* counter) {
  for (uint64_t seen = ptx::load_acquire(counter); (seen & ~kCount) != kMark;) {
    const uint64_t before = ptx::compare_exchange_relaxed(counter, seen, kMark);
    if (before == seen) break;
    seen = before;
  }
}
// When `most` blocks have arrived, this block the last, all blocks have seen the full count.
__device__ inline void leave_counter(uint64_t* counter, uint32_t most) {
  if ((ptx::fetch_add_relaxed(counter, 1) & kCount) == most - 1) ptx::store_release(counter, kMark);
}
// Waits until the given number of blocks have arrived, this block included.
__device__ inline void meet_at_counter(uint64_t* counter, uint32_t blocks) {
  ptx::add_release(counter, 1);
  tile::poll_or_trap([&] { return uint32_t(ptx::load_acquire(counter) & kCount) >= blocks; });
  leave_counter(counter, 2 * blocks);
}

}  // namespace ingot::cuda::mlp_parts
