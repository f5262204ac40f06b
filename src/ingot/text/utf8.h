#pragma once
// UTF-8 characters, and a stream that never splits a character. For validation see io/utf8.h.
#include <cstdint>
#include <string>
#include <string_view>

#include "ingot/io/utf8.h"

namespace ingot {

// Throws bad_data: "<what>: byte 17 (0xff) is not valid UTF-8".
void require_utf8(std::string_view text, std::string_view what);

struct Utf8Char {
  char32_t code;
  int length;
};
// Decodes the character at `p`, which must begin a valid character.
inline Utf8Char utf8_decode(const char* p) {
  const auto b = [p](int i) { return char32_t(uint8_t(p[i])); };
  if (b(0) < 0x80) return {b(0), 1};
  if (b(0) < 0xe0) return {(b(0) & 0x1f) << 6 | (b(1) & 0x3f), 2};
  if (b(0) < 0xf0) return {(b(0) & 0x0f) << 12 | (b(1) & 0x3f) << 6 | (b(2) & 0x3f), 3};
  return {(b(0) & 0x07) << 18 | (b(1) & 0x3f) << 12 | (b(2) & 0x3f) << 6 | (b(3) & 0x3f), 4};
}
void utf8_append(std::string& out, char32_t code);

// Turns tokens' bytes, which may end inside a character, into whole characters: an incomplete character waits for the
// next call. Each maximal part of bytes that can never become a character gives one U+FFFD (Unicode's recommended
// practice), so the output is always valid UTF-8.
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);
  // Ends the stream: an incomplete character becomes one U+FFFD.
  std::string finish();

 private:
  std::string rest_;
};

}  // namespace ingot
