#pragma once
// Classes of characters that word patterns ask about.
#include <cstdint>

namespace ingot::detail {

enum CharClass : uint8_t {
  kLetter = 1,    // L*
  kNumber = 2,    // N*
  kSpace = 4,     // White_Space
  kUpper = 8,     // Lu Lt Lm Lo M*: what o200k lets begin a word
  kLower = 16,    // Ll Lm Lo M*: what may follow
  kMark = 32,     // M*
  kNewline = 64,  // \r \n
};

// One byte of CharClass bits for each code point up to U+10FFFF.
const uint8_t* char_classes();

}  // namespace ingot::detail
