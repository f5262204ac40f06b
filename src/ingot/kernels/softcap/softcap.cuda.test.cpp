#include "ingot/kernels/softcap/softcap.h"

#include <gtest/gtest.h>

#include "ingot/kernels/softcap/softcap_expected.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::DeviceBuffer;

class SoftcapCuda : public testing::GpuTest<> {};

TEST_F(SoftcapCuda, FollowsItsFormulaInEveryTypeAndShape) {
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (const auto& [rows, cols, gap] : {std::tuple<int64_t, int64_t, int64_t>{70, 333, 0}, {40, 7, 3}, {0, 8, 0}}) {
      DeviceBuffer x(t, {rows, cols}, cols + gap), y(t, {rows, cols}, cols + gap);
      testing::fill_normal(x.host(), 1, 30);
      x.upload(), y.upload();
      softcap({.x = x, .y = y, .cap = 20}, {});
      x.download(), y.download();
      const auto agreed = softcap_agrees(testing::values(x.host()), y.host(), 20);
      EXPECT_TRUE(agreed.ok) << t << ": " << agreed.message;
      EXPECT_TRUE(x.untouched(true) && y.untouched());
    }
}

}  // namespace
}  // namespace ingot
