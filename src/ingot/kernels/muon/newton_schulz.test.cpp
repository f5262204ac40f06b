// The choice of the iteration's form, its parts and its scale.
#include "ingot/kernels/muon/newton_schulz.h"

#include <gtest/gtest.h>

#include <cmath>

namespace ingot {
namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

TEST(newton_schulz_form, long_matrices_iterate_on_their_square) {
  for (const auto& [rows, cols, on_square] : {std::tuple{512, 2048, true},
                                              {2048, 512, true},
                                              {256, 512, true},
                                              {512, 256, true},
                                              {512, 1023, false},
                                              {512, 512, false},
                                              {1, 1, false},
                                              {1, 2, true}}) {
    EXPECT_EQ(iterates_on_square(rows, cols), on_square) << rows << " x " << cols;
    EXPECT_EQ(squares_of(rows, cols), on_square ? 5 : 2);
  }
}

TEST(newton_schulz_form, a_part_ends_before_its_polynomial_exceeds_the_growth) {
  const auto parts = [](int steps, double growth) { return parts_on_square({steps, kA, kB, kC}, growth); };
  EXPECT_EQ(parts(5, 512), std::vector({5}));    // 3.4445^5 = 485
  EXPECT_EQ(parts(5, 64), std::vector({2, 3}));  // 3.4445^3 = 41
  EXPECT_EQ(parts(6, 64), std::vector({3, 3}));
  EXPECT_EQ(parts(20, 512), std::vector({5, 5, 5, 5}));
  EXPECT_EQ(parts(2, 1), std::vector({1, 1}));
  EXPECT_EQ(parts(0, 512), std::vector<int>());
}

// The range bounds what a scan of singular values finds, and is no larger than a scan with fine steps shows.
TEST(newton_schulz_form, the_range_of_an_iteration_is_what_singular_values_reach) {
  for (const auto& [a, b, c] : {std::tuple{kA, kB, kC},
                                {1.875, -1.25, 0.375},
                                {2.0, -1.5, 0.5},
                                {3.0, -4.0, 2.0},
                                {1.5, -0.5, 0.0},
                                {1.0, 0.0, 0.0}}) {
    constexpr int kPoints = 20000;
    double value = 1, factor = 0, most = 1;
    for (int step = 0; step < 5; ++step) {
      double next = 0;
      for (int i = 0; i <= kPoints; ++i) {
        const double s = value * i / kPoints, q = a + b * s * s + c * s * s * s * s;
        factor = std::max(factor, std::fabs(q)), next = std::max(next, std::fabs(s * q));
      }
      value = next, most = std::max(most, value);
    }
    const IterationRange range = iteration_range({5, a, b, c});
    EXPECT_NEAR(range.value, most, 1e-6 * most) << a;
    EXPECT_NEAR(range.factor, factor, 1e-6 * factor) << a;
  }
}

TEST(newton_schulz_form, numbers_of_f16_stay_in_range_or_the_coefficients_are_refused) {
  EXPECT_EQ(cuda::iteration_scale("muon", {5, kA, kB, kC}), 2048);
  EXPECT_EQ(cuda::iteration_scale("muon", {5, 1, 0, 0}), 32768);
  std::string message;
  try {
    cuda::iteration_scale("muon", {5, 8.2, -23.6, 17.2});
  } catch (const Error& e) { message = e.what(); }
  EXPECT_NE(message.find("muon: found coefficients 8.2, -23.6, 17.2"), message.npos) << message;
}

}  // namespace
}  // namespace ingot
