// The choice of a portable kernel; grouped.emulated.test.cpp runs the kernels.
#include <gtest/gtest.h>

#include "ingot/kernels/grouped/schedule.h"

namespace ingot {
namespace {

TEST(GroupedPortable, WidthsFollowTheRowsOfAGroup) {
  const auto width_of = [](WeightFormat f, int64_t rows) {
    return grouped::pick_portable_width(f, rows, 32, 360, 132);
  };
  EXPECT_EQ(width_of(WeightFormat::mxfp4, 320), 16);
  EXPECT_EQ(width_of(WeightFormat::mxfp4, 960), 48);
  EXPECT_EQ(width_of(WeightFormat::mxfp4, 8192), 96);
  EXPECT_EQ(width_of(WeightFormat::mxfp4, 16384), 176);
  EXPECT_EQ(width_of(WeightFormat::bf16, 16384), 128);
}

TEST(GroupedPortable, WidthsOfOneMatrixFillTilesAndWaves) {
  const auto width_of = [](WeightFormat f, int64_t rows, int64_t row_tiles, int64_t sms) {
    return grouped::pick_portable_width(f, rows, 1, row_tiles, sms);
  };
  EXPECT_EQ(width_of(WeightFormat::mxfp4, 16, 320, 132), 16);
  EXPECT_EQ(width_of(WeightFormat::mxfp4, 40, 320, 132), 48);
  EXPECT_EQ(width_of(WeightFormat::mxfp4, 100, 320, 132), 48);
  EXPECT_EQ(width_of(WeightFormat::mxfp4, 96, 320, 132), 96);
  // 20 rows of tiles: 860 tiles of 96 rows in 7 waves, or 640 of 128 in 5; on 108 multiprocessors 8 or 6
  EXPECT_EQ(width_of(WeightFormat::bf16, 4096, 320, 132), 128);
  EXPECT_EQ(width_of(WeightFormat::bf16, 4096, 320, 108), 128);
  // 12 rows of tiles on 108 multiprocessors: 516 tiles in 5 waves, or 384 in 4
  EXPECT_EQ(width_of(WeightFormat::bf16, 4096, 180, 108), 96);
}

}  // namespace
}  // namespace ingot
