#pragma once
// Division of numbers below 2^31 by a divisor known at launch: a multiplication, an addition and a shift.
#include <cstdint>

#include "ingot/core/hd.h"

namespace ingot::tile {

struct Divisor {
  uint32_t value = 1, factor = 1, shift = 0;
  Divisor() = default;
  INGOT_HD explicit Divisor(uint32_t d) : value(d) {
    while (shift < 31 && (uint32_t(1) << shift) < d) ++shift;
    factor = uint32_t((((uint64_t(1) << shift) - d) << 32) / d + 1);
  }
};
struct Division {
  uint32_t quotient, remainder;
};
INGOT_HD inline Division divide(uint32_t n, const Divisor& by) {
  const uint32_t q = (uint32_t((uint64_t(n) * by.factor) >> 32) + n) >> by.shift;
  return {q, n - q * by.value};
}

}  // namespace ingot::tile
