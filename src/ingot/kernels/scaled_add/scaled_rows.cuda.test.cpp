#include <gtest/gtest.h>

#include "ingot/kernels/scaled_add/scaled_rows_expected.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot::scaled_rows_cases {
namespace {

using testing::DeviceBuffer;

class ScaledRowsCuda : public testing::GpuTest<> {};

TEST_F(ScaledRowsCuda, FollowsItsFormulaAndAddsItsGradients) {
  for (const Size& s : kSizes) {
    for (DType out : {DType::f32, DType::bf16, DType::f16})
      expect_forward<DeviceBuffer>(DType::f32, out, s, [](const ScaledRows& a) { scaled_rows(a, {}); });
    for (bool frozen : {false, true})
      expect_backward<DeviceBuffer>(DType::f32, s, frozen,
                                    [](const ScaledRowsBackward& a) { scaled_rows_backward(a, {}); });
  }
}

}  // namespace
}  // namespace ingot::scaled_rows_cases
