#pragma once
// SHA-256 (FIPS 180-4), with the CPU's SHA instructions where it has them.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace ingot {

class Sha256 {
 public:
  Sha256();
  void update(const void* data, int64_t bytes);
  void update(std::string_view bytes) { update(bytes.data(), int64_t(bytes.size())); }
  std::string hex();  // finishes; 64 lower-case digits

 private:
  std::array<uint32_t, 8> state_;
  uint8_t block_[64];
  int64_t length_ = 0;
};

std::string sha256(std::string_view bytes);
std::string sha256_of_file(const std::string& path);  // in pieces, so a file of any size

namespace detail {
void sha256_blocks_portable(uint32_t* state, const uint8_t* data, int64_t blocks);
}

}  // namespace ingot
