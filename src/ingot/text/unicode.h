#pragma once
// The classes of characters that word patterns distinguish.
#include <cstdint>

namespace ingot::detail {

enum CharClass : uint8_t {
  kLetter = 1,    // L*
  kNumber = 2,    // N*
  kSpace = 4,     // White_Space
  kUpper = 8,     // Lu Lt Lm Lo M*: characters that begin a word of o200k
  kLower = 16,    // Ll Lm Lo M*: characters that continue a word of o200k
  kMark = 32,     // M*
  kNewline = 64,  // \r \n
};

// One byte of CharClass bits for each code point up to U+10FFFF.
const uint8_t* char_classes();

}  // namespace ingot::detail
