// The kernels without tensor cores on the CPU, where sanitizers see their accesses.
#include "ingot/kernels/expert_linear/expert_linear_cases.test.h"

namespace ingot {
namespace cuda {
void expert_linear(const ExpertLinear& a, Stream stream);
void expert_linear_backward(const ExpertLinearBackward& a, Stream stream);
}  // namespace cuda
namespace {

using testing::Buffer;

void forward(const ExpertLinear& a) { cuda::expert_linear(a, {}); }
void backward(const ExpertLinearBackward& a) { cuda::expert_linear_backward(a, {}); }

TEST(ExpertLinearEmulated, FollowsItsFormulaForwardAndBackward) {
  std::vector<expert_linear_cases::Case> cases = expert_linear_cases::kSmall;
  cases.push_back({{0, 65, 66}, 67, 17, 66});  // several tiles of rows and of columns
  for (const auto& c : cases)
    for (DType t : {DType::f32, DType::bf16, DType::f16})
      expert_linear_cases::follows_its_formula<Buffer>(t, c, t == DType::bf16 ? 3 : 0, forward, backward);
}
TEST(ExpertLinearEmulated, InfinitiesStayWithTheirExpert) {
  expert_linear_cases::infinities_stay_with_their_expert<Buffer>(DType::f32, {{0, 2, 2, 5}, 6, 3, 4}, backward);
}
TEST(ExpertLinearEmulated, RefusesTypesWithoutAKernel) {
  const expert_linear_cases::Operands<Buffer> o(DType::f64, expert_linear_cases::kSmall[0], 0);
  EXPECT_THROW(forward(o.forward(true)), Error);
  EXPECT_THROW(backward(o.backward()), Error);
}

}  // namespace
}  // namespace ingot
