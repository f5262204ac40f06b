#pragma once
// Operands and comparisons with the product in fp64, for the tests of both forms of the core. Storage: testing::
// DeviceBuffer, or testing::EmulatedBuffer where kernels run on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ingot/gpu/gemm/shape.h"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/testing/testing.h"

namespace ingot::gemm::cases {

using ptx::Major;
using testing::Buffer;

// A matrix (batch, rows, k) of normal numbers on the host, and the same in the kernel's order: K-major or MN-major,
// with a gap after each row that must not be read.
template <class Storage> struct Matrix {
  Matrix(DType t, Major major, int64_t batch, int64_t rows, int64_t k, uint64_t seed)
      : rows(rows),
        k(k),
        values(DType::f64, {batch, rows, k}),
        stored(t, major == Major::k ? ingot::Shape{batch, rows, k} : ingot::Shape{batch, k, rows},
               ceil_div(major == Major::k ? k : rows, 8) * 8 + 8) {
    const Buffer given(t, {batch, rows, k});  // the same numbers in either order
    testing::fill_normal(given, seed);
    testing::assign(values, testing::values(given));
    const Tensor to = stored.host();
    std::vector<double> turned(size_t(to.numel()));
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < k; ++i)
          turned[size_t(major == Major::k ? (b * rows + r) * k + i : (b * k + i) * rows + r)] = row(b, r)[i];
    testing::assign(to, turned);
    stored.upload();
  }
  const double* row(int64_t b, int64_t r) const { return values.tensor().ptr<double>() + (b * rows + r) * k; }
  int64_t rows, k;
  Buffer values;
  Storage stored;
};

struct Expected {
  double sum, size;  // of products; of their absolute values
};
inline Expected dot(const double* a, const double* b, int64_t k) {
  Expected e{0, 0};
  for (int64_t i = 0; i < k; ++i) e.sum += a[i] * b[i], e.size += std::fabs(a[i] * b[i]);
  return e;
}
template <class Storage>
Expected dot(const Matrix<Storage>& a, const Matrix<Storage>& b, int64_t batch, int64_t m, int64_t n) {
  return dot(a.row(batch, m), b.row(batch, n), a.k);
}

// Compares every element of c (batch, M, N) with want(batch, m, n). A tensor core truncates its addends: 2^-23 of the
// size for each of K additions, then the output's rounding. On failure: the distribution of the wrong elements, and the
// first wrong element.
template <class Storage, class Want> void check(Storage& c, int64_t k, Want&& want) {
  c.download();
  EXPECT_TRUE(c.untouched()) << "written outside of C";
  const Tensor host = c.host();
  const std::vector<double> got = testing::values(host);
  const int64_t batch = host.size(0), rows = host.size(1), cols = host.size(2);
  int64_t wrong = 0;
  std::string first;
  for (int64_t b = 0, i = 0; b < batch; ++b)
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t n = 0; n < cols; ++n, ++i) {
        const Expected e = want(b, m, n);
        const double allowed = 1.01 * testing::roundoff(host.dtype) * std::fabs(e.sum) + double(k) * 0x1p-23 * e.size;
        if (std::fabs(got[size_t(i)] - e.sum) <= allowed) continue;
        if (++wrong <= 4)
          first +=
              ingot::detail::concat(" (", b, ", ", m, ", ", n, "): found ", got[size_t(i)], ", expected ", e.sum, ";");
      }
  EXPECT_EQ(wrong, 0) << "of " << got.size() << ":" << first;
}

}  // namespace ingot::gemm::cases
