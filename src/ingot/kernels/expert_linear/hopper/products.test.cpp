#include "ingot/kernels/expert_linear/hopper/products.h"

#include <gtest/gtest.h>

namespace ingot::cuda::expert_hopper {
namespace {

TEST(ExpertLinearConfig, GradientsOfMatricesTakeTheTileWhoseLastWaveIsFullest) {
  EXPECT_EQ(pick_matrix_tile(256, 192, 66, 132), 1);  // one wave of 66 pairs of tiles, or two waves of 264 tiles
  EXPECT_EQ(pick_matrix_tile(128, 128, 4, 132), 0);
}

}  // namespace
}  // namespace ingot::cuda::expert_hopper
