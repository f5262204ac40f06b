#pragma once
// The larger of two numbers, for kernels that are also compiled for compute capability 7.5.
#include "ingot/gpu/ptx/math.cuh"

namespace ingot::ptx {

// The larger number; a NaN where either is a NaN. max_nan() is the instruction, which GPUs have from 8.0 on.
__device__ inline float max_or_nan(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return x > y || x != x ? x : y;
#else
  return max_nan(x, y);
#endif
}

}  // namespace ingot::ptx
