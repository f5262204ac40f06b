#pragma once
// Arithmetic on pairs of bf16. Subnormal numbers are numbers.
#include <cstdint>

namespace ingot::ptx {

__device__ inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

}  // namespace ingot::ptx
