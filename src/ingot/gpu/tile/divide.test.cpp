#include "ingot/gpu/tile/divide.cuh"

#include <gtest/gtest.h>

#include "ingot/core/rng.h"

namespace ingot {
namespace {

TEST(Divide, IsExactForEveryDivisorAndNumberBelowTwoToThe31) {
  const Rng rng(1, Purpose::test, 0);
  uint64_t draw = 0;
  const auto check = [](uint32_t n, const tile::Divisor& by) {
    const tile::Division got = tile::divide(n, by);
    ASSERT_EQ(got.quotient, n / by.value) << n << " / " << by.value;
    ASSERT_EQ(got.remainder, n % by.value) << n << " / " << by.value;
  };
  constexpr uint32_t kLast = 0x7fffffff;
  for (uint32_t k = 0; k < 3000; ++k) {
    const uint32_t d = k < 1100   ? k + 1
                       : k < 1131 ? uint32_t(1) << (k - 1100)
                                  : 1 + uint32_t(rng.below(draw++, kLast)) % (uint32_t(2) << (k % 31));
    const tile::Divisor by(d);
    for (uint32_t n : {0u, 1u, d - 1, d, kLast, kLast - 1, kLast / d * d, kLast / d * d - 1})
      if (n <= kLast) check(n, by);
    for (int i = 0; i < 20; ++i) check(uint32_t(rng.below(draw++, kLast)), by);
  }
}

}  // namespace
}  // namespace ingot
