#pragma once
// A head in 8 bits beside the one in bf16: a product of half the bytes says of each row between which two numbers its
// logit lies, so that only rows that may be the largest are read in bf16 (screened_head.cuh). Those get the logits they
// always get, bit for bit, and so the likeliest id is the same.
//
// A row w becomes s c, of codes c: a sign, three bits of exponent and four of mantissa, +-(1 + m / 16) 2^(e - 7), and
// no zero, so that bits alone have to be moved for a bf16. Let v be the column that both products take (bf16),
// |.| its norm or a row's, e = w - s c. Then for exact sums
//     |w v - s c v| <= |e| |v|                                                                   (Cauchy-Schwarz)
// Each product's sum is a tree over the products of 16 numbers each: with "at least single precision" (PTX, mma) an
// addition is right to 2^-23 of the largest of what it adds or gives, and all of these are at most
// P = sum |w_k| |v_k| <= |w| |v|, or its like of s c. There are 17 additions for 16 products, 15 between warps and less
// than 32 roundings of scales, of a logit and of what is compared here: with
//     g = (17 / 16 padded columns + 64) 2^-23
// either product's error is at most g P, so
//     |logit - approximation| <= |v| b   of the row, b = |e| + 2 g (|w| + |e|)
// before both are multiplied by the same positive `drop`. What may be flushed to zero on the way is far below 2^-100,
// which is added (bound_of). Rows that are not numbers, or could overflow, have no bound: they are always read in bf16.
// A row whose upper end is below the lower end of another is smaller than that one's logit, and no tie.
#include <cmath>

#include "ingot/core/hd.h"
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

constexpr uint32_t kScreenWeightTile = 1024;  // bytes of 16 rows by 64 columns

INGOT_HD constexpr double screen_rounding(uint32_t cols) {
  return (17.0 / 16 * ((cols + 63) / 64 * 64) + 64) * 0x1p-23;
}
INGOT_HD inline float screen_value(uint32_t code) {
  const float size = float(16 + code % 16) * (1.f / 16) / float(1u << (7 - code / 16 % 8));
  return code >= 128 ? -size : size;
}
constexpr float kLargestCode = 1.9375f;
// The code nearest to x.
INGOT_HD inline uint32_t screen_code(double x) {
  const double a = x < 0 ? -x : x;
  uint32_t code = 0;
  if (a > 0x1p-7) {
    uint32_t e = 7;
    while (e > 0 && a >= 1.0 / double(1u << (e - 1))) --e;
    // 2^-e <= a < 2^(1 - e); sixteenths, of which the last rounds up to the next exponent's first
    const uint32_t m = uint32_t(int(a * double(1u << e) * 16 + 0.5)), up = (7 - e) * 16 + m - 16;
    code = a >= 2 || up > 127 ? 127 : up;
  }
  return code + (x < 0 ? 128 : 0);
}
// Where number (row, column) of a weight tile has its code: bytes 0 and 2 of a word become one register of
// mma.m16n8k16's first operand, 1 and 3 another; a lane reads two steps of 16 columns at once.
INGOT_HD constexpr uint32_t screen_place(uint32_t row, uint32_t col) {
  const uint32_t step = col / 16, k = col % 16, lane = row % 8 * 4 + k % 8 / 2, word = step % 2 * 2 + row / 8;
  return step / 2 * 512 + lane * 16 + word * 4 + k % 2 * 2 + k / 8;
}

// The head's in codes, without memory where `memory` is null.
Matrix screen_matrix(const Matrix& head, uint8_t* memory);
// Makes the codes and the bounds of a bf16 head's rows.
void make_screen(const Matrix& head, const Screen& to, Stream stream);

}  // namespace ingot::decode
