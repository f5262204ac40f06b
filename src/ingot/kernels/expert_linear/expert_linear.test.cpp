#include <gtest/gtest.h>

#include "ingot/kernels/expert_linear/expert_linear_cases.test.h"

namespace ingot {
namespace {

using expert_linear_cases::Case;
using testing::Buffer;
using Operands = expert_linear_cases::Operands<Buffer>;

void forward(const ExpertLinear& a) { expert_linear(a, {}); }
void backward(const ExpertLinearBackward& a) { expert_linear_backward(a, {}); }

TEST(ExpertLinear, FollowsItsFormulaForwardAndBackward) {
  for (DType t : {DType::f64, DType::f32})
    for (const Case& c : expert_linear_cases::kSmall)
      for (int64_t gap : {0, 3}) expert_linear_cases::follows_its_formula<Buffer>(t, c, gap, forward, backward);
}
TEST(ExpertLinear, InfinitiesStayWithTheirExpert) {
  expert_linear_cases::infinities_stay_with_their_expert<Buffer>(DType::f32, {{0, 2, 2, 5}, 6, 3, 4}, backward);
}

TEST(ExpertLinear, EachGradientMayBeLeftOut) {
  const Case& c = expert_linear_cases::kSmall[0];
  Operands all(DType::f64, c, 0), some(DType::f64, c, 0);
  backward(all.backward());
  backward({.dy = some.dy, .w = some.w, .offsets = some.offsets, .dx = some.dx});
  backward({.dy = some.dy, .x = some.x, .offsets = some.offsets, .dw = some.dw});
  backward({.dy = some.dy, .offsets = some.offsets, .db = some.db});
  EXPECT_EQ(testing::values(some.dx), testing::values(all.dx));
  EXPECT_EQ(testing::values(some.dw), testing::values(all.dw));
  EXPECT_EQ(testing::values(some.db), testing::values(all.db));
}

TEST(ExpertLinear, GradientsAreTheSlopesOfTheForwardPass) {
  Case c = expert_linear_cases::kSmall[0];
  c.rows = c.offsets.back();  // the rows behind are NaN
  Operands o(DType::f64, c, 0);
  fill_zero(o.dw);
  fill_zero(o.db);
  backward(o.backward());
  const auto loss = [&] {
    forward(o.forward(true));
    return testing::dot(o.y, o.dy);
  };
  for (const auto& [input, gradient] :
       {std::pair<const Buffer*, const Buffer*>{&o.x, &o.dx}, {&o.w, &o.dw}, {&o.b, &o.db}})
    EXPECT_LT(testing::gradient_error(loss, *input, *gradient, 9), 1e-6);  // central differences in fp64
}

TEST(ExpertLinear, RefusesOperandsThatDoNotFit) {
  const Case& c = expert_linear_cases::kSmall[0];
  for (std::vector<int32_t> at :
       {std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7}, {0, 5, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 25}, {0, 1, 2}}) {
    const Operands o(DType::f64, c, 0);
    ExpertLinear y = o.forward(true);
    ExpertLinearBackward gradients = o.backward();
    y.offsets = gradients.offsets = Tensor(at.data(), Shape{int64_t(at.size())});
    EXPECT_THROW(forward(y), Error);
    EXPECT_THROW(backward(gradients), Error);
  }
  Operands o(DType::f64, c, 0), narrow(DType::f32, c, 0);
  Buffer transposed(DType::f64, {6, 19, 33});
  EXPECT_THROW(forward({.x = o.x, .w = transposed, .offsets = o.offsets, .y = o.y}), Error);
  EXPECT_THROW(forward({.x = o.x, .w = narrow.w, .offsets = o.offsets, .y = o.y}), Error);
  EXPECT_THROW(backward({.dy = o.dy, .x = o.x, .offsets = o.offsets, .dx = o.dx}), Error);
  EXPECT_THROW(backward({.dy = o.dy, .w = o.w, .offsets = o.offsets, .dw = o.dw}), Error);
  using Forward = ExpertLinear;
  using Backward = ExpertLinearBackward;
  EXPECT_EQ(
      testing::device_not_checked<Forward>({.x = o.x, .w = o.w, .b = o.b, .offsets = o.offsets, .y = o.y},
                                           {&Forward::x, &Forward::w, &Forward::b, &Forward::offsets, &Forward::y},
                                           [](const Forward& a, Stream) { forward(a); }),
      "");
  EXPECT_EQ(
      testing::device_not_checked<Backward>(
          {.dy = o.dy, .x = o.x, .w = o.w, .offsets = o.offsets, .dx = o.dx, .dw = o.dw, .db = o.db},
          {&Backward::dy, &Backward::x, &Backward::w, &Backward::offsets, &Backward::dx, &Backward::dw, &Backward::db},
          [](const Backward& a, Stream) { backward(a); }),
      "");
}

}  // namespace
}  // namespace ingot
