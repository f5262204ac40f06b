#pragma once
// y = cap * tanh(x / cap)
#include "ingot/core/tensor.h"

namespace ingot {

struct Softcap {
  Tensor x, y;  // (T, C), any row stride; y may alias x
  double cap = 30;
};
void softcap(const Softcap& a, Stream stream);

}  // namespace ingot
