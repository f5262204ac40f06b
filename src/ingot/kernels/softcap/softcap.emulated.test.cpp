// The CUDA kernel and its launcher on the CPU.
#include "ingot/kernels/softcap/softcap.h"

#include <gtest/gtest.h>

#include "ingot/kernels/softcap/softcap_expected.test.h"

namespace ingot {
namespace cuda {
void softcap(const Softcap& a, Stream stream);
}  // namespace cuda
namespace {

using testing::Buffer;

TEST(SoftcapEmulated, FollowsItsFormula) {
  for (DType t : {DType::f32, DType::bf16})
    for (int64_t gap : {0, 5}) {
      Buffer x(t, {9, 33}, 33 + gap), y(t, {9, 33}, 33 + gap);
      testing::fill_normal(x, 1, 30);
      cuda::softcap({.x = x, .y = y, .cap = 20}, {});
      const auto agreed = softcap_agrees(testing::values(x), y, 20);
      EXPECT_TRUE(agreed.ok) << t << ": " << agreed.message;
      EXPECT_TRUE(x.guards_intact() && y.guards_intact());
    }
}

}  // namespace
}  // namespace ingot
