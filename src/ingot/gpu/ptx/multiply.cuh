#pragma once
// Arithmetic on pairs of bf16. Subnormal numbers are numbers.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include <cstdint>

namespace ingot::ptx {

// Before sm_90 a product is a sum with -0, which changes no product and no sign of a zero.
__device__ inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return d;
}

}  // namespace ingot::ptx
#endif
