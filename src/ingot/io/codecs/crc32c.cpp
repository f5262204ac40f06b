#include "ingot/io/codecs/crc32c.h"

#include <array>

namespace ingot {
namespace {

constexpr std::array<uint32_t, 256> table() {
  std::array<uint32_t, 256> t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) != 0 ? 0x82F63B78u : 0u);
    t[i] = c;
  }
  return t;
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = table();
  uint32_t c = ~0u;
  for (const char byte : bytes) c = (c >> 8) ^ kTable[(c ^ uint8_t(byte)) & 255];
  return ~c;
}

}  // namespace ingot
