#include "ingot/kernels/scaled_add/scaled_rows.h"

#include <gtest/gtest.h>

#include "ingot/kernels/scaled_add/scaled_rows_expected.test.h"

namespace ingot::scaled_rows_cases {
namespace {

using testing::Buffer;

const auto forward = [](const ScaledRows& a) { scaled_rows(a, {}); };
const auto backward = [](const ScaledRowsBackward& a) { scaled_rows_backward(a, {}); };

TEST(ScaledRows, FollowsItsFormulaInEveryType) {
  for (const Size& s : kSizes) {
    for (DType out : {DType::f32, DType::bf16, DType::f16}) expect_forward<Buffer>(DType::f32, out, s, forward);
    expect_forward<Buffer>(DType::f64, DType::f64, s, forward);
  }
}

TEST(ScaledRows, AddsItsGradients) {
  for (const Size& s : kSizes)
    for (DType type : {DType::f32, DType::f64})
      for (bool frozen : {false, true}) expect_backward<Buffer>(type, s, frozen, backward);
}

TEST(ScaledRows, TheGradientsAreThoseOfTheFormula) {
  Buffer x(DType::f64, {3, 5}), scale(DType::f64, {3}), y(DType::f64, {3, 5}), weights(DType::f64, {3, 5});
  Buffer dx(DType::f64, {3, 5}), dscale(DType::f64, {3});
  testing::fill_normal(x, 1), testing::fill_normal(scale, 2), testing::fill_normal(weights, 3);
  fill_zero(dx), fill_zero(dscale);
  scaled_rows_backward({.x = x, .scale = scale, .dy = weights, .dx = dx, .dscale = dscale}, {});
  const auto value = [&] {
    scaled_rows({.x = x, .scale = scale, .y = y}, {});
    return testing::dot(y, weights);
  };
  EXPECT_LT(testing::gradient_error(value, x, dx, 4), 1e-8);
  EXPECT_LT(testing::gradient_error(value, scale, dscale, 5), 1e-8);
}

TEST(ScaledRows, RefusesTensorsThatDoNotFit) {
  Buffer x(DType::f32, {2, 3}), y(DType::f32, {2, 3}), other(DType::f32, {3, 2}), wide(DType::f64, {2, 3});
  Buffer scale(DType::f32, {2}), longer(DType::f32, {3}), half(DType::bf16, {2, 3});
  EXPECT_THROW(scaled_rows({.x = x, .scale = scale, .y = other}, {}), Error);
  EXPECT_THROW(scaled_rows({.x = x, .scale = longer, .y = y}, {}), Error);
  EXPECT_THROW(scaled_rows({.x = x, .scale = scale, .y = wide}, {}), Error);
  EXPECT_THROW(scaled_rows({.x = half, .scale = scale, .y = half}, {}), Error);
  EXPECT_THROW(scaled_rows_backward({.x = x, .scale = scale, .dy = half, .dx = y, .dscale = scale}, {}), Error);
  EXPECT_THROW(scaled_rows_backward({.x = x, .scale = scale, .dy = x, .dx = y, .dscale = longer}, {}), Error);
  const auto call = [](const ScaledRows& a, Stream s) { scaled_rows(a, s); };
  EXPECT_EQ(testing::device_not_checked<ScaledRows>({.x = x, .scale = scale, .y = y},
                                                    {&ScaledRows::x, &ScaledRows::scale, &ScaledRows::y}, call),
            "");
}

}  // namespace
}  // namespace ingot::scaled_rows_cases
