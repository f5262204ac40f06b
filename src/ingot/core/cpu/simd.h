#pragma once
// Portable vectors for *.simd.cpp files (see core/cpu/cpu.h for the rules). Everything lives in the level's own
// namespace, so two levels never share a symbol. Vec<T> is a register: 64 bytes with AVX-512, 32 with AVX2, 16
// elsewhere.
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef INGOT_SIMD
#error "core/cpu/simd.h belongs in *.simd.cpp files, which CMake compiles with INGOT_SIMD set"
#endif

#define INGOT_SIMD_INLINE static inline __attribute__((always_inline))

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

template <class T> INGOT_SIMD_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T> INGOT_SIMD_INLINE void store(T* p, Vec<T> v) { std::memcpy(p, &v, sizeof v); }
// 0 + x would turn -0 into 0.
template <class T> INGOT_SIMD_INLINE Vec<T> splat(T x) { return x - Vec<T>{}; }
template <class T> INGOT_SIMD_INLINE Vec<T> load_masked(const T* p, int64_t n) {
  Vec<T> v{};
  std::memcpy(&v, p, size_t(n) * sizeof(T));
  return v;
}
template <class T> INGOT_SIMD_INLINE void store_masked(T* p, Vec<T> v, int64_t n) {
  std::memcpy(p, &v, size_t(n) * sizeof(T));
}
// memcpy of a number of bytes known only at run time is a call.
#if defined(__AVX512F__)
INGOT_SIMD_INLINE Vec<float> load_masked(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
}
INGOT_SIMD_INLINE Vec<double> load_masked(const double* p, int64_t n) {
  return _mm512_maskz_loadu_pd(__mmask8((1u << n) - 1), p);
}
INGOT_SIMD_INLINE void store_masked(float* p, Vec<float> v, int64_t n) {
  _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), v);
}
INGOT_SIMD_INLINE void store_masked(double* p, Vec<double> v, int64_t n) {
  _mm512_mask_storeu_pd(p, __mmask8((1u << n) - 1), v);
}
#elif defined(__AVX2__)
INGOT_SIMD_INLINE __m256i first_floats(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INGOT_SIMD_INLINE __m256i first_doubles(int64_t n) {
  return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
}
INGOT_SIMD_INLINE Vec<float> load_masked(const float* p, int64_t n) { return _mm256_maskload_ps(p, first_floats(n)); }
INGOT_SIMD_INLINE Vec<double> load_masked(const double* p, int64_t n) {
  return _mm256_maskload_pd(p, first_doubles(n));
}
INGOT_SIMD_INLINE void store_masked(float* p, Vec<float> v, int64_t n) { _mm256_maskstore_ps(p, first_floats(n), v); }
INGOT_SIMD_INLINE void store_masked(double* p, Vec<double> v, int64_t n) {
  _mm256_maskstore_pd(p, first_doubles(n), v);
}
#endif
// The first n elements, 0 <= n <= kLanes<T>; the rest read as zero, and are not written.
template <class T> INGOT_SIMD_INLINE Vec<T> load_tail(const T* p, int64_t n) { return load_masked(p, n); }
template <class T> INGOT_SIMD_INLINE void store_tail(T* p, Vec<T> v, int64_t n) { store_masked(p, v, n); }
// The same where n may be more than a vector.
INGOT_SIMD_INLINE Vec<float> load_some(const float* p, int64_t n) {
  return n >= kLanes<float> ? load(p) : load_tail(p, n);
}
INGOT_SIMD_INLINE void store_some(float* p, Vec<float> v, int64_t n) {
  if (n >= kLanes<float>)
    store(p, v);
  else
    store_tail(p, v, n);
}
// Lanes by their numbers, modulo their number; lanes of b follow lanes of a. (clang's builtin wants constants.)
template <class V, class I> INGOT_SIMD_INLINE V shuffle(V a, I at) {
#ifdef __clang__
  constexpr int n = sizeof(V) / sizeof(a[0]);
  V r;
  for (int i = 0; i < n; ++i) r[i] = a[at[i] & (n - 1)];
  return r;
#else
  return __builtin_shuffle(a, at);
#endif
}
template <class V, class I> INGOT_SIMD_INLINE V shuffle(V a, V b, I at) {
#ifdef __clang__
  constexpr int n = sizeof(V) / sizeof(a[0]);
  V r;
  for (int i = 0; i < n; ++i) r[i] = at[i] & n ? b[at[i] & (n - 1)] : a[at[i] & (n - 1)];
  return r;
#else
  return __builtin_shuffle(a, b, at);
#endif
}
template <class T> struct IndexOf;
template <> struct IndexOf<float> { typedef int32_t type; };
template <> struct IndexOf<double> { typedef int64_t type; };
// Adds the lanes in a fixed tree order: lane i gets lane i + L/2, then lane i + L/4, ...
template <class T, int kStep = kLanes<T> / 2> INGOT_SIMD_INLINE T reduce_add(Vec<T> v) {
  if constexpr (kStep == 0) {
    return v[0];
  } else {
    Vec<typename IndexOf<T>::type> upper{};
    for (int i = 0; i < kLanes<T>; ++i) upper[i] = i + kStep;
    return reduce_add<T, kStep / 2>(v + shuffle(v, upper));
  }
}
template <class T> static inline T reduce_max(Vec<T> v) {
  T best = v[0];
  for (int i = 1; i < kLanes<T>; ++i) best = v[i] > best ? v[i] : best;
  return best;
}
template <class T> INGOT_SIMD_INLINE Vec<T> max(Vec<T> a, Vec<T> b) { return a > b ? a : b; }
template <class T> INGOT_SIMD_INLINE Vec<T> min(Vec<T> a, Vec<T> b) { return a < b ? a : b; }

// --- functions of Vec<float>
// Each states its largest error against fp64, tested over the whole range in core/cpu/simd.test.cpp. NaN gives NaN:
// comparisons keep a NaN in the second operand.
INGOT_SIMD_INLINE Vec<float> abs(Vec<float> x) {
  Vec<int32_t> bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= 0x7fffffff;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}
INGOT_SIMD_INLINE Vec<float> copysign(Vec<float> magnitude, Vec<float> sign) {
  Vec<int32_t> m, s;
  std::memcpy(&m, &magnitude, sizeof m);
  std::memcpy(&s, &sign, sizeof s);
  m = (m & 0x7fffffff) | (s & int32_t(0x80000000));
  std::memcpy(&magnitude, &m, sizeof m);
  return magnitude;
}
// x * s, where s = 0 wins over an infinite x.
INGOT_SIMD_INLINE Vec<float> product_or_zero(Vec<float> x, Vec<float> s) { return s == 0.f ? Vec<float>{} : x * s; }

// e^(x + small) = 2^n (1 + p): Cody-Waite reduction x = n ln2 + r, |r| <= ln2 / 2, and a degree-6 minimax polynomial
// for p = e^r - 1. For x in [-87.33654, 88.37626]; `small` is added to r without a loss.
struct ExpParts {
  Vec<float> p, power;
};
INGOT_SIMD_INLINE ExpParts exp_parts(Vec<float> x, Vec<float> small) {
  const Vec<float> magic = splat(12582912.f);  // 1.5 * 2^23: the sum has the rounded integer in its low mantissa bits
  const Vec<float> shifted = x * 1.44269504088896341f + magic;
  const Vec<float> n = shifted - magic;
  const Vec<float> r = (x - n * 0.693359375f) + (n * 2.12194440e-4f + small);
  Vec<float> q = splat(1.9875691500e-4f);
  q = q * r + 1.3981999507e-3f;
  q = q * r + 8.3334519073e-3f;
  q = q * r + 4.1665795894e-2f;
  q = q * r + 1.6666665459e-1f;
  q = q * r + 5.0000001201e-1f;
  Vec<int32_t> bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const Vec<int32_t> exponent = (bits - 0x4b400000 + 127) << 23;
  ExpParts e;
  e.p = q * (r * r) + r;
  std::memcpy(&e.power, &exponent, sizeof e.power);
  return e;
}
INGOT_SIMD_INLINE Vec<float> exp_clamp(Vec<float> x) {
  return min<float>(splat(88.37626f), max<float>(splat(-87.33654f), x));
}

// e^x, relative error below 1.0e-7; 0 below -87.33654, and saturates near FLT_MAX above 88.37626.
INGOT_SIMD_INLINE Vec<float> exp(Vec<float> x) {
  const ExpParts e = exp_parts(exp_clamp(x), Vec<float>{});
  return x < -87.33654f ? Vec<float>{} : e.p * e.power + e.power;
}
// e^x - 1 for x <= 0, relative error below 2.0e-7.
INGOT_SIMD_INLINE Vec<float> expm1_negative(Vec<float> x) {
  const ExpParts e = exp_parts(exp_clamp(x), Vec<float>{});
  return e.p * e.power + (e.power - 1.f);
}
// log(1 + e) for e in [0, 1], relative error below 2.5e-7: 2 atanh(s), s = e / (2 + e), as an odd polynomial in s.
INGOT_SIMD_INLINE Vec<float> log1p_unit(Vec<float> e) {
  const Vec<float> s = e / (e + 2.f), u = s * s;
  Vec<float> p = splat(0.28011426f);
  p = p * u + 0.28001910f;
  p = p * u + 0.40021522f;
  p = p * u + 0.66666416f;
  return (p * u + 2.f) * s;
}
// 1 / (1 + e^-x), relative error below 3.0e-7 where the result is above 1e-37.
INGOT_SIMD_INLINE Vec<float> logistic(Vec<float> x) {
  const Vec<float> e = exp(-abs(x));
  return (x < 0.f ? e : splat(1.f)) / (e + 1.f);
}
// tanh x, relative error below 3.0e-7.
INGOT_SIMD_INLINE Vec<float> tanh(Vec<float> x) {
  const Vec<float> e = expm1_negative(abs(x) * -2.f);
  return copysign(e / (e + 2.f), x);
}
// Phi(-a) and e^(-a^2 / 2) for a = |x|: the normal distribution's lower tail and density, relative errors below 5.0e-7
// and 1.0e-7 where the result is above 1e-37. Phi(-a) = e^(-a^2 / 2) G(a); G is a polynomial in 1 / (1 + 0.35 a). a^2
// is split into an exact square and the rest, because rounding the square would cost a^2 / 2 ulps.
struct NormalTail {
  Vec<float> phi, density;
};
INGOT_SIMD_INLINE NormalTail normal_tail(Vec<float> x) {
  const Vec<float> a = min<float>(splat(14.5f), abs(x));
  Vec<int32_t> bits;
  std::memcpy(&bits, &a, sizeof bits);
  bits &= int32_t(0xfffff000);
  Vec<float> high;
  std::memcpy(&high, &bits, sizeof high);
  const Vec<float> exponent = high * high * -0.5f, rest = (a - high) * (a + high) * -0.5f;
  const ExpParts e = exp_parts(exp_clamp(exponent), rest);
  const Vec<float> t = 1.f / (a * 0.35f + 1.f);
  Vec<float> g = splat(-0.02914590281137662f);
  g = g * t + 0.14397157194693258f;
  g = g * t - 0.25571401027481977f;
  g = g * t + 0.1591738995556875f;
  g = g * t - 0.023109667802868883f;
  g = g * t + 0.10550793826925031f;
  g = g * t + 0.11983288306334886f;
  g = g * t + 0.13986186770692244f;
  g = g * t + 0.1396214044022457f;
  NormalTail n;
  n.density = exponent + rest < -87.33654f ? Vec<float>{} : e.p * e.power + e.power;
  n.phi = n.density * (g * t);
  return n;
}

// Sixteen running sums in fp64, with the same order of additions at every level: element i goes to sum i % 16.
struct Sums16 {
  Vec<double> part[16 / kLanes<double>] = {};
  double total() const {
    double lane[16];
    std::memcpy(lane, part, sizeof lane);
    for (int step = 8; step > 0; step /= 2)
      for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
    return lane[0];
  }
};
typedef float HalfOfFloats __attribute__((vector_size(kVecBytes / 2)));  // as many floats as Vec<double> has doubles
INGOT_SIMD_INLINE Vec<double> widen(const float* p) {
  HalfOfFloats h;
  std::memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, Vec<double>);
}

}  // namespace ingot::INGOT_SIMD
