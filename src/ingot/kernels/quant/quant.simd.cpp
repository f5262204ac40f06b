#include "ingot/kernels/quant/quant.simd.h"

#include "ingot/core/cpu/simd.h"

namespace ingot::INGOT_SIMD {

using detail::kStoredRows;
using detail::NarrowMxfp4;
using detail::StoredDots;
using detail::StoredWiden;
using detail::WeightTileDots;
using detail::WeightTileWiden;

namespace {

using V = Vec<float>;
constexpr int L = kLanes<float>;
typedef int8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t Codes16 __attribute__((vector_size(16)));

INGOT_SIMD_INLINE V as_float(Vec<int32_t> bits) {
  V v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// Reads L integers of fewer bits and widens each to 32 bits, by one instruction. For __builtin_convertvector GCC 12
// writes two conversions of half a vector and three moves, which together take longer than the memory.
#if defined(__AVX512F__)
INGOT_SIMD_INLINE Vec<int32_t> widened(const uint16_t* p) {
  return Vec<int32_t>(
      _mm512_maskz_cvtepu16_epi32(__mmask16(0xffff), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
INGOT_SIMD_INLINE Vec<int32_t> widened(const uint8_t* p) {
  return Vec<int32_t>(
      _mm512_maskz_cvtepu8_epi32(__mmask16(0xffff), _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
INGOT_SIMD_INLINE Vec<int32_t> widened(const int8_t* p) {
  return Vec<int32_t>(
      _mm512_maskz_cvtepi8_epi32(__mmask16(0xffff), _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#elif defined(__AVX2__)
INGOT_SIMD_INLINE Vec<int32_t> widened(const uint16_t* p) {
  return Vec<int32_t>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
INGOT_SIMD_INLINE Vec<int32_t> widened(const uint8_t* p) {
  return Vec<int32_t>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
INGOT_SIMD_INLINE Vec<int32_t> widened(const int8_t* p) {
  return Vec<int32_t>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
#else
template <class Number> INGOT_SIMD_INLINE Vec<int32_t> widened(const Number* p) {
  typedef Number Narrow __attribute__((vector_size(L * sizeof(Number))));
  Narrow n;
  std::memcpy(&n, p, sizeof n);
  return __builtin_convertvector(n, Vec<int32_t>);
}
#endif

// --- readers: L numbers of a row, from its k-th on
struct ReadBf16 {
  INGOT_SIMD_INLINE V at(const uint16_t* row, int64_t k) { return as_float(widened(row + k) << 16); }
};
// The exponent's bias moves from 7 to 127 by an addition; a subnormal number then lies above 2^-7 by half its value.
INGOT_SIMD_INLINE V e4m3(Vec<int32_t> code) {
  const Vec<int32_t> magnitude = code & 0x7f;
  const V normal = as_float((magnitude << 20) + (120 << 23));
  const V value = magnitude < 8 ? (normal - 0x1p-7f) * 2.f : normal;
  const V signed_value = (code & 0x80) != 0 ? -value : value;
  return magnitude == 0x7f ? as_float(Vec<int32_t>{} + 0x7fc00000) : signed_value;
}
struct ReadFp8 {
  INGOT_SIMD_INLINE V at(const uint8_t* row, int64_t k) { return e4m3(widened(row + k)); }
};

// Twice the 16 low and the 16 high codes of a block, as floats.
struct Block {
  V even[16 / L], odd[16 / L];
};
INGOT_SIMD_INLINE void widen16(Bytes16 b, V* to) {
  int8_t codes[16];
  std::memcpy(codes, &b, sizeof codes);
  for (int i = 0; i < 16 / L; ++i) to[i] = __builtin_convertvector(widened(codes + i * L), V);
}
INGOT_SIMD_INLINE Block read_block(const uint8_t* bytes) {
  const Bytes16 twice = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  Codes16 c;
  std::memcpy(&c, bytes, 16);
  Block b;
  widen16(shuffle(twice, Bytes16(c & uint8_t(15))), b.even);
  widen16(shuffle(twice, Bytes16(c >> 4)), b.odd);
  return b;
}

// --- dots
// The end of a product's sum, explicitly a fused multiply-add that rounds once. Otherwise the compiler would decide
// differently for different numbers of rows, and a row's sum must not depend on the number of rows.
INGOT_SIMD_INLINE float scale_and_add(float sum, float scale, float bias) { return __builtin_fmaf(sum, scale, bias); }

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
      a.y[t * a.y_row + n] =
          scale_and_add(reduce_add<float>(sum[t] + more[t]), scale, a.bias != nullptr ? a.bias[n] : 0.f);
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

namespace {

// --- weight tiles: the 64 numbers of rows g and g + 8 of a weight tile, in the order of weight_tile_column()
constexpr int kParts = 64 / L;  // vectors of a row
struct RowPair {
  V low[kParts], high[kParts];
};
typedef Vec<int32_t> W;

// The even and the odd of 2 L words.
INGOT_SIMD_INLINE void split_words(const uint8_t* from, W& even, W& odd) {
  int32_t word[2 * L];
  std::memcpy(word, from, sizeof word);
  W a, b, even_at, odd_at;
  std::memcpy(&a, word, sizeof a);
  std::memcpy(&b, word + L, sizeof b);
  for (int i = 0; i < L; ++i) even_at[i] = 2 * i, odd_at[i] = 2 * i + 1;
  even = shuffle(a, b, even_at);
  odd = shuffle(a, b, odd_at);
}

struct WeightTileBf16 {
  static constexpr int64_t kBytes = 2048;
  // A row's 32 words come from 4 steps; each vector of words has low halves and high halves.
  INGOT_SIMD_INLINE void read(const uint8_t* weight_tile, int64_t g, const float*, RowPair& r) {
    alignas(64) uint8_t words[256];
    for (int64_t s = 0; s < 4; ++s) std::memcpy(words + s * 64, weight_tile + s * 512 + g * 64, 64);
    for (int i = 0; i < 32 / L; ++i) {
      W low, high;
      split_words(words + i * 2 * L * 4, low, high);
      r.low[i] = as_float(low << 16);
      r.low[32 / L + i] = as_float(low & int32_t(0xffff0000));
      r.high[i] = as_float(high << 16);
      r.high[32 / L + i] = as_float(high & int32_t(0xffff0000));
    }
  }
};
struct WeightTileFp8 {
  static constexpr int64_t kBytes = 1024;
  INGOT_SIMD_INLINE void read(const uint8_t* weight_tile, int64_t g, const float*, RowPair& r) {
    alignas(64) uint8_t words[128];
    for (int64_t s = 0; s < 2; ++s) std::memcpy(words + s * 64, weight_tile + s * 512 + g * 64, 64);
    for (int i = 0; i < 16 / L; ++i) {
      W low, high;
      split_words(words + i * 2 * L * 4, low, high);
      for (int b = 0; b < 4; ++b) {
        r.low[b * (16 / L) + i] = e4m3(low >> (8 * b) & 0xff);
        r.high[b * (16 / L) + i] = e4m3(high >> (8 * b) & 0xff);
      }
    }
  }
};
// Code c as a float: by a table where a register can hold the table, else number by number.
INGOT_SIMD_INLINE V e2m1(W code) {
  constexpr float kValues[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  if constexpr (L >= 8) {
    V table;
    std::memcpy(&table, kValues, sizeof table);
    const V value = shuffle(table, code);  // takes the index modulo L
    if constexpr (L == 16) return value;
    W bits;
    std::memcpy(&bits, &value, sizeof bits);
    return as_float(bits | (code & 8) << 28);
  } else {
    V value;
    for (int i = 0; i < L; ++i) value[i] = kValues[code[i] & 15];
    return value;
  }
}
struct WeightTileMxfp4 {
  static constexpr int64_t kBytes = 544;
  // Words come step by step within a lane: two of the first block, two of the second, and so on.
  INGOT_SIMD_INLINE V scales(float first, float second) {
    V v;
    for (int i = 0; i < L; ++i) v[i] = i % 4 < 2 ? first : second;
    return v;
  }
  INGOT_SIMD_INLINE void read(const uint8_t* weight_tile, int64_t g, const float* exponents, RowPair& r) {
    const uint8_t* s = weight_tile + 512 + 4 * g;
    const V low = scales(exponents[s[0]], exponents[s[2]]), high = scales(exponents[s[1]], exponents[s[3]]);
    for (int i = 0; i < 16 / L; ++i) {
      W word;
      std::memcpy(&word, weight_tile + g * 64 + i * L * 4, sizeof word);
      for (int plane = 0; plane < 4; ++plane) {
        const int code = plane / 2 * 2 + plane % 2 * 4;
        r.low[plane * (16 / L) + i] = e2m1(word >> (4 * code) & 15) * low;
        r.high[plane * (16 / L) + i] = e2m1(word >> (4 * code + 4) & 15) * high;
      }
    }
  }
};

// G pairs of rows at a time. For a single token G is 8 with vectors of 16 numbers: all pairs, so that a row tile is
// read once from its beginning to its end. With shorter vectors G is 4, and a row tile is read in two passes.
template <class Read, int T, int G>
INGOT_SIMD_INLINE void weight_tile_band(const WeightTileDots& a, const uint8_t* row_tile, int64_t first, int t0) {
  const bool scaled = Read::kBytes == 1024;
  const float* scales = reinterpret_cast<const float*>(row_tile + a.weight_tiles * Read::kBytes);
  for (int g0 = 0; g0 < 8; g0 += G) {
    V low[G][T] = {}, high[G][T] = {};
    for (int64_t q = 0; q < a.weight_tiles; ++q)
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        RowPair r;
        Read::read(row_tile + q * Read::kBytes, g0 + g, a.exponents, r);
#pragma GCC unroll 8
        for (int i = 0; i < kParts; ++i)
#pragma GCC unroll 8
          for (int t = 0; t < T; ++t) {
            const V x = load(a.x + (t0 + t) * a.x_row + q * 64 + i * L);
            low[g][t] += r.low[i] * x;
            high[g][t] += r.high[i] * x;
          }
      }
    for (int g = 0; g < G; ++g)
      for (int half = 0; half < 2; ++half) {
        const int64_t row = g0 + g + 8 * half, n = first + row;
        if (n >= a.rows) continue;
        float scale = 1;
        if (scaled) std::memcpy(&scale, scales + row, sizeof scale);
        for (int t = 0; t < T; ++t)
          a.y[(t0 + t) * a.y_row + n] = scale_and_add(reduce_add<float>(half == 0 ? low[g][t] : high[g][t]), scale,
                                                      a.bias != nullptr ? a.bias[n] : 0.f);
      }
  }
}

template <class Read> void weight_tile_dots(const WeightTileDots& a) {
  constexpr int kAtOnce = L >= 16 ? 8 : 4;  // tokens whose sums fit into the registers at the same time
  const uint8_t* row_tile = static_cast<const uint8_t*>(a.row_tiles);
  for (int64_t first = 0; first < a.rows; first += 16, row_tile += a.row_tile_bytes)
    for (int t = 0; t < a.tokens;) {
      const int left = a.tokens - t;
      if (left >= 8 && kAtOnce == 8) {
        weight_tile_band<Read, 8, 1>(a, row_tile, first, t), t += 8;
      } else if (left >= 4) {
        weight_tile_band<Read, 4, 1>(a, row_tile, first, t), t += 4;
      } else if (left >= 2) {
        weight_tile_band<Read, 2, 2>(a, row_tile, first, t), t += 2;
      } else {
        weight_tile_band<Read, 1, L >= 16 ? 8 : 4>(a, row_tile, first, t), t += 1;
      }
    }
}

template <class Read> void weight_tile_widen(const WeightTileWiden& a) {
  const uint8_t* row_tile = static_cast<const uint8_t*>(a.row_tiles);
  for (int64_t b = 0; b < a.count; ++b, row_tile += a.row_tile_bytes) {
    const float* scales = reinterpret_cast<const float*>(row_tile + a.weight_tiles * Read::kBytes);
    for (int64_t g = 0; g < 8; ++g) {
      float scale[2] = {1, 1};
      if (Read::kBytes == 1024) {
        std::memcpy(scale, scales + g, 4);
        std::memcpy(scale + 1, scales + g + 8, 4);
      }
      float *low = a.out + (b * 16 + g) * a.out_row, *high = low + 8 * a.out_row;
      for (int64_t q = 0; q < a.weight_tiles; ++q) {
        RowPair r;
        Read::read(row_tile + q * Read::kBytes, g, a.exponents, r);
        for (int i = 0; i < kParts; ++i) {
          store(low + q * 64 + i * L, r.low[i] * scale[0]);
          store(high + q * 64 + i * L, r.high[i] * scale[1]);
        }
      }
    }
  }
}

// --- narrowing
constexpr int kBlock = 32;  // numbers with a common mxfp4 scale

INGOT_SIMD_INLINE W bits_of(V v) {
  W bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
// Codes without signs of the nearest magnitudes; from the middle between two to the even code.
INGOT_SIMD_INLINE W e2m1_nearest(V m) {
  return -((m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.f));
}
struct Narrowed {
  W code[kBlock / L];
  float error;  // the sum of squares, in units of the scale's square
};
INGOT_SIMD_INLINE Narrowed narrow(const V* x, float inverse) {
  Narrowed n;
  V sum{};
  for (int i = 0; i < kBlock / L; ++i) {
    const V y = x[i] * inverse, m = as_float(bits_of(y) & 0x7fffffff);
    const W code = e2m1_nearest(m);
    const V d = m - e2m1(code);
    sum += d * d;
    n.code[i] = code | (bits_of(y) >> 28 & 8);
  }
  n.error = reduce_add<float>(sum);
  return n;
}

void narrow_block(const float* from, uint8_t* bytes, uint8_t* scale) {
  V x[kBlock / L], tops{};
  for (int i = 0; i < kBlock / L; ++i) {
    x[i] = load(from + i * L);
    const V m = as_float(bits_of(x[i]) & 0x7fffffff);
    tops = m > tops ? m : tops;
  }
  const float top = reduce_max<float>(tops);
  // The largest magnitude, 6 = 1.5 * 2^2, is reached by the scale 2 below top's exponent, or exceeded by up to a third.
  // A top whose exponent is below -125 has the smallest scale there is.
  uint32_t top_bits;
  std::memcpy(&top_bits, &top, sizeof top_bits);
  const int low = top > 0 ? (top_bits >> 23 > 2 ? int(top_bits >> 23) - 2 : 0) : 127;
  const auto inverse = [](int s) {  // 2^(127 - s) for s in [0, 254)
    const uint32_t bits = uint32_t(254 - s) << 23;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
  };
  Narrowed best = narrow(x, inverse(low));
  *scale = uint8_t(low);
  if (top > 0) {
    const Narrowed other = narrow(x, inverse(low + 1));
    if (4 * other.error < best.error) best = other, *scale = uint8_t(low + 1);
  }
  int32_t code[kBlock];
  std::memcpy(code, best.code, sizeof code);
  for (int i = 0; i < kBlock / 2; ++i) bytes[i] = uint8_t(code[2 * i] | code[2 * i + 1] << 4);
}

}  // namespace

void narrow_mxfp4(const NarrowMxfp4& a) {
  for (int64_t b = 0; b < a.k / kBlock; ++b) narrow_block(a.x + b * kBlock, a.bytes + b * kBlock / 2, a.scales + b);
}

void weight_tile_dots_bf16(const WeightTileDots& a) { weight_tile_dots<WeightTileBf16>(a); }
void weight_tile_dots_fp8(const WeightTileDots& a) { weight_tile_dots<WeightTileFp8>(a); }
void weight_tile_dots_mxfp4(const WeightTileDots& a) { weight_tile_dots<WeightTileMxfp4>(a); }
void weight_tile_widen_bf16(const WeightTileWiden& a) { weight_tile_widen<WeightTileBf16>(a); }
void weight_tile_widen_fp8(const WeightTileWiden& a) { weight_tile_widen<WeightTileFp8>(a); }
void weight_tile_widen_mxfp4(const WeightTileWiden& a) { weight_tile_widen<WeightTileMxfp4>(a); }

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
      // read_block() returns twice the numbers. Halving them is exact.
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
