#pragma once
// s[t,:] = x[t,:] + residual[t,:]          (s = x without a residual)
// y[t,:] = s[t,:] * rstd[t] * scale * (w_offset + w)     rstd[t] = 1 / sqrt(mean(s[t,:]^2) + eps)
#include "ingot/core/tensor.h"

namespace ingot {

struct RmsNorm {
  Tensor x;              // (T, C) or (T, H, C): every last dimension is a row; any row stride
  Tensor w;              // (C) or left out: then the factor is `scale` alone
  Tensor residual, sum;  // (T, C) both or neither; sum may alias x or residual
  Tensor y;              // (T, C); may alias x when there is no residual
  Tensor rstd;           // (T) f32 (f64 when x is f64), or left out; kept for the backward pass
  double eps = 1e-5;
  double scale = 1;          // a constant factor, such as 1 / sqrt(layer + 1)
  bool unit_offset = false;  // multiply by 1 + w
};
void rmsnorm(const RmsNorm& a, Stream stream);

// With g = dy * scale * (w_offset + w), and the normalised row n = s * rstd:
//   ds = rstd * (g - n * mean(g * n)) + dsum         dw += sum_t dy * scale * n
// accumulate_dx adds ds to dx instead of writing it (x and residual have the same gradient, ds).
struct RmsNormBackward {
  Tensor dy, s, w, rstd;  // as above; s is x, or sum where there was a residual; rstd left out: recomputed
  Tensor dsum;            // (T, C) the gradient of s through further paths, or left out
  Tensor dx;              // (T, C) or left out (frozen input); may alias dy or dsum
  Tensor dw;              // (C) f32 (f64 for f64), accumulated, or left out
  Tensor workspace;       // rmsnorm_backward_workspace_bytes(...) bytes of u8 when dw is wanted
  double eps = 1e-5, scale = 1;
  bool unit_offset = false, accumulate_dx = false;
};
void rmsnorm_backward(const RmsNormBackward& a, Stream stream);
int64_t rmsnorm_backward_workspace_bytes(int64_t rows, int64_t cols, DType dtype, Device device);

// Traffic and arithmetic, for benchmarks.
int64_t bytes(const RmsNorm& a);
int64_t flops(const RmsNorm& a);

}  // namespace ingot
