#pragma once
// What quant.cpp hands to every CPU level of quant.simd.cpp.
#include <cstdint>

namespace ingot::detail {

constexpr int kStoredRows = 8;  // rows of x that one pass over the weights serves

// y[t * y_row + n] = sum_k x[t * x_row + k] w[n, k] + bias[n] for n in [0, rows): t < tokens <= kStoredRows.
// bf16: data holds k numbers a row. fp8: bytes, and a scale per row. mxfp4: k / 2 bytes and k / 32 scales a row, and x
// with the 16 even numbers of every 32 before the 16 odd ones.
struct StoredDots {
  const void* data;
  const void* scales;
  const float* exponents;  // the value of each of the 256 mxfp4 scales
  const float* x;
  const float* bias;
  float* y;
  int64_t k, x_row, y_row, rows;
  int tokens;
};

// out[n * out_row + k] = w[n, k] for n in [0, rows); mxfp4 in the order of the row.
struct StoredWiden {
  const void* data;
  const void* scales;
  const float* exponents;
  float* out;
  int64_t k, out_row, rows;
};

}  // namespace ingot::detail
