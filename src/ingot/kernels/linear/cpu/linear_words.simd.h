#pragma once
// Shared by the vector files of this folder: rounding to bf16, words of two bf16, and the transpose of a square of
// registers. For *.simd.cpp files only, after core/cpu/simd.h.
#include "ingot/core/cpu/simd.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace ingot::INGOT_SIMD {

// To bf16 and back, to nearest, ties to even. NaN stays NaN.
INGOT_SIMD_INLINE Vec<float> round_bf16(Vec<float> x) {
  Vec<int32_t> u;
  std::memcpy(&u, &x, sizeof u);
  const Vec<int32_t> odd = (u >> 16) & 1;
  const Vec<int32_t> rounded = (u + 0x7fff + odd) & int32_t(0xffff0000);
  Vec<float> y;
  std::memcpy(&y, &rounded, sizeof y);
  return x == x ? y : x + x;  // makes the NaN quiet, so that its upper half alone is still a NaN
}
INGOT_SIMD_INLINE Vec<double> round_bf16(Vec<double> x) { return x; }
INGOT_SIMD_INLINE float round_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  u = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
  float y;
  std::memcpy(&y, &u, 4);
  return x == x ? y : x + x;
}
INGOT_SIMD_INLINE double round_bf16(double x) { return x; }

// Transposes a square of registers by exchanging ever larger blocks.
template <class T, int S> INGOT_SIMD_INLINE void exchange(Vec<T> (&r)[kLanes<T>]) {
  constexpr int L = kLanes<T>;
  if constexpr (S < L) {
    Vec<typename IndexOf<T>::type> low{}, high{};
    for (int j = 0; j < L; ++j) {
      low[j] = (j & S) ? j - S + L : j;
      high[j] = (j & S) ? j + L : j + S;
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      if (i & S) continue;
      const Vec<T> x = r[i], y = r[i + S];
      r[i] = shuffle(x, y, low);
      r[i + S] = shuffle(x, y, high);
    }
    exchange<T, S * 2>(r);
  }
}

// Words of two bf16, the first in the low half.
INGOT_SIMD_INLINE Vec<float> word_of(Vec<float> first, Vec<float> second) {
#if defined(__AVX512BF16__)
  typedef int16_t Halves __attribute__((vector_size(64)));
  Halves order{};
  for (int i = 0; i < 32; ++i) order[i] = int16_t(i / 2 + i % 2 * 16);
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (Vec<float>)_mm512_permutexvar_epi16((__m512i)order, halves);
#else
  first = round_bf16(first);
  second = round_bf16(second);
  Vec<int32_t> low, high;
  std::memcpy(&low, &first, sizeof low);
  std::memcpy(&high, &second, sizeof high);
  const Vec<int32_t> both = ((low >> 16) & 0xffff) | (high & int32_t(0xffff0000));
  Vec<float> word;
  std::memcpy(&word, &both, sizeof word);
  return word;
#endif
}
// The words of 2 * kLanes numbers along memory; the first n exist.
INGOT_SIMD_INLINE Vec<float> words_along(const float* x, int64_t n) {
  constexpr int L = kLanes<float>;
  const Vec<float> low = n >= L ? load(x) : load_tail(x, n);
  const Vec<float> high = n >= 2 * L ? load(x + L) : n > L ? load_tail(x + L, n - L) : Vec<float>{};
#if defined(__AVX512BF16__)
  return (Vec<float>)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
  Vec<int32_t> even{}, odd{};
  for (int i = 0; i < L; ++i) {
    even[i] = 2 * i;
    odd[i] = 2 * i + 1;
  }
  return word_of(shuffle(low, high, even), shuffle(low, high, odd));
#endif
}

}  // namespace ingot::INGOT_SIMD
