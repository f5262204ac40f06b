#pragma once
// The products of a mixture of experts in training: rows that are sorted by expert, and a matrix for each expert.
//   y[r] = w[e] x[r] + b[e]                 offsets[e] <= r < offsets[e + 1]
//   dx[r] = w[e]^T dy[r]     dw[e] += sum_r dy[r] x[r]^T     db[e] += sum_r dy[r]
// Rows from offsets[E] on belong to no expert: y = 0 and dx = 0. The offsets are on the operands' device; on a GPU the
// host does not read them. On a CPU f32 and f64, on a GPU f32, bf16 and f16 with sums in fp32. A Hopper GPU computes
// 16-bit products on its tensor cores where the rows of operands begin at multiples of 16 bytes and the rows of the
// result are whole 16 bytes; a plain kernel computes everything else. Results repeat bit for bit. kernels/grouped has
// the forward product of weights in weight tiles.
#include "ingot/core/tensor.h"

namespace ingot {

struct ExpertLinear {
  Tensor x, w, b;  // (R, K), (E, N, K), (E, N) or left out; of one type, any row stride
  Tensor offsets;  // (E + 1) i32, ascending from 0 to at most R
  Tensor y;        // (R, N)
};
void expert_linear(const ExpertLinear& a, Stream stream);

struct ExpertLinearBackward {
  Tensor dy, x, w;  // (R, N); (R, K), only for dw; (E, N, K), only for dx
  Tensor offsets;
  Tensor dx;               // (R, K), or left out
  Tensor dw, db;           // (E, N, K), (E, N): accumulated, or left out
  bool overwrite = false;  // dw and db are set instead
};
void expert_linear_backward(const ExpertLinearBackward& a, Stream stream);

}  // namespace ingot
