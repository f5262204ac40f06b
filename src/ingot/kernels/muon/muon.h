#pragma once
// Muon (Jordan 2024) on a bank of equally shaped matrices (B, R, C):
//   buf = mu buf + g ;  u = g + mu buf (nesterov) or buf
//   u = u / max(|row|, 1e-7) per row                       (row_normalise)
//   X = u / (|u|_F + 1e-7), transposed when R > C
//   steps times: A = X X^T ; B = b A + c A A ; X = a X + B X
//   p = p (1 - lr wd) - lr sqrt(max(1, R / C)) X
// Where the long side is at least twice the short side, matrices iterate on A (newton_schulz.h): on a CPU in fp32 and
// fp64 they multiply X once in five steps, which leaves X errors of some 500 roundings where singular values are near
// zero, and on a GPU with bf16 products twice. A zero gradient gives a zero update, never NaN. On a GPU parameters are
// f32 or bf16; with bf16 products the iteration runs on Ingot's kernels in f16, whose roundings are smaller than those
// of bf16, and only half of each symmetric product is computed. Coefficients with which singular values would leave
// f16's range are refused. With other types of products the iteration runs on cuBLASLt.
#include "ingot/core/tensor.h"
#include "ingot/kernels/linear/linear.h"

namespace ingot {

struct Muon {
  Tensor p, g, momentum;  // (B, R, C)
  Tensor workspace;       // u8, muon_workspace_bytes(...)
  double lr = 0.02, mu = 0.95, weight_decay = 0;
  double grad_scale = 1;  // g is multiplied by this first
  Tensor factor;          // (1) f64, and by this (clip_factor); not finite: nothing is written. Left out: 1
  Tensor rates;  // (3) f64: lr, mu and weight_decay in place of the numbers above, so that the replays of a graph may
                 // change the rates
  bool nesterov = true, row_normalise = true;
  int steps = 5;
  double a = 3.4445, b = -4.7750, c = 2.0315;
  Products products = Products::fp32;
};
void muon(const Muon& m, Stream stream);
int64_t muon_workspace_bytes(int64_t count, int64_t rows, int64_t cols, DType dtype, Device device);

// x (R, C) is replaced by its approximate orthogonal factor. Used by muon, and to initialise.
struct NewtonSchulz {
  Tensor x, workspace;  // u8, the workspace of a bank with a single matrix
  int steps = 5;
  double a = 3.4445, b = -4.7750, c = 2.0315;
  Products products = Products::fp32;
};
void newton_schulz(const NewtonSchulz& n, Stream stream);

}  // namespace ingot
