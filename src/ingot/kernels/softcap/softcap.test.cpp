#include "ingot/kernels/softcap/softcap.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "ingot/kernels/softcap/softcap_expected.test.h"

namespace ingot {
namespace {

using testing::Buffer;

TEST(Softcap, FollowsItsFormulaInEveryTypeAndShape) {
  for (DType t : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (const auto& [rows, cols, gap] : {std::tuple<int64_t, int64_t, int64_t>{5, 33, 0}, {4, 7, 3}, {0, 8, 0}}) {
      Buffer x(t, {rows, cols}, cols + gap), y(t, {rows, cols}, cols + gap);
      testing::fill_normal(x, 1, 30);
      softcap({.x = x, .y = y, .cap = 20}, {});
      const auto agreed = softcap_agrees(testing::values(x), y, 20);
      EXPECT_TRUE(agreed.ok) << t << ": " << agreed.message;
      softcap({.x = x, .y = x, .cap = 20}, {});
      EXPECT_EQ(testing::values(x), testing::values(y)) << "in place";
      EXPECT_TRUE(x.guards_intact() && y.guards_intact());
    }
}

TEST(Softcap, RefusesTensorsThatDoNotFit) {
  Buffer x(DType::f32, {2, 3}), y(DType::f32, {3, 2}), z(DType::f32, {2, 3}), w(DType::f64, {2, 3});
  EXPECT_THROW(softcap({.x = x, .y = y}, {}), Error);
  EXPECT_THROW(softcap({.x = x, .y = w}, {}), Error);
  EXPECT_THROW(softcap({.x = x, .y = z, .cap = 0}, {}), Error);
  const auto call = [](const Softcap& a, Stream s) { softcap(a, s); };
  EXPECT_EQ(testing::device_not_checked<Softcap>({.x = x, .y = z}, {&Softcap::x, &Softcap::y}, call), "");
}

}  // namespace
}  // namespace ingot
