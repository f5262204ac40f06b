#pragma once
// Shapes, gaps and alignments that reach every path of the kernels: vectors in one row and in many, elements one by
// one.
#include "ingot/testing/testing.h"

namespace ingot {

struct CopyCase {
  int64_t rows, cols, gap_from = 0, gap_to = 0, shift = 0;  // elements between rows; elements off an aligned address
};
constexpr CopyCase kCopyCases[] = {{1, 1},        {3, 7},           {5, 64},         {5, 64, 16, 0}, {5, 64, 0, 48},
                                   {5, 64, 3, 0}, {6, 40, 0, 0, 1}, {17, 24, 8, 16}, {1, 2056},      {0, 64},
                                   {4, 0}};
constexpr DType kFloats[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

// What is expected of a copy: rounded once, by way of float where the target is narrower than double.
inline double rounded(double x, DType t) {
  switch (t) {
    case DType::f64: return x;
    case DType::bf16: return float(bf16(float(x)));
    case DType::f16: return float(f16(float(x)));
    default: return float(x);
  }
}

}  // namespace ingot
