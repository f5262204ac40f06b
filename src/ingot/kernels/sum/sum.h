#pragma once
// total += sum_i x_i, added one by one in fp64 on the CPU; elsewhere in a different, fixed order
#include "ingot/core/tensor.h"

namespace ingot {

struct Sum {
  Tensor x;      // flat, f32 or f64
  Tensor total;  // (1) f64
};
void sum(const Sum& a, Stream stream);

}  // namespace ingot
