#pragma once
// Rotary position embedding. Pair j of a head (first `rotary_dim` dimensions) is rotated by pos * frequency[j]:
//   half split:   (x1, x2) = (x[j], x[j + rotary_dim/2])      interleaved: (x[2j], x[2j+1])
//   sign = +1 (Llama): y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin
//   sign = -1:         y1 = x1 cos + x2 sin,  y2 = x2 cos - x1 sin
// The backward pass is the rotation by the opposite angle. Dimensions beyond rotary_dim pass through.
#include <vector>

#include "ingot/core/tensor.h"

namespace ingot {

// How the frequencies theta_j = base^(-2j / rotary_dim) are stretched for contexts longer than in training.
struct RopeScaling {
  enum Kind { none, ntk, yarn, linear, llama3 } kind = none;
  double factor = 1;                     // how many times longer
  double original_context = 0;           // yarn, llama3: the context the model was trained with
  double beta_fast = 32, beta_slow = 1;  // yarn, llama3 (4 and 1): rotations at which interpolation begins and ends
  bool truncate = true;                  // yarn: round the ramp's ends to whole pairs
  double attention_factor = 0;           // yarn: factor on cos and sin; 0 means 0.1 ln(factor) + 1
};
struct RopeFrequencies {
  std::vector<double> theta;  // rotary_dim / 2 angles per position
  double amplitude = 1;       // multiplies cos and sin
};
// ntk: base' = base * factor^(rotary_dim / (rotary_dim - 2)).   yarn: Peng et al. 2023, as GPT-OSS uses it.
// linear: all angles are divided by factor.   llama3: as yarn, with a ramp over the turns in the original context.
RopeFrequencies rope_frequencies(int64_t rotary_dim, double base, const RopeScaling& scaling = {});

// cos and sin of every position: (positions, rotary_dim / 2), amplitude included; f32 or f64.
void rope_table(const RopeFrequencies& f, const Tensor& cos, const Tensor& sin);

struct Rope {
  Tensor x, y;       // (T, H, D), any token and head stride; y may alias x
  Tensor positions;  // (T) i32: rows of the table; on a GPU a position outside takes the last row
  Tensor cos, sin;   // (P, rotary_dim / 2) f32, or f64 when x is f64
  bool interleaved = false;
  int sign = +1;
};
void rope(const Rope& a, Stream stream);
// dx = rotation of dy by the opposite angle: a.x is dy, a.y is dx.
void rope_backward(const Rope& a, Stream stream);

// Per-head QK norm, rotation and gain in one pass:
//   n = x * rstd (over D, no weight)   r = rope(n)   y = r * gain[h]
struct QkNormRope {
  Tensor x, y;                 // (T, H, D); y may alias x, but the backward pass needs x
  Tensor positions, cos, sin;  // as Rope; cos left out: no rotation
  Tensor gain;                 // (H) or left out
  double eps = 0x1p-23;        // fp32's epsilon, PyTorch's default
  bool normalise = true;
  bool interleaved = false;
  int sign = +1;
};
void qk_norm_rope(const QkNormRope& a, Stream stream);
// dgain[h] += sum over tokens of r . dy[h]; dx through gain, rotation and norm. Recomputes rstd from x.
struct QkNormRopeBackward {
  Tensor x, dy, dx;  // dx may alias dy
  Tensor positions, cos, sin, gain;
  Tensor dgain;          // (H) accumulated, or left out
  double eps = 0x1p-23;  // fp32's epsilon, PyTorch's default
  bool normalise = true;
  bool interleaved = false;
  int sign = +1;
  Tensor workspace;  // with dgain: u8, qk_norm_rope_backward_workspace_bytes(...); may be left out on a CPU
};
void qk_norm_rope_backward(const QkNormRopeBackward& a, Stream stream);
int64_t qk_norm_rope_backward_workspace_bytes(int64_t tokens, int64_t heads, Device device);

}  // namespace ingot
