#pragma once
// Activations rounded to 8 bits, in the way in which some engines multiply activations with mxfp4 weights. For every 32
// numbers of a row (the last block may have fewer), in bf16:
//   y = e4m3(x / s) s      s = 2^e, e the least whole number with max |x| <= 448 * 2^e, at least kE4m3LeastScale
// e4m3 rounds to nearest, ties to even; subnormal numbers are kept. One byte of E8M0 holds s. Every y is a bf16 number,
// so products of bf16 take it unchanged. A block with an infinity or a NaN becomes NaN, so that neither is hidden.
#include <bit>
#include <cmath>
#include <cstdint>

#include "ingot/core/dtype.h"
#include "ingot/core/hd.h"

namespace ingot {

constexpr uint32_t kE4m3Block = 32;
// In blocks smaller than 2^-109 the numbers are multiples of 2^-127, normal or nearly normal in fp32.
constexpr int kE4m3LeastScale = -118;
constexpr uint32_t kE4m3NoNumber = 0x7f800000;  // magnitudes from here on are infinite or NaN

INGOT_HD inline uint32_t magnitude_of(float v) { return std::bit_cast<uint32_t>(v) & 0x7fffffffu; }
// The exponent e of a block whose largest magnitude is `top`, a finite number.
INGOT_HD inline int e4m3_block_scale(uint32_t top) {
  const int e = int(top >> 23) - 127 - 8 + ((top & 0x7fffffu) > 0x600000u ? 1 : 0);  // 448 is 1.75 * 2^8
  return e > kE4m3LeastScale ? e : kE4m3LeastScale;
}
// y of a number in a block with this scale.
INGOT_HD inline float e4m3_in_block(float v, int e) {
  if (int(magnitude_of(v) >> 23) - 127 < e - 6) return ldexpf(rintf(ldexpf(v, 9 - e)), e - 9);  // subnormal in e4m3
  uint32_t u = std::bit_cast<uint32_t>(v);  // rounds as bf16 does, to a mantissa of 3 bits
  u += 0x7ffffu + ((u >> 20) & 1);
  return std::bit_cast<float>(u & 0xfff00000u);
}

// A row of n numbers, f32 or f64, in place.
template <class T> void round_to_e4m3_blocks(T* row, int64_t n) {
  for (int64_t first = 0; first < n; first += kE4m3Block) {
    const int64_t end = first + kE4m3Block < n ? first + kE4m3Block : n;
    uint32_t top = 0;
    for (int64_t i = first; i < end; ++i) {
      const float v = float(bf16(float(row[i])));
      row[i] = v;
      top = magnitude_of(v) > top ? magnitude_of(v) : top;
    }
    const int e = e4m3_block_scale(top);
    for (int64_t i = first; i < end; ++i) row[i] = top < kE4m3NoNumber ? T(e4m3_in_block(float(row[i]), e)) : T(NAN);
  }
}

}  // namespace ingot
