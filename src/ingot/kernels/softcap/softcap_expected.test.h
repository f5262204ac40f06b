#pragma once
#include <cmath>
#include <vector>

#include "ingot/testing/testing.h"

namespace ingot {

// A quotient, a tanh of some ulps and a product, each rounded; then a rounding to the type.
inline testing::Comparison softcap_agrees(const std::vector<double>& x, const Tensor& y, double cap) {
  std::vector<double> want;
  for (double v : x) want.push_back(cap * std::tanh(v / cap));
  const double u = testing::roundoff(y.dtype == DType::f64 ? DType::f64 : DType::f32);
  return testing::compare(y, want, 0, 8 * u + 1.01 * testing::roundoff(y.dtype));
}

}  // namespace ingot
