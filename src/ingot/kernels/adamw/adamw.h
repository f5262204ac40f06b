#pragma once
// AdamW (Loshchilov & Hutter 2019), and the small updates around an optimizer step. Flat tensors of one dtype (f32 or
// f64).
//   m = b1 m + (1-b1) g     v = b2 v + (1-b2) g^2
//   p = p (1 - lr wd) - lr (m / (1-b1^step)) / (sqrt(v / (1-b2^step)) + eps)
#include <array>

#include "ingot/core/tensor.h"

namespace ingot {

struct AdamW {
  Tensor p, g, m, v;  // m may be left out where beta1 is 0
  Tensor copy;        // of p, bf16 or f16, written too; or left out
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  double grad_scale = 1;  // g is multiplied by this first
  Tensor factor;          // (1) f64, and by this (clip_factor); not finite: nothing is written. Left out: 1
  int64_t step = 1;       // counts from 1
  Tensor rates;  // (3) f64: adamw_rates() in place of lr, weight_decay and step, so that the replays of a graph may
                 // change the rates
};
void adamw(const AdamW& a, Stream stream);
// The numbers that change from step to step: lr / (1-b1^step), 1 / sqrt(1-b2^step), lr wd. A step has the same bits
// with `rates` and without.
std::array<double, 3> adamw_rates(const AdamW& a);

// average = decay * average + (1 - decay) * p
struct Ema {
  Tensor p, average;
  double decay = 0.999;
  Tensor factor;  // (1) f64, factor of the step that updated p; nothing is written where the factor is not finite. Left
                  // out: 1
  Tensor rate;    // (1) f64: replaces `decay`, as AdamW's rates replace lr
};
void ema(const Ema& e, Stream stream);

// sum = sum_i x_i^2, added up in fp64 over fixed blocks: the same for any number of threads.
struct SumOfSquares {
  Tensor x;          // of any floating type
  Tensor sum;        // (1) f64
  Tensor workspace;  // u8, sum_of_squares_workspace_bytes(...)
};
void sum_of_squares(const SumOfSquares& a, Stream stream);
int64_t sum_of_squares_workspace_bytes(int64_t numbers, Device device);

// norm = sqrt(sum_of_squares)     factor = max_norm / (norm + 1e-6) where 0 < max_norm < norm, NaN where the norm is
// not finite, else 1
struct ClipFactor {
  Tensor sum_of_squares, norm, factor;  // (1) f64; norm may alias sum_of_squares
  double max_norm = 0;                  // 0: no limit
};
void clip_factor(const ClipFactor& a, Stream stream);

// Whether every element is finite. For tensors in host memory (copy_to_host() brings tensors of a GPU).
bool all_finite(const Tensor& t);

}  // namespace ingot
