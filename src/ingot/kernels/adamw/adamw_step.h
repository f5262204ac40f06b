#pragma once
// The constants of an AdamW step for the vector code.
namespace ingot::detail {
template <class T> struct AdamWStep {
  T grad_scale;
  T beta1, rest1, beta2, rest2;  // rest = 1 - beta
  T step;                        // lr / (1 - beta1^step)
  T root;                        // 1 / sqrt(1 - beta2^step)
  T eps, decay;                  // decay = lr * weight_decay; 1 - decay would lose its digits
};
}  // namespace ingot::detail
