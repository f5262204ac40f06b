#pragma once
// The gate of an element, in registers: shared by the elementwise kernels and the epilogue of the products.
#include <limits>
#include <type_traits>

#include "ingot/gpu/ptx/math.cuh"
#include "ingot/kernels/swiglu/swiglu.h"

namespace ingot::cuda {

struct GateNumbers {
  float limit, alpha, up_offset, cubic;  // limit is infinite where there is no clamp
};
inline GateNumbers gate_numbers(const GateOptions& o) {
  return {o.limit > 0 ? float(o.limit) : std::numeric_limits<float>::infinity(), float(o.alpha), float(o.up_offset),
          float(o.cubic)};
}
inline bool is_plain(const GateOptions& o) { return o.limit <= 0 && o.alpha == 1 && o.up_offset == 0 && o.cubic == 0; }

// f32 is computed as the CPU does. 16-bit results come from the hardware's exp2 and reciprocal: below 2^-17 of relative
// error for |z| <= 80 (the rounding of z log2 e counts z times), where the result is rounded by 2^-12 or more.
template <class T> constexpr bool is_exact = std::is_same_v<T, float>;

constexpr float kLog2E = 1.44269504f;

// sigmoid(z) and its slope with a single exponential, of a number <= 0.
struct Logistic {
  float value, slope;
};
template <bool kExact> __device__ inline Logistic logistic(float z) {
  const float e = kExact ? expf(-fabsf(z)) : ptx::exp2_approx(-fabsf(z) * kLog2E);
  const float r = kExact ? __fdiv_rn(1.f, 1.f + e) : ptx::reciprocal_approx(1.f + e);
  return {(z < 0 ? e : 1.f) * r, e * r * r};
}
// x * s where s = 0 wins over an infinite x.
__device__ inline float product_or_zero(float x, float s) { return s == 0 ? 0.f : x * s; }

// A NaN passes both comparisons, because comparisons with NaN are false.
__device__ inline float clamped_gate(const GateNumbers& p, float gate) { return gate > p.limit ? p.limit : gate; }
__device__ inline float clamped_up(const GateNumbers& p, float up) {
  return (up > p.limit ? p.limit : up < -p.limit ? -p.limit : up) + p.up_offset;
}

// The argument of the sigmoid: alpha g + cubic g^3, and its slope. An infinite g must not meet cubic = 0.
struct Argument {
  float z, slope;
};
// kCubic: false where cubic is known to be zero.
template <bool kCubic> __device__ inline Argument argument(const GateNumbers& p, float g) {
  if (!kCubic || p.cubic == 0) return {p.alpha * g, p.alpha};
  return {g * (p.alpha + p.cubic * g * g), p.alpha + 3 * p.cubic * g * g};
}

// kPlain: silu(gate) * up, without limit, alpha and the offset of up. For gate = -inf the first factor is finite, which
// avoids inf * 0; for a NaN the second factor is a NaN.
template <bool kExact, bool kPlain, bool kCubic = true>
__device__ inline float gated(const GateNumbers& p, float gate, float up) {
  if constexpr (kPlain && !kExact)
    return fmaxf(gate, -128.f) * ptx::reciprocal_approx(1 + ptx::exp2_approx(gate * -kLog2E)) * up;
  const float g = clamped_gate(p, gate);
  return product_or_zero(g, logistic<kExact>(argument<kCubic>(p, g).z).value) * clamped_up(p, up);
}

struct Gradient {
  float gate, up;
};
template <bool kExact, bool kCubic = true>
__device__ inline Gradient gradient(const GateNumbers& p, float gate, float up, float d) {
  const float g = clamped_gate(p, gate);
  const Argument a = argument<kCubic>(p, g);
  const Logistic l = logistic<kExact>(a.z);
  const bool gate_moves = !(gate > p.limit), up_moves = !(up > p.limit || up < -p.limit);
  const float slope = l.value + product_or_zero(g * a.slope, l.slope);
  return {gate_moves ? d * clamped_up(p, up) * slope : 0.f, up_moves ? d * product_or_zero(g, l.value) : 0.f};
}

}  // namespace ingot::cuda
