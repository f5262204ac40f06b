#pragma once
// The residual mix: each block reads the stream and the stream's first value.
// All tensors (T, C) with any row stride unless stated; vectors (C) hold one factor per channel. Gradients of vectors
// and scalars accumulate; each is summed over tokens in a fixed order. On a GPU matrices may be bf16 or f16, beside f32
// vectors and scalars.
#include "ingot/core/tensor.h"
#include "ingot/kernels/residual/workspace.h"

namespace ingot {

// y = a * x + b * x0                                    (a, b) per channel: the residual mix
//   dx = a * dy    dx0 += b * dy    da += sum_t x * dy    db += sum_t x0 * dy
struct Mix {
  Tensor x, x0, a, b, y;
};  // y may alias x
void mix(const Mix& m, Stream stream);
struct MixBackward {
  Tensor x, x0, a, b, dy;
  Tensor dx, dx0;    // dx written (may alias dy); dx0 accumulated
  Tensor da, db;     // (C) accumulated, or left out
  Tensor workspace;  // u8, residual_workspace_bytes(T, C, device)
};
void mix_backward(const MixBackward& m, Stream stream);

}  // namespace ingot
