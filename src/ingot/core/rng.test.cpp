#include "ingot/core/rng.h"

#include <gtest/gtest.h>

namespace ingot {
namespace {

TEST(rng, matches_the_published_philox_vectors) {
  // Random123 kat_vectors, philox4x32 with 10 rounds: counter and key all zero.
  const auto zero = Rng(0, Purpose(0), 0).block(0);
  EXPECT_EQ(zero, (std::array<uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  // Counter and key all ones.
  const auto ones = Rng(~0ull, Purpose(~0u), ~0u).block(~0ull);
  EXPECT_EQ(ones, (std::array<uint32_t, 4>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
}

TEST(rng, normals_have_mean_zero_and_variance_one) {
  const Rng rng(3, Purpose::test);
  double sum = 0, squares = 0;
  const int n = 200000;
  for (int i = 0; i < n; ++i) {
    const double x = rng.normal(uint64_t(i));
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / n, 0, 4 / std::sqrt(double(n)));  // four standard errors
  EXPECT_NEAR(squares / n, 1, 4 * std::sqrt(2.0 / n));
}

}  // namespace
}  // namespace ingot
