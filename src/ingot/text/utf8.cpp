#include "ingot/text/utf8.h"

#include "ingot/core/check.h"

namespace ingot {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

// The number of bytes at the start of `s` that are a prefix of some well-formed character, and whether they are a whole
// character.
struct Part {
  int length;
  bool whole;
};
Part character_part(std::string_view s) {
  const auto b = [&](size_t i) { return uint8_t(s[i]); };
  const uint8_t first = b(0);
  const int wanted = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (wanted == 0) return {0, false};
  for (int i = 1; i < wanted; ++i) {
    if (size_t(i) >= s.size()) return {i, false};
    uint8_t low = 0x80, high = 0xbf;
    if (i == 1 && first == 0xe0) low = 0xa0;   // overlong
    if (i == 1 && first == 0xed) high = 0x9f;  // surrogates
    if (i == 1 && first == 0xf0) low = 0x90;   // overlong
    if (i == 1 && first == 0xf4) high = 0x8f;  // above U+10FFFF
    if (b(i) < low || b(i) > high) return {i, false};
  }
  return {wanted, true};
}

}  // namespace

void require_utf8(std::string_view text, std::string_view what) {
  const int64_t at = find_invalid_utf8(text);
  if (at < 0) return;
  static constexpr char kHex[] = "0123456789abcdef";
  const uint8_t byte = uint8_t(text[size_t(at)]);
  fail(ErrorCode::bad_data, what, ": byte ", at, " (0x", kHex[byte >> 4], kHex[byte & 15], ") is not valid UTF-8");
}

void utf8_append(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += char(c);
  } else if (c < 0x800) {
    out += {char(0xc0 | c >> 6), char(0x80 | (c & 0x3f))};
  } else if (c < 0x10000) {
    out += {char(0xe0 | c >> 12), char(0x80 | (c >> 6 & 0x3f)), char(0x80 | (c & 0x3f))};
  } else {
    out += {char(0xf0 | c >> 18), char(0x80 | (c >> 12 & 0x3f)), char(0x80 | (c >> 6 & 0x3f)), char(0x80 | (c & 0x3f))};
  }
}

std::string Utf8Stream::push(std::string_view bytes) {
  rest_ += bytes;
  std::string out;
  std::string_view left = rest_;
  while (!left.empty()) {
    const Part part = character_part(left);
    if (part.whole) {
      out += left.substr(0, size_t(part.length));
    } else if (part.length > 0 && size_t(part.length) == left.size()) {
      break;  // may still become a character
    } else {
      out += kReplacement;
    }
    left.remove_prefix(size_t(part.length > 0 ? part.length : 1));
  }
  rest_ = std::string(left);
  return out;
}

std::string Utf8Stream::finish() {
  const bool incomplete = !rest_.empty();
  rest_.clear();
  return std::string(incomplete ? kReplacement : "");
}

}  // namespace ingot
