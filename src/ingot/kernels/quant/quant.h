#pragma once
// Weights in few bits, and products that read the stored form.
//   mxfp4: w[n,k] = e2m1(code) * 2^(s - 127), one scale byte s per 32 numbers of a row; s = 255 is NaN
//          (OCP Microscaling 1.0). Two codes per byte, the earlier code in the low half.
//   fp8:   w[n,k] = e4m3(byte) * scale[n], one fp32 scale per row.
//   e2m1 is {0, 0.5, 1, 1.5, 2, 3, 4, 6} with a sign; e4m3 has a largest value of 448, no infinity, and NaN at 0x7f.
#include <cstdint>

#include "ingot/core/tensor.h"

namespace ingot {

enum class WeightFormat : uint8_t { f64, f32, bf16, fp8, mxfp4 };
const char* name_of(WeightFormat f);
std::ostream& operator<<(std::ostream& out, WeightFormat f);

constexpr int64_t kMxBlock = 32;  // numbers with a common scale

// Row after row, or in weight tiles of 16 x 64 numbers in the order of matrix instructions (weight_tiles.h).
enum class WeightLayout : uint8_t { rows, weight_tiles };

// A stored matrix (N, K), or a bank (E, N, K) of matrices. Contiguous; a view, like a Tensor.
struct WeightMatrix {
  WeightFormat format = WeightFormat::f32;
  // rows: f64, f32, bf16: (..., N, K); fp8: (..., N, K) u8; mxfp4: (..., N, K / 32, 16) u8
  // weight tiles: (..., row tiles, bytes of a row tile) u8
  Tensor data;
  Tensor scales;  // for rows: fp8: (..., N) f32; mxfp4: (..., N, K / 32) u8; else empty
  WeightLayout layout = WeightLayout::rows;
  int64_t n = 0, k = 0;  // of weight tiles: N and K, without the padding of the last weight tiles

  WeightMatrix() = default;
  explicit WeightMatrix(const Tensor& plain);  // f64, f32 or bf16
  WeightMatrix(WeightFormat f, const Tensor& d, const Tensor& s) : format(f), data(d), scales(s) {}
  explicit operator bool() const { return bool(data); }
  bool in_weight_tiles() const { return layout == WeightLayout::weight_tiles; }
  bool is_bank() const { return data.rank() == (format == WeightFormat::mxfp4 && !in_weight_tiles() ? 4 : 3); }
  int64_t rows() const { return in_weight_tiles() ? n : data.size(is_bank() ? 1 : 0); }
  int64_t cols() const {
    return in_weight_tiles() ? k : format == WeightFormat::mxfp4 ? data.size(-2) * kMxBlock : data.size(-1);
  }
  int64_t bytes() const { return data.bytes() + (scales ? scales.bytes() : 0); }
  WeightMatrix at(int64_t expert) const;  // the matrix of one expert of a bank
  // Rows [begin, end) of a matrix. In weight tiles, `begin` is a multiple of 16, and so is `end` unless it is the last
  // row's end.
  WeightMatrix row_range(int64_t begin, int64_t end) const;
};
void check(const WeightMatrix& w, const char* op, const char* name);  // throws unless the parts fit together
// The bytes of a stored matrix. Throws where the format cannot hold rows of `cols` numbers: mxfp4 needs a multiple
// of 32.
int64_t weight_bytes(WeightFormat f, int64_t rows, int64_t cols);

// Stored numbers as (N, K) f32 or f64: exact, but for fp8 products rounded once to the output's type.
void dequantise(const WeightMatrix& w, const Tensor& out, Stream stream);
// Converts f32 numbers (N, K) to the matrix's own format: to nearest, ties to even, saturating. An mxfp4 block takes,
// of the two best candidates, the scale with the smaller squared error (if equal, the smaller scale); an fp8 row takes
// max |x| / 448. Infinities and NaN are refused.
void quantise(const Tensor& x, const WeightMatrix& w, Stream stream);

// y = x W^T + b, fp32 sums. Up to 8 rows of x read the stored weights once, without a widened copy in memory; with more
// rows a few rows of W at a time are widened. f64 operands take the plain loop, the oracle.
struct StoredLinear {
  Tensor x;        // (T, K)
  WeightMatrix w;  // (N, K)
  Tensor b, y;     // (N) or left out, (T, N)
};
void stored_linear(const StoredLinear& a, Stream stream);

float e2m1_value(int code);  // 0 to 15
float e4m3_value(uint8_t byte);
uint8_t e4m3_nearest(float x);  // ties to even, saturating; NaN stays NaN
int e2m1_nearest(float x);
float e8m0_value(uint8_t scale);  // 2^(scale - 127)

}  // namespace ingot
