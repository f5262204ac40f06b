#include "ingot/kernels/sum/sum.h"

#include <gtest/gtest.h>

#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;

TEST(Sum, AddsToTheTotalInFp64AndInOrder) {
  for (DType t : {DType::f64, DType::f32})
    for (int64_t n : {0, 1, 1000, 100003}) {
      Buffer x(t, {n}), total(DType::f64, {1});
      testing::fill_normal(x, 1, 1, 10);
      double want = 2.5;
      for (double v : testing::values(x)) want += v;
      testing::assign(total, {2.5});
      sum({.x = x, .total = total}, {});
      EXPECT_EQ(testing::values(total)[0], want);
      EXPECT_TRUE(x.guards_intact() && total.guards_intact());
    }
}

TEST(Sum, RefusesTensorsThatDoNotFit) {
  Buffer x(DType::f32, {4}), square(DType::f32, {2, 2}), total(DType::f64, {1}), narrow(DType::f32, {1});
  EXPECT_THROW(sum({.x = square, .total = total}, {}), Error);
  EXPECT_THROW(sum({.x = x, .total = narrow}, {}), Error);
  const auto call = [](const Sum& a, Stream s) { sum(a, s); };
  EXPECT_EQ(testing::device_not_checked<Sum>({.x = x, .total = total}, {&Sum::x, &Sum::total}, call), "");
}

}  // namespace
}  // namespace ingot
