#pragma once
// A weighted sum of two tensors in place. Both are (T, C), of one dtype, with any row stride: f32 or f64 on a CPU; f32,
// bf16 or f16 on a GPU.
#include "ingot/core/tensor.h"

namespace ingot {

// y = alpha * x + beta * y
struct Axpby {
  Tensor x, y;
  double alpha = 1, beta = 1;
};
void axpby(const Axpby& a, Stream stream);

}  // namespace ingot
