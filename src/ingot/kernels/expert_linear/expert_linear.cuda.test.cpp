// The products of experts on a GPU, by tensor cores and without, against the formula in fp64.
#include "ingot/kernels/expert_linear/expert_linear_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using expert_linear_cases::Case;
using testing::DeviceBuffer;

void forward(const ExpertLinear& a) { expert_linear(a, {}); }
void backward(const ExpertLinearBackward& a) { expert_linear_backward(a, {}); }

class ExpertLinearCuda : public testing::GpuTest<> {};

TEST_F(ExpertLinearCuda, FollowsItsFormulaForwardAndBackwardSmall) {
  for (const Case& c : expert_linear_cases::kSmall)
    for (DType t : {DType::f32, DType::bf16, DType::f16})
      for (int64_t gap : {0, 3}) expert_linear_cases::follows_its_formula<DeviceBuffer>(t, c, gap, forward, backward);
}

// Aligned rows, which tensor cores multiply: less than a stage of rows, exactly a stage, one row more, many tiles;
// experts without rows; rows behind the last expert's; rows of an expert that end inside the sixteen of a warp.
const Case kAligned[] = {{{0, 1, 64, 64, 129, 257, 257}, 260, 64, 128},
                         {{0, 63, 127, 128}, 128, 8, 8},
                         {{0, 300, 300, 301, 700}, 700, 136, 264},
                         {{0, 5}, 300, 72, 200}};
TEST_F(ExpertLinearCuda, TensorCoresFollowTheFormula) {
  if (testing::kEmulated) GTEST_SKIP() << "the emulator has no tensor cores of Hopper";
  for (const Case& c : kAligned)
    for (DType t : {DType::bf16, DType::f16})
      for (int64_t gap : {0, 8}) expert_linear_cases::follows_its_formula<DeviceBuffer>(t, c, gap, forward, backward);
}
// Experts of few rows, and so many that a GPU of 132 multiprocessors takes the wider tile for dw (hopper/products.h).
TEST_F(ExpertLinearCuda, WideTilesFollowTheFormula) {
  if (testing::kEmulated) GTEST_SKIP() << "the emulator has no tensor cores of Hopper";
  Case c{{0}, 200, 192, 256};
  for (int32_t expert = 0; expert < 66; ++expert) c.offsets.push_back(c.offsets.back() + expert % 7);
  expert_linear_cases::follows_its_formula<DeviceBuffer>(DType::bf16, c, 0, forward, backward);
}
TEST_F(ExpertLinearCuda, InfinitiesStayWithTheirExpert) {
  expert_linear_cases::infinities_stay_with_their_expert<DeviceBuffer>(DType::f32, {{0, 2, 2, 5}, 6, 3, 4}, backward);
  if (testing::kEmulated) return;
  expert_linear_cases::infinities_stay_with_their_expert<DeviceBuffer>(DType::bf16,
                                                                       {{0, 70, 70, 75, 200}, 210, 64, 136}, backward);
}
TEST_F(ExpertLinearCuda, ResultsRepeatBitForBit) {
  const Case c = testing::kEmulated ? expert_linear_cases::kSmall[0] : kAligned[2];
  std::vector<std::vector<double>> first;
  for (int i = 0; i < 2; ++i) {
    expert_linear_cases::Operands<DeviceBuffer> o(DType::bf16, c, 0);
    forward(o.forward(true));
    backward(o.backward());
    std::vector<std::vector<double>> found;
    for (DeviceBuffer* b : {&o.y, &o.dx, &o.dw, &o.db}) {
      b->download();
      found.push_back(testing::values(b->host()));
    }
    if (i == 0) first = found;
    EXPECT_EQ(found, first);
  }
}

}  // namespace
}  // namespace ingot
