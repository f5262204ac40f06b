#pragma once
// The operations between two branches of a residual stream in one pass over its rows: a branch is added, the first rows
// are mixed in, and the rows are normalised for the next branch. The reference is three operations in turn (scaled_add,
// mix, rmsnorm), each rounding to the rows' type. On a GPU a single kernel computes everything for rows of 16 bits, up
// to 1,024 wide, without w and with at most one of branch and x0 (backward: of branch and a; also with rstd, and with
// dsum or more); all further cases call the three operations. All matrices are (T, C) with any row stride; vectors are
// (C), f32 beside 16-bit types.
#include "ingot/core/tensor.h"
#include "ingot/kernels/residual/workspace.h"

namespace ingot {

// s = x + scale * branch       m = a * s + b * x0       y = m * rstd * norm_scale * w
// Without a branch s is x, without x0 m is s.
struct ResidualNorm {
  Tensor x;
  Tensor branch, scale, sum;  // sum: s, written; scale left out: 1
  Tensor x0, a, b, mixed;     // mixed: m, written
  Tensor w;                   // (C) or left out
  Tensor y, rstd;             // rstd (T), or left out
  double eps = 1e-5, norm_scale = 1;
};
void residual_norm(const ResidualNorm& r, Stream stream);

// d = the gradient of m through the norm + dsum
// with a: dx = a * d, and with x0: dx0 += b * d, da += sum_t x * d, db += sum_t x0 * d; without: dx = d
// then dx += more: the gradient of a further reader of x
// with a branch: dbranch = scale * dx, dscale += sum_t branch * dx
// `m` is the norm's input: the mixed rows, or without a mix s of the forward pass. With a mix, `x` is s.
struct ResidualNormBackward {
  Tensor dy, m, rstd, dsum;         // dsum may be left out
  Tensor w, dw;                     // dw accumulated
  Tensor x, x0, a, b, dx0, da, db;  // da, db left out where frozen; x and x0 too where dx0 is not needed
  Tensor dx;                        // written; may alias dsum
  Tensor more, spare;               // spare: scratch memory of dx's shape where more is dx itself
  Tensor branch, scale, dbranch, dscale;
  Tensor workspace, norm_workspace;  // residual_workspace_bytes, rmsnorm_backward_workspace_bytes
  double eps = 1e-5, norm_scale = 1;
};
void residual_norm_backward(const ResidualNormBackward& r, Stream stream);

}  // namespace ingot
