#pragma once
// y = scale * x, row by row: the weights of a branch whose output is multiplied by a scale per channel.
//     dx += scale * dy        dscale += sum_k x * dy
#include "ingot/core/tensor.h"

namespace ingot {

struct ScaledRows {
  Tensor x;      // (N, K), any row stride; f64 or f32 (on a GPU f32)
  Tensor scale;  // (N), of x's type
  Tensor y;      // (N, K), of x's type, or bf16 or f16 beside f32; may alias an x of its type
};
void scaled_rows(const ScaledRows& a, Stream stream);

// All tensors have x's type. dscale is left out where the scale is frozen.
struct ScaledRowsBackward {
  Tensor x, scale, dy;
  Tensor dx, dscale;  // accumulated
};
void scaled_rows_backward(const ScaledRowsBackward& a, Stream stream);

}  // namespace ingot
