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

// Slices of a tensor of rank 3, without gaps inside and `gap` rows apart from each other: whole vectors, an odd number
// of elements, and rows that are contiguous in one operand only.
struct SliceCase {
  int64_t slices, rows, cols, gap_from, gap_to, columns_apart;
};
constexpr SliceCase kSliceCases[] = {{3, 2, 64, 1, 4, 0}, {5, 3, 8, 0, 2, 0}, {4, 3, 5, 1, 1, 0}, {3, 2, 24, 1, 2, 8}};

// Copies and fills slices, and expects that nothing else is written.
template <class B> void copies_and_fills_slices(auto&& copy_slices, auto&& fill_slices) {
  for (DType s : {DType::f32, DType::bf16})
    for (DType d : {DType::f32, DType::bf16})
      for (const SliceCase& c : kSliceCases) {
        const int64_t rows_from = c.rows + c.gap_from, rows_to = c.rows + c.gap_to, wide = c.cols + c.columns_apart;
        B from(s, {c.slices, rows_from, wide}), to(d, {c.slices, rows_to, c.cols});
        testing::fill_normal(testing::host_of(from), 1, 3), testing::fill_normal(testing::host_of(to), 2, 3);
        testing::send(from), testing::send(to);
        auto want = testing::values(testing::host_of(to));
        const auto x = testing::values(testing::host_of(from));
        const auto each = [&](auto&& use) {
          for (int64_t i = 0; i < c.slices; ++i)
            for (int64_t r = 0; r < c.rows; ++r)
              for (int64_t k = 0; k < c.cols; ++k)
                use(size_t((i * rows_to + r) * c.cols + k), size_t((i * rows_from + r) * wide + k));
        };
        const Tensor part = Tensor(to).slice(1, 0, c.rows);
        copy_slices(Copy{.from = Tensor(from).slice(1, 0, c.rows).slice(2, 0, c.cols), .to = part});
        each([&](size_t at, size_t from_at) { want[at] = rounded(x[from_at], d); });
        testing::expect_close(to, want, 0, 0);
        fill_slices(Fill{.to = part, .value = 2});
        each([&](size_t at, size_t) { want[at] = 2; });
        testing::expect_close(to, want, 0, 0);
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
