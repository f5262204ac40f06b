#pragma once
// The new contents of the two lanes after a block.
// All tensors (T, C) with any row stride unless stated; vectors (C) hold one factor per channel. Gradients of vectors
// and scalars accumulate; each is summed over tokens in a fixed order. On a GPU matrices may be bf16 or f16, beside f32
// vectors and scalars.
#include "ingot/core/tensor.h"
#include "ingot/kernels/residual/workspace.h"

namespace ingot {

// Two lanes fed by two branches, a (attention) and b (MLP), both given before their scales are applied:
//   out0 = r[0] lane0 + p[0,0] scale_a a + p[1,0] scale_b b
//   out1 = r[1] lane1 + p[0,1] scale_a a + p[1,1] scale_b b
// r (2) and p (2, 2) are learned scalars; scale_a and scale_b per channel, or left out.
struct LaneWrite {
  Tensor lane0, lane1, a, b, scale_a, scale_b, r, p;
  Tensor out0, out1;  // may alias lane0, lane1
};
void lane_write(const LaneWrite& w, Stream stream);
struct LaneWriteBackward {
  Tensor lane0, lane1, a, b, scale_a, scale_b, r, p, dout0, dout1;
  Tensor dlane0, dlane1;              // written; may alias dout0, dout1
  Tensor da, db;                      // written: gradients of the unscaled branches
  Tensor dscale_a, dscale_b, dr, dp;  // accumulated, or left out
  Tensor workspace;                   // u8, residual_workspace_bytes(T, C, device)
};
void lane_write_backward(const LaneWriteBackward& w, Stream stream);

}  // namespace ingot
