#pragma once
// scaled_rows and its gradients beside their formulas in fp64, for tests of any backend. B: Buffer or DeviceBuffer.
#include <cmath>
#include <vector>

#include "ingot/kernels/scaled_add/scaled_rows.h"
#include "ingot/testing/any_buffer.h"

namespace ingot::scaled_rows_cases {

struct Size {
  int64_t rows, cols, gap;
};
const Size kSizes[] = {{1, 1, 0}, {3, 7, 2}, {0, 8, 0}, {5, 130, 0}, {66, 515, 3}, {7, 516, 0}};

template <class B> B filled(DType type, const Size& s, uint64_t seed) {
  B b(type, {s.rows, s.cols}, s.cols + s.gap);
  testing::fill_normal(testing::host_of(b), seed);
  testing::send(b);
  return b;
}

template <class B> void expect_forward(DType type, DType out, const Size& s, auto&& call) {
  B x = filled<B>(type, s, 1), y = filled<B>(out, s, 2), scale = testing::normal<B>(type, {s.rows}, 3);
  call(ScaledRows{.x = x, .scale = scale, .y = y});
  const auto of_x = testing::values(testing::host_of(x)), factor = testing::values(testing::host_of(scale));
  std::vector<double> want(of_x.size());
  for (size_t i = 0; i < want.size(); ++i) want[i] = factor[i / size_t(s.cols)] * of_x[i];
  // One rounding of the product in x's type and one to y's; the smallest numbers of f16 are 2^-24 apart.
  const double smallest = out == DType::f16 ? std::ldexp(1, -25) : 0;
  testing::expect_close(y, want, smallest, 1.01 * (testing::roundoff(type) + testing::roundoff(out)));
}

template <class B> void expect_backward(DType type, const Size& s, bool frozen, auto&& call) {
  B x = filled<B>(type, s, 1), dy = filled<B>(type, s, 2), dx = filled<B>(type, s, 4);
  B scale = testing::normal<B>(type, {s.rows}, 3), dscale = testing::normal<B>(type, {s.rows}, 5);
  const auto of = [](const B& b) { return testing::values(testing::host_of(b)); };
  const auto of_x = of(x), of_dy = of(dy), factor = of(scale), before = of(dx), sums_before = of(dscale);
  call(ScaledRowsBackward{.x = x, .scale = scale, .dy = dy, .dx = dx, .dscale = frozen ? Tensor() : Tensor(dscale)});
  std::vector<double> want(before), sums(sums_before);
  double largest = 0, terms = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const size_t row = i / size_t(s.cols);
    want[i] += factor[row] * of_dy[i];
    largest = std::max(largest, std::abs(before[i]) + std::abs(factor[row] * of_dy[i]));
    if (!frozen) sums[row] += of_x[i] * of_dy[i];
    terms = std::max(terms, std::abs(of_x[i] * of_dy[i]));
  }
  const double u = testing::roundoff(type);
  testing::expect_close(dx, want, 2.02 * u * largest, 0);  // a product and a sum, each rounded
  // Each term passes at most `cols` additions.
  testing::expect_close(dscale, sums, u * (double(s.cols) + 2) * (terms * double(s.cols) + 5), 0);
}

}  // namespace ingot::scaled_rows_cases
