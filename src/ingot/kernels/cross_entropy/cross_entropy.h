#pragma once
// Cross entropy of softcapped logits, alone or fused with the linear layer before it so that full logits never exist.
//   l = x W^T (+ x2 W2^T)     c = softcap * tanh(l / softcap)  (c = l when softcap = 0)
//   lse = log sum_v exp(c_v)     loss = lse - c_target + z_loss * lse^2       ignored targets: loss = 0, no gradient
//   dc = dloss * [ p * (1 + 2 z_loss lse) - onehot ]     dl = dc * (1 - (c / softcap)^2)
// With label_smoothing s the target is (1 - s) onehot + s / V: (1 - s) c_target + s mean_v(c_v) stands for c_target.
#include <span>

#include "ingot/core/tensor.h"
#include "ingot/kernels/linear/linear.h"

namespace ingot {

struct CrossEntropy {
  Tensor logits;   // (T, V), before the softcap
  Tensor targets;  // (T) i32 in [0, V) or ignore_index; an error names the first target outside; on a GPU its loss is a
                   // NaN
  Tensor loss, lse;                // (T) f32 (f64 for f64); lse may be left out
  Tensor dloss;                    // (T) the gradient of each row's loss, or left out: no dlogits
  Tensor dlogits;                  // (T, V); may alias logits; on a GPU bf16 or f16 beside f32 logits, too
  double softcap = 0, z_loss = 0;  // 0: none
  int32_t ignore_index = -1;       // may be a token's id: this token then has no loss
  double label_smoothing = 0;      // 0 to 1
};
void cross_entropy(const CrossEntropy& a, Stream stream);

// Losses, and where dloss is given also the gradients (the upstream gradient of every row is then known in advance, as
// for a mean), in one pass over chunks of rows: three products, and memory for one chunk of logits and, with several
// chunks, the weights in the products' order.
struct LinearCrossEntropy {
  Tensor x, w;       // (T, C), (V, C)
  Tensor x2, w2;     // (T, R), (V, R): a second pair whose product is added (a low-rank adapter), or left out
  Tensor targets;    // (T) i32
  Tensor loss, lse;  // (T); lse may be left out
  Tensor dloss;      // (T) or left out: losses only
  Tensor dx, dx2;    // (T, C), (T, R) written, or left out
  Tensor dw, dw2;    // (V, C), (V, R) accumulated, or left out (frozen); f32 of 16-bit operands, too
  Tensor workspace;  // u8, linear_cross_entropy_workspace_bytes(...) of as many rows or more
  double softcap = 0, z_loss = 0;
  int32_t ignore_index = -1;
  Products products = Products::fp32;
  double label_smoothing = 0;
  // (S + 1), in host memory: the rows [cu2[s], cu2[s + 1]) have their own second weight w2[s] and gradient dw2[s], of
  // (S, V, R).
  std::span<const int32_t> cu2;
};
void linear_cross_entropy(const LinearCrossEntropy& a, Stream stream);
int64_t linear_cross_entropy_workspace_bytes(int64_t rows, int64_t features, int64_t vocab, DType dtype,
                                             Products products, Device device);

}  // namespace ingot
