#pragma once
// Shapes, gaps and alignments so that every path of the kernels runs: vectors in one row and in many, elements one by
// one.
#include "ingot/kernels/copy/copy.h"
#include "ingot/testing/any_buffer.h"

namespace ingot {

struct CopyCase {
  int64_t rows, cols, gap_from = 0, gap_to = 0, shift = 0;  // elements between rows; elements off an aligned address
};
constexpr CopyCase kCopyCases[] = {{1, 1},        {3, 7},           {5, 64},         {5, 64, 16, 0}, {5, 64, 0, 48},
                                   {5, 64, 3, 0}, {6, 40, 0, 0, 1}, {17, 24, 8, 16}, {1, 2056},      {0, 64},
                                   {4, 0}};
constexpr DType kFloats[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

// The expected result of a copy: rounded once, by way of float where the target is narrower than double.
inline double rounded(double x, DType t) {
  switch (t) {
    case DType::f64: return x;
    case DType::bf16: return float(bf16(float(x)));
    case DType::f16: return float(f16(float(x)));
    default: return float(x);
  }
}

// Rows are written from row `at` on; rows outside the target are skipped, and no other element is written.
template <class B> void copies_rows_at_a_place() {
  for (DType type : {DType::bf16, DType::f32, DType::i32})
    for (const int at : {0, 3, 5, -1, 7, 100}) {
      B from(type, {3, 2, 5}), to(type, {7, 2, 5}), place(DType::i32, {1});
      std::vector<double> x(30), y(70, -1), want = y;
      for (size_t i = 0; i < x.size(); ++i) x[i] = double(i);
      testing::assign(testing::host_of(from), x), testing::assign(testing::host_of(to), y);
      testing::assign(testing::host_of(place), std::vector<double>{double(at)});
      testing::send(from), testing::send(to), testing::send(place);
      copy_at({.from = from, .to = to, .at = place}, {});
      for (int row = 0; row < 3; ++row)
        for (int c = 0; c < 10 && row + at >= 0 && row + at < 7; ++c)
          want[size_t(10 * (row + at) + c)] = x[size_t(10 * row + c)];
      testing::expect_close(to, want, 0, 0);
    }
}

}  // namespace ingot
