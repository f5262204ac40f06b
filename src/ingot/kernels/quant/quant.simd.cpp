#include "ingot/kernels/quant/quant.simd.h"

#include "ingot/core/simd.h"

namespace ingot::INGOT_SIMD {

using detail::kStoredRows;
using detail::StoredDots;
using detail::StoredWiden;

namespace {

using V = Vec<float>;
constexpr int L = kLanes<float>;
typedef int8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t Codes16 __attribute__((vector_size(16)));
typedef int8_t ByteLanes __attribute__((vector_size(L)));
typedef uint8_t CodeLanes __attribute__((vector_size(L)));
typedef uint16_t HalfLanes __attribute__((vector_size(L * 2)));

#define INGOT_INLINE static inline __attribute__((always_inline))

INGOT_INLINE V as_float(Vec<int32_t> bits) {
  V v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// --- readers: L numbers of a row, from its k-th on
struct ReadBf16 {
  INGOT_INLINE V at(const uint16_t* row, int64_t k) {
    HalfLanes h;
    std::memcpy(&h, row + k, sizeof h);
    return as_float(__builtin_convertvector(h, Vec<int32_t>) << 16);
  }
};
// The exponent's bias moves from 7 to 127 by an addition; what was subnormal then lies above 2^-7 by half its value.
struct ReadFp8 {
  INGOT_INLINE V at(const uint8_t* row, int64_t k) {
    CodeLanes c;
    std::memcpy(&c, row + k, sizeof c);
    const Vec<int32_t> w = __builtin_convertvector(c, Vec<int32_t>), magnitude = w & 0x7f;
    const V normal = as_float((magnitude << 20) + (120 << 23));
    const V value = magnitude < 8 ? (normal - 0x1p-7f) * 2.f : normal;
    const V signed_value = (w & 0x80) != 0 ? -value : value;
    return magnitude == 0x7f ? as_float(Vec<int32_t>{} + 0x7fc00000) : signed_value;
  }
};

// Twice the 16 low and the 16 high codes of a block, as floats.
struct Block {
  V even[16 / L], odd[16 / L];
};
INGOT_INLINE void widen16(Bytes16 b, V* to) {
  for (int i = 0; i < 16 / L; ++i) {
    ByteLanes part;
    std::memcpy(&part, reinterpret_cast<const char*>(&b) + i * L, sizeof part);
    to[i] = __builtin_convertvector(part, V);
  }
}
INGOT_INLINE Block read_block(const uint8_t* bytes) {
  const Bytes16 twice = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  Codes16 c;
  std::memcpy(&c, bytes, 16);
  Block b;
  widen16(__builtin_shuffle(twice, Bytes16(c & uint8_t(15))), b.even);
  widen16(__builtin_shuffle(twice, Bytes16(c >> 4)), b.odd);
  return b;
}

// --- dots
template <int T, class Read, class Number> void dots(const StoredDots& a) {
  const Number* row = static_cast<const Number*>(a.data);
  for (int64_t n = 0; n < a.rows; ++n, row += a.k) {
    V sum[T] = {}, more[T] = {};
    int64_t k = 0;
    for (; k + 2 * L <= a.k; k += 2 * L) {
      const V w0 = Read::at(row, k), w1 = Read::at(row, k + L);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        sum[t] += w0 * load(a.x + t * a.x_row + k);
        more[t] += w1 * load(a.x + t * a.x_row + k + L);
      }
    }
    for (; k < a.k; k += L) {
      const int64_t left = a.k - k < L ? a.k - k : L;
      Number tail[L] = {};
      std::memcpy(tail, row + k, size_t(left) * sizeof(Number));
      const V w = Read::at(tail, 0);
      for (int t = 0; t < T; ++t) sum[t] += w * load_tail(a.x + t * a.x_row + k, left);
    }
    const float scale = a.scales != nullptr ? static_cast<const float*>(a.scales)[n] : 1.f;
    for (int t = 0; t < T; ++t)
      a.y[t * a.y_row + n] = reduce_add<float>(sum[t] + more[t]) * scale + (a.bias != nullptr ? a.bias[n] : 0.f);
  }
}

template <int T> void dots_mxfp4(const StoredDots& a) {
  const uint8_t* row = static_cast<const uint8_t*>(a.data);
  const uint8_t* scales = static_cast<const uint8_t*>(a.scales);
  const int64_t blocks = a.k / 32;
  for (int64_t n = 0; n < a.rows; ++n, row += a.k / 2, scales += blocks) {
    V sum[T] = {};
    for (int64_t b = 0; b < blocks; ++b) {
      const Block w = read_block(row + b * 16);
      const V scale = splat(a.exponents[scales[b]]);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const float* x = a.x + t * a.x_row + b * 32;
        V part{};
#pragma GCC unroll 4
        for (int i = 0; i < 16 / L; ++i) part += w.even[i] * load(x + i * L);
#pragma GCC unroll 4
        for (int i = 0; i < 16 / L; ++i) part += w.odd[i] * load(x + 16 + i * L);
        sum[t] += part * scale;
      }
    }
    for (int t = 0; t < T; ++t)
      a.y[t * a.y_row + n] = reduce_add<float>(sum[t]) * 0.5f + (a.bias != nullptr ? a.bias[n] : 0.f);
  }
}

using Dots = void (*)(const StoredDots&);
struct Table {
  Dots bf16[kStoredRows + 1], fp8[kStoredRows + 1], mxfp4[kStoredRows + 1];
  template <int T> constexpr void fill() {
    bf16[T] = &dots<T, ReadBf16, uint16_t>;
    fp8[T] = &dots<T, ReadFp8, uint8_t>;
    mxfp4[T] = &dots_mxfp4<T>;
    if constexpr (T > 1) fill<T - 1>();
  }
  constexpr Table() : bf16{}, fp8{}, mxfp4{} { fill<kStoredRows>(); }
};
constexpr Table kDots;

template <class Read, class Number> void widen(const StoredWiden& a) {
  const Number* row = static_cast<const Number*>(a.data);
  for (int64_t n = 0; n < a.rows; ++n, row += a.k) {
    const float scale = a.scales != nullptr ? static_cast<const float*>(a.scales)[n] : 1.f;
    float* out = a.out + n * a.out_row;
    int64_t k = 0;
    for (; k + L <= a.k; k += L) store(out + k, Read::at(row, k) * scale);
    if (k == a.k) continue;
    Number tail[L] = {};
    std::memcpy(tail, row + k, size_t(a.k - k) * sizeof(Number));
    store_tail(out + k, Read::at(tail, 0) * scale, a.k - k);
  }
}

}  // namespace

void stored_dots_bf16(const StoredDots& a) { kDots.bf16[a.tokens](a); }
void stored_dots_fp8(const StoredDots& a) { kDots.fp8[a.tokens](a); }
void stored_dots_mxfp4(const StoredDots& a) { kDots.mxfp4[a.tokens](a); }
void stored_widen_bf16(const StoredWiden& a) { widen<ReadBf16, uint16_t>(a); }
void stored_widen_fp8(const StoredWiden& a) { widen<ReadFp8, uint8_t>(a); }

void stored_widen_mxfp4(const StoredWiden& a) {
  const uint8_t* row = static_cast<const uint8_t*>(a.data);
  const uint8_t* scales = static_cast<const uint8_t*>(a.scales);
  for (int64_t n = 0; n < a.rows; ++n, row += a.k / 2, scales += a.k / 32)
    for (int64_t b = 0; b < a.k / 32; ++b) {
      const Block w = read_block(row + b * 16);
      // The codes are doubled, and half of 2^-127 is no float: the halving comes after the scale's product.
      const V scale = splat(a.exponents[scales[b]]);
      float even[16], odd[16];
      for (int i = 0; i < 16 / L; ++i) {
        store(even + i * L, w.even[i] * 0.5f * scale);
        store(odd + i * L, w.odd[i] * 0.5f * scale);
      }
      float* out = a.out + n * a.out_row + b * 32;
      for (int i = 0; i < 16; ++i) {
        out[2 * i] = even[i];
        out[2 * i + 1] = odd[i];
      }
    }
}

}  // namespace ingot::INGOT_SIMD
