#pragma once
// Portable vectors for *.simd.cpp files (see core/cpu.h for the rules). Everything lives in the level's own namespace,
// so two levels never share a symbol. Vec<T> is one register: 64 bytes with AVX-512, 32 with AVX2, 16 elsewhere.
#include <cstdint>
#include <cstring>

#ifndef INGOT_SIMD
#error "core/simd.h belongs in *.simd.cpp files, which CMake compiles with INGOT_SIMD set"
#endif

namespace ingot::INGOT_SIMD {

#if defined(__AVX512F__)
constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif

template <class T> struct VecOf;
template <> struct VecOf<float> { typedef float type __attribute__((vector_size(kVecBytes))); };
template <> struct VecOf<double> { typedef double type __attribute__((vector_size(kVecBytes))); };
template <> struct VecOf<int32_t> { typedef int32_t type __attribute__((vector_size(kVecBytes))); };
template <> struct VecOf<int64_t> { typedef int64_t type __attribute__((vector_size(kVecBytes))); };
template <class T> using Vec = typename VecOf<T>::type;
template <class T> constexpr int kLanes = kVecBytes / int(sizeof(T));

template <class T> static inline __attribute__((always_inline)) Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T> static inline __attribute__((always_inline)) void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof v);
}
template <class T> static inline __attribute__((always_inline)) Vec<T> splat(T x) {
  return x - Vec<T>{};
}  // 0 + x would turn -0 into 0
// The first n < kLanes<T> elements; the rest read as zero, and are not written.
template <class T> static inline Vec<T> load_tail(const T* p, int64_t n) {
  Vec<T> v{};
  std::memcpy(&v, p, size_t(n) * sizeof(T));
  return v;
}
template <class T> static inline void store_tail(T* p, Vec<T> v, int64_t n) {
  std::memcpy(p, &v, size_t(n) * sizeof(T));
}
// Adds the lanes in a fixed tree order.
template <class T> static inline T reduce_add(Vec<T> v) {
  T lane[kLanes<T>];
  std::memcpy(lane, &v, sizeof v);
  for (int step = kLanes<T> / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
  return lane[0];
}
template <class T> static inline T reduce_max(Vec<T> v) {
  T best = v[0];
  for (int i = 1; i < kLanes<T>; ++i) best = v[i] > best ? v[i] : best;
  return best;
}
template <class T> static inline __attribute__((always_inline)) Vec<T> max(Vec<T> a, Vec<T> b) { return a > b ? a : b; }
template <class T> static inline __attribute__((always_inline)) Vec<T> min(Vec<T> a, Vec<T> b) { return a < b ? a : b; }

// e^x to 1 ulp or so for |x| < 87; flushes to 0 below -87.3 and saturates near FLT_MAX above 88.3.
// Cody-Waite reduction x = n ln2 + r, |r| <= ln2 / 2, and a degree-6 minimax polynomial for e^r.
static inline Vec<float> exp(Vec<float> x) {
  const Vec<float> low = splat(-87.33654f), high = splat(88.37626f);
  const Vec<float> clamped = min<float>(max<float>(x, low), high);
  const Vec<float> magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const Vec<float> shifted = clamped * 1.44269504088896341f + magic;
  const Vec<float> n = shifted - magic;
  const Vec<float> r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec<float> p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  Vec<int32_t> bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const Vec<int32_t> exponent = (bits - 0x4b400000 + 127) << 23;
  Vec<float> power;
  std::memcpy(&power, &exponent, sizeof power);
  const Vec<float> y = p * power;
  return x < low ? Vec<float>{} : y;
}

}  // namespace ingot::INGOT_SIMD
