#pragma once
// AdamW (Loshchilov & Hutter 2019), and the small updates around an optimizer step. Flat tensors of one dtype (f32 or
// f64).
//   m = b1 m + (1-b1) g     v = b2 v + (1-b2) g^2
//   p = p (1 - lr wd) - lr (m / (1-b1^step)) / (sqrt(v / (1-b2^step)) + eps)
#include "ingot/core/tensor.h"

namespace ingot {

struct AdamW {
  Tensor p, g, m, v;
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  double grad_scale = 1;  // g is multiplied by this first (clipping)
  int64_t step = 1;       // counts from 1
};
void adamw(const AdamW& a, Stream stream);

// average = decay * average + (1 - decay) * p
struct Ema {
  Tensor p, average;
  double decay = 0.999;
};
void ema(const Ema& e, Stream stream);

// Sum of squares, added up in fp64 over fixed blocks: the same for any number of threads.
double sum_of_squares(const Tensor& t, Stream stream);
// True when every element is finite.
bool all_finite(const Tensor& t, Stream stream);

}  // namespace ingot
