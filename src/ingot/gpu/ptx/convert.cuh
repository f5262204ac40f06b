#pragma once
// The hardware's conversions between float and pairs of 16-bit floats (round to nearest, ties to even).
// The first element of a pair is the low half of the word.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include <cstdint>

#include "ingot/core/dtype.h"

namespace ingot::ptx {

__device__ inline uint32_t pack(bf16, float low, float high) {
  uint32_t w;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // the conversion in integers
  w = uint32_t(bf16(low).bits) | uint32_t(bf16(high).bits) << 16;
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
#endif
  return w;
}
__device__ inline uint32_t pack(f16, float low, float high) {
  uint32_t w;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  asm("{.reg .f16 l, h; cvt.rn.f16.f32 l, %2; cvt.rn.f16.f32 h, %1; mov.b32 %0, {l, h};}"
      : "=r"(w)
      : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
#endif
  return w;
}
// The same for max(x, 0); a NaN stays a NaN. Needs sm_80 or later.
__device__ inline uint32_t pack_relu(f16, float low, float high) {
  uint32_t w;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}
// a b + c of both halves, each rounded once.
__device__ inline uint32_t multiply_add(f16, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ inline void unpack(bf16, uint32_t w, float& low, float& high) {
  asm("shl.b32 %0, %2, 16; and.b32 %1, %2, 0xffff0000;" : "=f"(low), "=f"(high) : "r"(w));
}
__device__ inline void unpack(f16, uint32_t w, float& low, float& high) {
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(w));
}

}  // namespace ingot::ptx
#endif
