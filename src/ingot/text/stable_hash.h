#pragma once
// FNV-1a over a canonical byte order: the hash stored in files, which is the same on every machine.
#include <cstdint>
#include <string_view>

namespace ingot::detail {

class StableHash {
 public:
  void bytes(std::string_view s) {
    number(int64_t(s.size()));
    for (char c : s) byte(uint8_t(c));
  }
  void number(int64_t v) {
    for (int i = 0; i < 8; ++i) byte(uint8_t(uint64_t(v) >> 8 * i));
  }
  uint32_t value() const {
    const uint32_t folded = uint32_t(state_ ^ state_ >> 32);
    return folded ? folded : 1;  // 0 means "unknown" in shards
  }

 private:
  void byte(uint8_t b) { state_ = (state_ ^ b) * 0x100000001b3u; }
  uint64_t state_ = 0xcbf29ce484222325u;
};

}  // namespace ingot::detail
