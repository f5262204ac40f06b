#pragma once
// The products of a mixture of experts in training: rows that are sorted by expert, and a matrix for each expert.
//   y[r] = w[e] x[r] + b[e]                 offsets[e] <= r < offsets[e + 1]
//   dx[r] = w[e]^T dy[r]     dw[e] += sum_r dy[r] x[r]^T     db[e] += sum_r dy[r]
// Rows from offsets[E] on belong to no expert: y = 0 and dx = 0. The offsets are on the operands' device. On a CPU; on
// a GPU kernels/grouped has the forward product of weights in weight tiles.
#include "ingot/core/tensor.h"

namespace ingot {

struct ExpertLinear {
  Tensor x, w, b;  // (R, K), (E, N, K), (E, N) or left out; f32 or f64, any row stride
  Tensor offsets;  // (E + 1) i32, ascending from 0 to at most R
  Tensor y;        // (R, N)
};
void expert_linear(const ExpertLinear& a, Stream stream);

struct ExpertLinearBackward {
  Tensor dy, x, w;  // (R, N); (R, K), only for dw; (E, N, K), only for dx
  Tensor offsets;
  Tensor dx;      // (R, K), or left out
  Tensor dw, db;  // (E, N, K), (E, N): accumulated, or left out
};
void expert_linear_backward(const ExpertLinearBackward& a, Stream stream);

}  // namespace ingot
