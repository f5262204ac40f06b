#pragma once
// The special function unit, fp32, subnormals flushed to zero. Maximum errors according to the PTX manual.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include <cstdint>

namespace ingot::ptx {

// 2^x, relative error 2^-22.5.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2(x), absolute error 2^-22 for x in [0.5, 2], relative 2^-22 elsewhere.
__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x, relative error 2^-23.
__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / sqrt(x), relative error 2^-22.9.
__device__ inline float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// sqrt(x), relative error 2^-23.
__device__ inline float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The larger number, exactly; subnormals are kept. A NaN where either is a NaN.
__device__ inline float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace ingot::ptx
#endif
