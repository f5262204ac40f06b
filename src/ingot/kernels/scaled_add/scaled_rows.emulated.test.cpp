// The CUDA kernels on the CPU, where sanitizers see their accesses.
#include <gtest/gtest.h>

#include "ingot/kernels/scaled_add/scaled_rows_expected.test.h"

namespace ingot {
namespace cuda {
void scaled_rows(const ScaledRows& a, Stream stream);
void scaled_rows_backward(const ScaledRowsBackward& a, Stream stream);
}  // namespace cuda
namespace scaled_rows_cases {
namespace {

TEST(ScaledRowsEmulated, FollowsItsFormula) {
  for (const Size& s : kSizes) {
    for (DType out : {DType::f32, DType::bf16, DType::f16})
      expect_forward<testing::Buffer>(DType::f32, out, s, [](const ScaledRows& a) { cuda::scaled_rows(a, {}); });
    for (bool frozen : {false, true})
      expect_backward<testing::Buffer>(DType::f32, s, frozen,
                                       [](const ScaledRowsBackward& a) { cuda::scaled_rows_backward(a, {}); });
  }
}

}  // namespace
}  // namespace scaled_rows_cases
}  // namespace ingot
