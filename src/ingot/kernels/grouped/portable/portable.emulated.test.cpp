// The choice of a portable kernel; grouped.emulated.test.cpp runs the kernels.
#include <gtest/gtest.h>

#include "ingot/kernels/grouped/schedule.h"

namespace ingot {
namespace {

TEST(GroupedPortable, WidthsFollowTheRowsOfAGroup) {
  using grouped::pick_portable_width;
  EXPECT_EQ(pick_portable_width(WeightFormat::mxfp4, 320, 32), 16);
  EXPECT_EQ(pick_portable_width(WeightFormat::mxfp4, 960, 32), 48);
  EXPECT_EQ(pick_portable_width(WeightFormat::mxfp4, 8192, 32), 96);
  EXPECT_EQ(pick_portable_width(WeightFormat::mxfp4, 16384, 32), 192);
  EXPECT_EQ(pick_portable_width(WeightFormat::bf16, 16384, 32), 96);
  EXPECT_EQ(pick_portable_width(WeightFormat::mxfp4, 16, 1), 16);
  EXPECT_EQ(pick_portable_width(WeightFormat::mxfp4, 40, 1), 48);
  EXPECT_EQ(pick_portable_width(WeightFormat::mxfp4, 100, 1), 48);
  EXPECT_EQ(pick_portable_width(WeightFormat::mxfp4, 96, 1), 96);
  EXPECT_EQ(pick_portable_width(WeightFormat::bf16, 4096, 1), 96);
  EXPECT_EQ(pick_portable_width(WeightFormat::fp8, 4096, 1), 192);
}

}  // namespace
}  // namespace ingot
