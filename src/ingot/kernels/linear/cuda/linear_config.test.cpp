#include "ingot/kernels/linear/cuda/linear_config.h"

#include <gtest/gtest.h>

namespace ingot::cuda {
namespace {

constexpr double kH100 = 3.35e12, kH200 = 4.9e12;

TEST(LinearConfig, TheCoreTakesProductsThatFillTheGpu) {
  EXPECT_TRUE(core_is_faster({98304, 2048, 512}, false, 0, 132, kH200));
  EXPECT_TRUE(core_is_faster({8192, 22016, 4096}, false, 0, 132, kH200));
  EXPECT_FALSE(core_is_faster({64, 4096, 4096}, false, 0, 132, kH200));    // one row of tiles
  EXPECT_FALSE(core_is_faster({512, 512, 98304}, false, 0, 132, kH200));   // 16 tiles: K must be divided
  EXPECT_FALSE(core_is_faster({3072, 768, 16384}, false, 0, 132, kH200));  // 144 tiles on 132 multiprocessors
  EXPECT_FALSE(core_is_faster({1024, 4096, 4096}, false, 0, 132, kH200));  // two waves
  EXPECT_TRUE(core_is_faster({4096, 4096, 1024}, false, 0, 132, kH200));
  EXPECT_FALSE(core_is_faster({98304, 2048, 512}, true, 0, 132, kH200));  // a bias is cuBLASLt's
  EXPECT_TRUE(core_is_faster({128256, 4096, 4096}, false, 0, 132, kH200));
  EXPECT_FALSE(core_is_faster({128256, 4096, 4096}, false, int64_t(128256) * 4096 * 4, 132, kH200));  // sums beyond L2
}
TEST(LinearConfig, LongProductsFarBeyondL2WantFastMemory) {
  for (const gemm::Problem& p : {gemm::Problem{8192, 4096, 22016}, {22016, 4096, 8192}, {98304, 512, 2048}}) {
    EXPECT_TRUE(core_is_faster(p, false, 0, 132, kH200));
    EXPECT_FALSE(core_is_faster(p, false, 0, 132, kH100));
  }
  EXPECT_TRUE(core_is_faster({8192, 22016, 4096}, false, 0, 132, kH100));  // rows of A stay in L2
  EXPECT_TRUE(core_is_faster({98304, 2048, 512}, false, 0, 132, kH100));
  EXPECT_TRUE(core_is_faster({4096, 4096, 13824}, false, 0, 132, kH100));
  EXPECT_TRUE(core_is_faster({16384, 512, 8192}, false, 0, 132, kH100));  // and so does B
  EXPECT_FALSE(core_is_faster({4096, 4096, 128256}, false, 0, 132, kH200));
}
TEST(LinearConfig, OnlyOneVariantAddsToItsOutput) {
  EXPECT_EQ(pick_core_form({8192, 22016, 4096}, true, 132), 2);
  EXPECT_EQ(pick_core_form({4096, 4096, 4096}, false, 132), 0);
  EXPECT_EQ(pick_core_form({8192, 8192, 8192}, false, 132), 1);
}

}  // namespace
}  // namespace ingot::cuda
