#include "ingot/io/formats/gguf_blocks.h"

#include <algorithm>
#include <cstring>

#include "ingot/core/check.h"
#include "ingot/core/dtype.h"
#include "ingot/io/formats/gguf.h"

namespace ingot {
namespace {

float f32_at(const uint8_t* p) {
  float x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class T> float narrow_at(const uint8_t* p) {
  T x;
  std::memcpy(&x.bits, p, sizeof x.bits);
  return float(x);
}
float f16_at(const uint8_t* p) { return narrow_at<f16>(p); }
int low(uint8_t byte) { return byte & 15; }
int high(uint8_t byte) { return byte >> 4; }

// Each function decodes one block. In blocks of 32 numbers, byte i of the codes holds number i in its low half and
// number i + 16 in its high half.
void q4_0(const uint8_t* p, float* out) {
  const float scale = f16_at(p);
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * float(low(p[2 + i]) - 8);
    out[i + 16] = scale * float(high(p[2 + i]) - 8);
  }
}
void q4_1(const uint8_t* p, float* out) {
  const float scale = f16_at(p), offset = f16_at(p + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * float(low(p[4 + i])) + offset;
    out[i + 16] = scale * float(high(p[4 + i])) + offset;
  }
}
// The fifth bits of all 32 numbers are stored in one word.
int fifth(const uint8_t* word, int i) { return (word[i / 8] >> (i % 8) & 1) << 4; }
void q5_0(const uint8_t* p, float* out) {
  const float scale = f16_at(p);
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * float((low(p[6 + i]) | fifth(p + 2, i)) - 16);
    out[i + 16] = scale * float((high(p[6 + i]) | fifth(p + 2, i + 16)) - 16);
  }
}
void q5_1(const uint8_t* p, float* out) {
  const float scale = f16_at(p), offset = f16_at(p + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * float(low(p[8 + i]) | fifth(p + 4, i)) + offset;
    out[i + 16] = scale * float(high(p[8 + i]) | fifth(p + 4, i + 16)) + offset;
  }
}
void q8_0(const uint8_t* p, float* out) {
  const float scale = f16_at(p);
  for (int i = 0; i < 32; ++i) out[i] = scale * float(static_cast<int8_t>(p[2 + i]));
}

// The eight scales and eight offsets of Q4_K and Q5_K, of 6 bits each, in 12 bytes. The first four of each are the low
// bits of their own bytes; the last four have their low bits in bytes 8 to 11 and their high bits in the upper bits of
// the first eight bytes.
struct Scales {
  float scale, offset;
};
Scales scales_at(const uint8_t* p, int group) {
  const float scale = f16_at(p), offset = f16_at(p + 2);
  const uint8_t* packed = p + 4;
  if (group < 4) return {scale * float(packed[group] & 63), offset * float(packed[group + 4] & 63)};
  return {scale * float(low(packed[group + 4]) | (packed[group - 4] >> 6) << 4),
          offset * float(high(packed[group + 4]) | (packed[group] >> 6) << 4)};
}
// 64 numbers share 32 bytes, the first 32 numbers in the low halves.
void q4_k(const uint8_t* p, float* out) {
  const uint8_t* codes = p + 16;
  for (int group = 0; group < 8; group += 2, codes += 32) {
    const Scales a = scales_at(p, group), b = scales_at(p, group + 1);
    for (int i = 0; i < 32; ++i) *out++ = a.scale * float(low(codes[i])) - a.offset;
    for (int i = 0; i < 32; ++i) *out++ = b.scale * float(high(codes[i])) - b.offset;
  }
}
// Bit `group` of fifth[i] is the fifth bit of number i in that group of 32.
void q5_k(const uint8_t* p, float* out) {
  const uint8_t *fifth = p + 16, *codes = p + 48;
  const auto bit = [&](int i, int group) { return (fifth[i] >> group & 1) << 4; };
  for (int group = 0; group < 8; group += 2, codes += 32) {
    const Scales a = scales_at(p, group), b = scales_at(p, group + 1);
    for (int i = 0; i < 32; ++i) *out++ = a.scale * float(low(codes[i]) | bit(i, group)) - a.offset;
    for (int i = 0; i < 32; ++i) *out++ = b.scale * float(high(codes[i]) | bit(i, group + 1)) - b.offset;
  }
}
// Two halves of 128 numbers, each of four quarters of 32 numbers. The low four bits of quarters 0 and 2 share bytes 0
// to 31 of the half, those of quarters 1 and 3 bytes 32 to 63. The two high bits of all four quarters share a byte. 16
// numbers share a scale.
void q6_k(const uint8_t* p, float* out) {
  const uint8_t *lows = p, *highs = p + 128;
  const auto* scales = reinterpret_cast<const int8_t*>(p + 192);
  const float scale = f16_at(p + 208);
  for (int half = 0; half < 2; ++half, lows += 64, highs += 32, scales += 8, out += 128)
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int i = 0; i < 32; ++i) {
        const uint8_t byte = lows[quarter % 2 * 32 + i];
        const int code = (quarter < 2 ? low(byte) : high(byte)) | (highs[i] >> (2 * quarter) & 3) << 4;
        out[quarter * 32 + i] = scale * float(scales[quarter * 2 + i / 16]) * float(code - 32);
      }
}

struct Reader {
  const char* dtype;
  void (*read)(const uint8_t* block, float* out);
};
constexpr Reader kReaders[] = {
    {"F32", [](const uint8_t* p, float* out) { *out = f32_at(p); }},
    {"F16", [](const uint8_t* p, float* out) { *out = f16_at(p); }},
    {"BF16", [](const uint8_t* p, float* out) { *out = narrow_at<bf16>(p); }},
    {"Q4_0", q4_0},
    {"Q4_1", q4_1},
    {"Q5_0", q5_0},
    {"Q5_1", q5_1},
    {"Q8_0", q8_0},
    {"Q4_K", q4_k},
    {"Q5_K", q5_k},
    {"Q6_K", q6_k},
};
const Reader* reader_of(const std::string& dtype) {
  const auto* at =
      std::find_if(std::begin(kReaders), std::end(kReaders), [&](const Reader& r) { return dtype == r.dtype; });
  return at == std::end(kReaders) ? nullptr : at;
}

}  // namespace

bool can_dequantize_gguf(const std::string& dtype) { return reader_of(dtype) != nullptr; }

void dequantize_gguf(const std::string& dtype, const uint8_t* blocks, int64_t numbers, float* out) {
  const Reader* reader = reader_of(dtype);
  INGOT_CHECK(reader != nullptr, "dequantize_gguf: found ", dtype, ", expected a type that it reads");
  const GgufBlock block = gguf_block(dtype);
  INGOT_CHECK(numbers % block.numbers == 0, "dequantize_gguf: found ", numbers, " numbers, expected a multiple of ",
              block.numbers, " for ", dtype);
  for (int64_t i = 0; i < numbers; i += block.numbers, blocks += block.bytes) reader->read(blocks, out + i);
}

}  // namespace ingot
