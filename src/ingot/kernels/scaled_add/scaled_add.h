#pragma once
// A branch added to the residual stream.
// All tensors (T, C) with any row stride unless stated; vectors (C) hold one factor per channel. Gradients of vectors
// and scalars accumulate; each is summed over tokens in a fixed order. On a GPU matrices may be bf16 or f16, beside f32
// vectors and scalars.
#include "ingot/core/tensor.h"
#include "ingot/kernels/residual/workspace.h"

namespace ingot {

// y = x + scale * branch                                scale per channel, or left out: 1
//   dbranch = scale * dy    dscale += sum_t branch * dy    (dx is dy)
struct ScaledAdd {
  Tensor x, branch, scale, y;
};  // y may alias x or branch
void scaled_add(const ScaledAdd& s, Stream stream);
struct ScaledAddBackward {
  Tensor dy, branch, scale;
  Tensor dbranch;    // written; may alias dy
  Tensor dscale;     // (C) accumulated, or left out
  Tensor workspace;  // u8, residual_workspace_bytes(T, C, device)
};
void scaled_add_backward(const ScaledAddBackward& s, Stream stream);

}  // namespace ingot
