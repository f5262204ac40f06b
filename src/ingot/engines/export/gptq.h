#pragma once
// GPTQ (Frantar et al., ICLR 2023): weights W [rows, cols] of y = x W^T become integers q and a scale s per row, so
// that the error of the products, sum over rows of (w - s q) H (w - s q)^T with H = sum of x^T x over calibration text,
// is small. Columns are rounded in the order of H's diagonal, the largest first, and each column is rounded after it
// was corrected for the errors of the earlier columns.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ingot/core/dtype.h"

namespace ingot {

struct GptqOptions {
  int bits = 6;                // 4 to 8: integers from -qmax to qmax = 2^(bits-1) - 1
  double clip_sigmas = 12.85;  // qmax stands for this many standard deviations of the row
  double damping = 0.01;       // added to H's diagonal, as a share of its mean
};
void check(const GptqOptions& o, const std::string& name);

struct QuantizedMatrix {
  int64_t rows = 0, cols = 0;
  int bits = 0;
  std::vector<int8_t> values;  // [rows, cols]
  std::vector<f16> scales;     // [rows]
};

// A matrix, and the sum of x^T x over its inputs x; errors contain `name`.
struct GptqMatrix {
  std::string name;
  int64_t rows = 0, cols = 0;
  std::span<const float> weights;   // [rows, cols]
  std::span<const double> hessian;  // [cols, cols], symmetric; read on and below the diagonal
};

// A column whose input was always 0 in calibration (H's diagonal is 0) is rounded alone. Errors: numeric for infinities
// and NaN in weights or Hessian, for scales beyond fp16, and for a Hessian still singular after the damping.
QuantizedMatrix quantize_gptq(const GptqMatrix& m, const GptqOptions& o);
// Uses the same scales, and rounds each weight by itself.
QuantizedMatrix quantize_to_nearest(const GptqMatrix& m, const GptqOptions& o);

std::vector<float> dequantize(const QuantizedMatrix& q);
// Sum over rows of (w - s q) H (w - s q)^T, in fp64.
double weighted_error(const GptqMatrix& m, const QuantizedMatrix& q);

}  // namespace ingot
