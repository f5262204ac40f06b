#pragma once
// A sum of two tensors in place.
// All tensors (T, C) with any row stride unless stated; vectors (C) hold one factor per channel. Gradients of vectors
// and scalars accumulate; each is summed over tokens in a fixed order. On a GPU matrices may be bf16 or f16, beside f32
// vectors and scalars.
#include "ingot/core/tensor.h"

namespace ingot {

// y = alpha * x + beta * y
struct Axpby {
  Tensor x, y;
  double alpha = 1, beta = 1;
};
void axpby(const Axpby& a, Stream stream);

}  // namespace ingot
