#pragma once
// An earlier output merged into the residual stream, gated or not.
// All tensors (T, C) with any row stride unless stated; vectors (C) hold one factor per channel. Gradients of vectors
// and scalars accumulate; each is summed over tokens in a fixed order. On a GPU matrices may be bf16 or f16, beside f32
// vectors and scalars.
#include "ingot/core/tensor.h"
#include "ingot/kernels/residual/workspace.h"

namespace ingot {

// a = w * skip     y = a + sigmoid(gate) * (x - a)      w, gate per channel; gate left out: y = x + a
//   dx = g dy    dskip += (1-g) w dy    dw += sum_t (1-g) skip dy    dgate += g(1-g) sum_t (x - a) dy
struct SkipMerge {
  Tensor x, skip, w, gate, y;
};  // y may alias x
void skip_merge(const SkipMerge& s, Stream stream);
struct SkipMergeBackward {
  Tensor x, skip, w, gate, dy;
  Tensor dx, dskip;          // dx written (may alias dy); dskip accumulated
  Tensor dw, dgate;          // (C) accumulated, or left out
  Tensor workspace;          // u8, residual_workspace_bytes(T, C, device)
  bool write_dskip = false;  // dskip is written instead
};
void skip_merge_backward(const SkipMergeBackward& s, Stream stream);

}  // namespace ingot
