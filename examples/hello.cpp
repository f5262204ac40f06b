// RMSNorm of two rows, over views of the caller's memory.
#include <cstdio>
#include <vector>

#include "ingot/kernels/rmsnorm/rmsnorm.h"

int main() {
  std::vector<float> x = {3, 4, 0, 0, 1, 1, 1, 1}, y(8);
  const ingot::Tensor rows(x.data(), {2, 4}), out(y.data(), {2, 4});
  ingot::rmsnorm({.x = rows, .y = out, .eps = 0}, ingot::Stream{});
  for (float v : y) std::printf("%.2f ", v);  // 1.20 1.60 0.00 0.00 1.00 1.00 1.00 1.00
  std::printf("\n");
}
