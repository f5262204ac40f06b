#pragma once
// Philox4x32-10 (Salmon et al., SC 2011), a counter-based generator: the number for (seed, purpose, step, index) never
// depends on earlier numbers, so data order, initialisation and sampling resume exactly.
#include <array>
#include <cmath>
#include <cstdint>

#include "ingot/core/hd.h"

namespace ingot {

enum class Purpose : uint32_t { init = 1, data = 2, sampling = 3, test = 4, dropout = 5, split = 6, adapter = 7 };

class Rng {
 public:
  INGOT_HD Rng(uint64_t seed, Purpose purpose, uint32_t step = 0)
      : key_{uint32_t(seed), uint32_t(seed >> 32)}, purpose_(uint32_t(purpose)), step_(step) {}

  // The four words of counter block `index`.
  INGOT_HD std::array<uint32_t, 4> block(uint64_t index) const {
    uint32_t c0 = uint32_t(index), c1 = uint32_t(index >> 32), c2 = step_, c3 = purpose_, k0 = key_[0], k1 = key_[1];
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
      const uint32_t n0 = uint32_t(b >> 32) ^ c1 ^ k0, n2 = uint32_t(a >> 32) ^ c3 ^ k1;
      c1 = uint32_t(b);
      c3 = uint32_t(a);
      c0 = n0;
      c2 = n2;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
  }
  INGOT_HD uint32_t bits(uint64_t index) const { return block(index >> 2)[index & 3]; }
  // Uniform in (0, 1), 53 bits, never 0 or 1.
  double uniform(uint64_t index) const {
    const auto b = block(index);
    return (double((uint64_t(b[0]) << 21) ^ (b[1] >> 11)) + 0.5) * 0x1p-53;
  }
  // Uniform in [0, n), without modulo bias to within 2^-64.
  uint64_t below(uint64_t index, uint64_t n) const {
    const auto b = block(index);
    return uint64_t((__uint128_t((uint64_t(b[0]) << 32) | b[1]) * n) >> 64);
  }
  // Standard normal (Box-Muller).
  double normal(uint64_t index) const {
    const auto b = block(index);
    const double u = (double(b[0]) + 0.5) * 0x1p-32, v = (double(b[1]) + double(b[2]) * 0x1p-32) * 0x1p-32;
    return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
  }

 private:
  uint32_t key_[2];
  uint32_t purpose_, step_;
};

}  // namespace ingot
