#include "ingot/io/codecs/sha256.h"

#include <bit>
#include <cstring>
#include <vector>

#include "ingot/io/file.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace ingot {
namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(const uint8_t* p) {
  return uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | uint32_t(p[3]);
}

#if defined(__x86_64__)
bool has_sha_instructions() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & (1u << 29)) == 0) return false;
  return __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

__attribute__((target("sha,sse4.1,ssse3"))) void sha256_blocks_native(uint32_t* state, const uint8_t* data,
                                                                      int64_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  // The instructions want the state as (A B E F) and (C D G H), highest lane first.
  const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state)), 0xB1);
  const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4)), 0x1B);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);
  for (; blocks > 0; --blocks, data += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];  // a window of 16 schedule words
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {
      __m128i& now = w[group & 3];
      if (group < 4) {
        now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * group)), swap);
      } else {
        const __m128i previous = w[(group + 3) & 3];
        const __m128i middle = _mm_alignr_epi8(previous, w[(group + 2) & 3], 4);
        now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, w[(group + 1) & 3]), middle), previous);
      }
      const __m128i sum = _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * group)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#endif

void process(uint32_t* state, const uint8_t* data, int64_t blocks) {
#if defined(__x86_64__)
  static const bool native = has_sha_instructions();
  if (native) return sha256_blocks_native(state, data, blocks);
#endif
  detail::sha256_blocks_portable(state, data, blocks);
}

}  // namespace

void detail::sha256_blocks_portable(uint32_t* state, const uint8_t* data, int64_t blocks) {
  for (; blocks > 0; --blocks, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = big_endian(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t x = w[i - 15], y = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3)) +
             (std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10));
    }
    uint32_t s[8];
    std::memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; ++i) {
      const uint32_t e = s[4], a = s[0];
      const uint32_t t1 = s[7] + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & s[5]) ^ (~e & s[6])) +
                          kRound[i] + w[i];
      const uint32_t t2 =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
      s[7] = s[6], s[6] = s[5], s[5] = s[4], s[4] = s[3] + t1;
      s[3] = s[2], s[2] = s[1], s[1] = s[0], s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; ++i) state[i] += s[i];
  }
}

Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::update(const void* data, int64_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  const int64_t held = length_ % 64;
  length_ += bytes;
  if (held > 0) {
    const int64_t take = bytes < 64 - held ? bytes : 64 - held;
    if (take > 0) std::memcpy(block_ + held, p, size_t(take));
    p += take;
    bytes -= take;
    if (held + take < 64) return;
    process(state_.data(), block_, 1);
  }
  process(state_.data(), p, bytes / 64);
  if (bytes % 64 > 0) std::memcpy(block_, p + bytes / 64 * 64, size_t(bytes % 64));
}

std::string Sha256::hex() {
  const uint64_t bits = uint64_t(length_) * 8;
  const uint8_t end[64] = {0x80};
  update(end, 1 + (119 - length_ % 64) % 64);  // up to 8 bytes before a block's end
  uint8_t size[8];
  for (int i = 0; i < 8; ++i) size[i] = uint8_t(bits >> (56 - 8 * i));
  update(size, 8);
  std::string text;
  for (const uint32_t word : state_)
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(word >> shift) & 15];
  return text;
}

std::string sha256(std::string_view bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.hex();
}

std::string sha256_of_file(const std::string& path) {
  const File file = File::open(path);
  const int64_t size = file.size(), piece = int64_t(1) << 20;
  std::vector<char> buffer(size_t(size < piece ? size : piece));
  Sha256 hash;
  for (int64_t at = 0; at < size; at += piece) {
    const int64_t n = size - at < piece ? size - at : piece;
    file.read_at(at, buffer.data(), n);
    hash.update(buffer.data(), n);
  }
  return hash.hex();
}

}  // namespace ingot
