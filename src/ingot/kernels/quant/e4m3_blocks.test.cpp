#include "ingot/kernels/quant/e4m3_blocks.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "ingot/kernels/quant/quant.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

// By trying: the smallest sufficient scale, then the nearest e4m3 number, of two equally near the one with even bits.
std::vector<float> tried(std::vector<float> row) {
  for (size_t first = 0; first < row.size(); first += 32) {
    const size_t end = std::min(first + 32, row.size());
    double top = 0;
    bool numbers = true;
    for (size_t i = first; i < end; ++i) {
      row[i] = float(bf16(row[i]));
      numbers &= std::isfinite(row[i]);
      top = std::max(top, std::abs(double(row[i])));
    }
    int e = -118;
    while (numbers && top > std::ldexp(448., e)) ++e;
    for (size_t i = first; i < end; ++i) {
      double best = std::numeric_limits<double>::infinity();
      int code_of_best = 0;
      for (int code = 0; code < 0x7f; ++code) {
        const double away = std::abs(std::abs(double(row[i])) - std::ldexp(double(e4m3_value(uint8_t(code))), e));
        if (away > best || (away == best && code % 2 != 0)) continue;
        best = away, code_of_best = code;
      }
      const double y = std::ldexp(double(e4m3_value(uint8_t(code_of_best))), e);
      row[i] = numbers ? std::copysign(float(y), row[i]) : NAN;
    }
  }
  return row;
}
void expect_tried(std::vector<float> row) {
  const std::vector<float> want = tried(row), from = row;
  round_to_e4m3_blocks(row.data(), int64_t(row.size()));
  for (size_t i = 0; i < row.size(); ++i) {
    if (std::isnan(want[i])) {
      EXPECT_TRUE(std::isnan(row[i])) << i;
      continue;
    }
    EXPECT_EQ(std::bit_cast<uint32_t>(row[i]), std::bit_cast<uint32_t>(want[i]))
        << "number " << i << ": " << from[i] << " became " << row[i] << ", expected " << want[i];
    EXPECT_EQ(float(bf16(row[i])), row[i]) << "no bf16 number";
  }
}

TEST(e4m3_blocks, every_number_of_bf16_beside_every_power_is_the_best_by_search) {
  // Each number is tried in a block whose largest number is up to 2^20 larger, and as the largest of its block.
  for (uint32_t high = 0; high < 0x7f80; high += 37) {
    std::vector<float> row;
    for (uint32_t below = 0; below < 32; ++below) {
      const uint32_t bits = high > below * 0x67 ? high - below * 0x67 : below;
      row.push_back(std::bit_cast<float>((bits << 16) | (below % 2 != 0 ? 0x80000000u : 0)));
    }
    expect_tried(row);
  }
}

TEST(e4m3_blocks, scales_are_rounded_up_and_powers_are_exact) {
  // 448 is the largest of scale 1; a number just above takes 2, and no number saturates.
  for (const int p : {-110, -20, 0, 3, 90}) {
    const auto scaled = [&](float v) { return std::ldexp(v, p); };
    std::vector<float> row{scaled(448), scaled(1), scaled(0.25f), scaled(-416), scaled(0x1p-9f)};
    const std::vector<float> same = row;
    round_to_e4m3_blocks(row.data(), 5);
    EXPECT_EQ(row, same) << p;
    row = {scaled(450), scaled(448), scaled(0x1p-9f), scaled(0x3p-9f), scaled(-464)};
    round_to_e4m3_blocks(row.data(), 5);
    EXPECT_EQ(row, (std::vector<float>{scaled(448), scaled(448), 0, scaled(0x1p-7f), scaled(-448)})) << p;
    row = {scaled(480), scaled(-496), scaled(16)};
    round_to_e4m3_blocks(row.data(), 3);
    EXPECT_EQ(row, (std::vector<float>{scaled(480), scaled(-512), scaled(16)})) << p;
  }
}

TEST(e4m3_blocks, zeros_subnormals_and_the_largest_numbers) {
  const float tiny = std::numeric_limits<float>::denorm_min(), least = std::numeric_limits<float>::min();
  expect_tried({0, -0.f, 0, 0});
  expect_tried({tiny, -tiny, least, 0x1p-133f, 0x3p-128f, 0x1p-127f, -0x5p-129f});
  expect_tried({0x1p-109f, 0x1p-118f, 0x1p-127f, 0x3p-129f, 0x1p-128f});
  const float largest = std::bit_cast<float>(0x7f7f0000u);
  expect_tried({largest, -largest, 0x1p120f, 0x1p113f, 0x1p111f, 0x5p108f, 1});
  // bf16's rounding comes first: fp32 numbers beyond bf16's largest number become infinity.
  expect_tried({std::numeric_limits<float>::max(), 1});
}

TEST(e4m3_blocks, a_nan_or_infinity_affects_only_its_own_block) {
  for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
    std::vector<float> row(70, 1.25f);
    row[40] = bad;
    expect_tried(row);
    row = std::vector<float>(3, bad);
    expect_tried(row);
  }
}

TEST(e4m3_blocks, rows_of_any_length_end_in_a_shorter_block) {
  for (const int64_t n : {0, 1, 25, 31, 32, 33, 64, 95, 2880}) {
    std::vector<float> row(size_t(n + 1), 0.f);
    testing::fill_normal(Tensor(row.data(), {n + 1}), uint64_t(n), 30);
    for (size_t i = 0; i < row.size(); i += 7) row[i] *= 1e-4f;
    std::vector<float> all(row.begin(), row.end() - 1);
    expect_tried(all);
    std::vector<float> guarded = row;
    round_to_e4m3_blocks(guarded.data(), n);
    EXPECT_EQ(guarded.back(), row.back());
    std::vector<double> wide(row.begin(), row.end() - 1);
    round_to_e4m3_blocks(wide.data(), n);
    EXPECT_EQ(wide, std::vector<double>(guarded.begin(), guarded.end() - 1));
    round_to_e4m3_blocks(guarded.data(), n);  // rounding a rounded number changes nothing
    EXPECT_EQ(std::vector<double>(guarded.begin(), guarded.end() - 1), wide);
  }
}

}  // namespace
}  // namespace ingot
