#pragma once
// tokenizer.json spells bytes as printable characters: 33..126, 161..172 and 174..255 as themselves, the other 68 in
// order from U+0100 on.
#include <array>
#include <cstdint>

namespace ingot::detail {

constexpr bool byte_is_printable(int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; }

constexpr std::array<char32_t, 256> byte_to_char() {
  std::array<char32_t, 256> table{};
  char32_t other = 256;
  for (int b = 0; b < 256; ++b) table[b] = byte_is_printable(b) ? char32_t(b) : other++;
  return table;
}
inline constexpr std::array<char32_t, 256> kByteToChar = byte_to_char();

// All bytes in the order of their characters, in which trainers number the tokens of single bytes.
constexpr std::array<uint8_t, 256> alphabet_order() {
  std::array<uint8_t, 256> order{};
  int n = 0;
  for (int pass = 0; pass < 2; ++pass)
    for (int b = 0; b < 256; ++b)
      if (byte_is_printable(b) == (pass == 0)) order[n++] = uint8_t(b);
  return order;
}
inline constexpr std::array<uint8_t, 256> kAlphabetOrder = alphabet_order();

}  // namespace ingot::detail
