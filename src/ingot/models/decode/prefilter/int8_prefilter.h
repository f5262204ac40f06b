#pragma once
// The int8 prefilter: a copy of the head in 8 bits beside the bf16 head. The product with the copy reads half the bytes
// and gives for each row an interval that contains the row's logit, so that only the rows which may be sampled are read
// in bf16 (prefiltered_head.cuh): those which may have the largest logit, or the largest sum of logit and noise. The
// logits of these rows are those of the whole head, bit for bit, and so the sampled token is the same.
// A row w becomes s c with codes c. A code has a sign, three bits of exponent and four of mantissa: +-(1 + m / 16) 2^(e
// - 7). No code stands for zero, so that a code becomes a bf16 by moving bits alone. Let v be the activation vector
// that both products take (bf16), |.| the norm of the vector or of a row, and e = w - s c. Then for exact sums
//    |w v - s c v| <= |e| |v|                                                                   (Cauchy-Schwarz)
// The sum of either product is a tree over the products of 16 numbers each. With "at least single precision" (PTX, mma)
// an addition is accurate to 2^-23 of the largest number among its terms and its result, and all of these are at most P
// = sum |w_k| |v_k| <= |w| |v|, or the same sum for s c. There are 17 additions for 16 products, 15 between warps, and
// less than 32 roundings of scales, of a logit and of the bounds that are compared here. With
//    g = (17 / 16 padded columns + 64) 2^-23
// the error of either product is at most g P, and so
//    |logit - approximation| <= |v| b   of the row, b = |e| + 2 g (|w| + |e|)
// before both are multiplied by the same positive `output_scale`. Numbers that are flushed to zero on the way are far
// below 2^-100, which is added (range_of). Rows that are not finite, or could overflow, have no bound: they are always
// read in bf16. A row whose upper bound is below the lower bound of another row has a strictly smaller logit than that
// row.
#include <cmath>

#include "ingot/core/hd.h"
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

constexpr uint32_t kPrefilterTileBytes = 1024;  // bytes of a tile of 16 rows by 64 columns

INGOT_HD constexpr double prefilter_rounding(uint32_t cols) {
  return (17.0 / 16 * ((cols + 63) / 64 * 64) + 64) * 0x1p-23;
}
INGOT_HD inline float prefilter_value(uint32_t code) {
  const float size = float(16 + code % 16) * (1.f / 16) / float(1u << (7 - code / 16 % 8));
  return code >= 128 ? -size : size;
}
constexpr float kLargestCode = 1.9375f;
// The code nearest to x.
INGOT_HD inline uint32_t prefilter_code(double x) {
  const double a = x < 0 ? -x : x;
  uint32_t code = 0;
  if (a > 0x1p-7) {
    uint32_t e = 7;
    while (e > 0 && a >= 1.0 / double(1u << (e - 1))) --e;
    // 2^-e <= a < 2^(1 - e). The mantissa is in sixteenths; a mantissa that rounds up to 16 becomes the first code of
    // the next exponent.
    const uint32_t m = uint32_t(int(a * double(1u << e) * 16 + 0.5)), up = (7 - e) * 16 + m - 16;
    code = a >= 2 || up > 127 ? 127 : up;
  }
  return code + (x < 0 ? 128 : 0);
}
// The offset of the code of number (row, column) in a weight tile. Bytes 0 and 2 of a word become one register of
// operand A of mma.m16n8k16, bytes 1 and 3 another; a lane reads two steps of 16 columns at once.
INGOT_HD constexpr uint32_t prefilter_place(uint32_t row, uint32_t col) {
  const uint32_t step = col / 16, k = col % 16, lane = row % 8 * 4 + k % 8 / 2, word = step % 2 * 2 + row / 8;
  return step / 2 * 512 + lane * 16 + word * 4 + k % 2 * 2 + k / 8;
}

// The matrix of the head's codes; without data where `memory` is null.
Matrix prefilter_matrix(const Matrix& head, uint8_t* memory);
// Writes the codes and the bounds of the rows of a bf16 head.
void make_prefilter(const Matrix& head, const Int8Prefilter& to, Stream stream);

}  // namespace ingot::decode
