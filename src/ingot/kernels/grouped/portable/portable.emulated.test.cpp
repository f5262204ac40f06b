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

TEST(GroupedPortable, WidthsOfOneMatrixAreThoseWhoseWavesEndFirst) {
  const auto width_of = [](WeightFormat f, int64_t rows, int64_t row_tiles, int64_t sms) {
    return grouped::pick_portable_width(f, rows, 1, row_tiles, sms);
  };
  EXPECT_EQ(width_of(WeightFormat::mxfp4, 16, 320, 132), 16);
  EXPECT_EQ(width_of(WeightFormat::mxfp4, 100, 320, 132), 48);
  EXPECT_EQ(width_of(WeightFormat::mxfp4, 4096, 320, 132), 176);
  // 20 rows of tiles: 640 tiles of 128 rows of x in 5 waves, or 860 of 96 in 7; on 108 multiprocessors 6 or 8
  EXPECT_EQ(width_of(WeightFormat::bf16, 4096, 320, 132), 128);
  EXPECT_EQ(width_of(WeightFormat::bf16, 4096, 320, 108), 128);
  EXPECT_EQ(width_of(WeightFormat::bf16, 512, 320, 132), 96);  // a wave of 80 tiles, or one of 120
  EXPECT_EQ(width_of(WeightFormat::bf16, 4096, 2, 132), 48);   // a router's weights: more multiprocessors have work
}

}  // namespace
}  // namespace ingot
