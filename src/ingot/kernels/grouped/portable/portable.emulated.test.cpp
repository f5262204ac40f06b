// The choice of a portable kernel; grouped.emulated.test.cpp runs the kernels.
#include <gtest/gtest.h>

#include "ingot/kernels/grouped/schedule.h"

namespace ingot {
namespace {

TEST(GroupedPortable, WidthsFollowTheRowsOfAGroup) {
  using grouped::pick_portable_width;
  EXPECT_EQ(pick_portable_width(320, 32), 16);
  EXPECT_EQ(pick_portable_width(960, 32), 48);
  EXPECT_EQ(pick_portable_width(16384, 32), 96);
  EXPECT_EQ(pick_portable_width(16, 1), 16);
  EXPECT_EQ(pick_portable_width(40, 1), 48);
  EXPECT_EQ(pick_portable_width(100, 1), 48);
  EXPECT_EQ(pick_portable_width(96, 1), 96);
  EXPECT_EQ(pick_portable_width(4096, 1), 96);
}

}  // namespace
}  // namespace ingot
