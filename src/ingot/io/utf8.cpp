#include "ingot/io/utf8.h"

#include <cstring>

namespace ingot {
namespace {

// Length of the well-formed sequence at p, or 0.
int64_t sequence_length(const unsigned char* p, int64_t left) {
  const auto tail = [&](int64_t i) { return i < left && (p[i] & 0xC0) == 0x80; };
  const unsigned char first = p[0];
  if (first < 0x80) return 1;
  if (first < 0xC2) return 0;  // a continuation byte, or an overlong form of ASCII
  if (first < 0xE0) return tail(1) ? 2 : 0;
  if (first < 0xF0) {
    if (!tail(1) || !tail(2)) return 0;
    if (first == 0xE0 && p[1] < 0xA0) return 0;   // overlong
    if (first == 0xED && p[1] >= 0xA0) return 0;  // surrogate
    return 3;
  }
  if (first > 0xF4 || !tail(1) || !tail(2) || !tail(3)) return 0;
  if (first == 0xF0 && p[1] < 0x90) return 0;   // overlong
  if (first == 0xF4 && p[1] >= 0x90) return 0;  // above U+10FFFF
  return 4;
}

}  // namespace

int64_t find_invalid_utf8(std::string_view bytes) {
  const auto* p = reinterpret_cast<const unsigned char*>(bytes.data());
  const int64_t n = int64_t(bytes.size());
  for (int64_t i = 0; i < n;) {
    uint64_t word;
    while (i + 8 <= n && (std::memcpy(&word, p + i, 8), (word & 0x8080808080808080u) == 0)) i += 8;
    if (i == n) break;
    const int64_t length = sequence_length(p + i, n - i);
    if (length == 0) return i;
    i += length;
  }
  return -1;
}

}  // namespace ingot
