#pragma once
// The pointwise glue of residual streams. All tensors (T, C) with any row stride unless stated; vectors (C) hold one
// factor per channel. Gradients of vectors and scalars accumulate; each is summed over tokens in a fixed order.
#include "ingot/core/tensor.h"

namespace ingot {

// y = a * x + b * x0                                    (a, b) per channel: the residual mix
//   dx (+)= a * dy    dx0 += b * dy    da += sum_t x * dy    db += sum_t x0 * dy
struct Mix {
  Tensor x, x0, a, b, y;
};  // y may alias x
void mix(const Mix& m, Stream stream);
struct MixBackward {
  Tensor x, x0, a, b, dy;
  Tensor dx, dx0;  // dx written (may alias dy); dx0 accumulated
  Tensor da, db;   // (C) accumulated, or left out
};
void mix_backward(const MixBackward& m, Stream stream);

// y = x + scale * branch                                scale per channel, or left out: 1
//   dbranch = scale * dy    dscale += sum_t branch * dy    (dx is dy)
struct ScaledAdd {
  Tensor x, branch, scale, y;
};  // y may alias x or branch
void scaled_add(const ScaledAdd& s, Stream stream);
struct ScaledAddBackward {
  Tensor dy, branch, scale;
  Tensor dbranch;  // written; may alias dy
  Tensor dscale;   // (C) accumulated, or left out
};
void scaled_add_backward(const ScaledAddBackward& s, Stream stream);

// a = w * skip     y = a + sigmoid(gate) * (x - a)      w, gate per channel; gate left out: y = x + a
//   dx = g dy    dskip += (1-g) w dy    dw += sum_t (1-g) skip dy    dgate += g(1-g) sum_t (x - a) dy
struct SkipMerge {
  Tensor x, skip, w, gate, y;
};  // y may alias x
void skip_merge(const SkipMerge& s, Stream stream);
struct SkipMergeBackward {
  Tensor x, skip, w, gate, dy;
  Tensor dx, dskip;  // dx written (may alias dy); dskip accumulated
  Tensor dw, dgate;  // (C) accumulated, or left out
};
void skip_merge_backward(const SkipMergeBackward& s, Stream stream);

// Two lanes fed by two branches, attn already scaled by attn_scale and mlp by mlp_scale:
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
};
void lane_write_backward(const LaneWriteBackward& w, Stream stream);

// y = alpha * x + beta * y
struct Axpby {
  Tensor x, y;
  double alpha = 1, beta = 1;
};
void axpby(const Axpby& a, Stream stream);

}  // namespace ingot
