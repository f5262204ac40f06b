#include "ingot/kernels/residual/residual_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot::residual_cases {
namespace {

class ResidualCuda : public testing::GpuTest<> {};

TEST_F(ResidualCuda, AgreesWithTheCpuInFp64Small) {
  const auto forward = forward_cases<>();
  const auto backward = backward_cases<>();
  std::vector<Size> sizes(std::begin(kSizes), std::end(kSizes));
  sizes.insert(sizes.end(), {{37, 136, 8}, {3, 2056, 0}});
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (const Size& s : sizes) {
      for (const OpCase& c : forward) expect_agrees<testing::DeviceBuffer>(c, c, type, s);
      for (const BackwardCase& c : backward) expect_agrees<testing::DeviceBuffer>(c.op, c.op, type, s);
    }
}

// More rows than blocks times rows of a block.
TEST_F(ResidualCuda, EveryBlockTakesSeveralRows) {
  if (testing::kEmulated) GTEST_SKIP() << "too large for the emulator";
  const Size large{1100, 1032, 8};
  for (const BackwardCase& c : backward_cases<>()) expect_agrees<testing::DeviceBuffer>(c.op, c.op, DType::bf16, large);
}

TEST_F(ResidualCuda, AMissingWorkspaceIsNamed) {
  testing::DeviceBuffer x(DType::bf16, {4, 8}), c(DType::f32, {8});
  try {
    mix_backward({.x = x, .x0 = x, .a = c, .b = c, .dy = x, .dx = x, .dx0 = x}, {});
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("mix_backward: bytes of workspace"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace ingot::residual_cases
