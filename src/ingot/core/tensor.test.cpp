#include "ingot/core/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "ingot/testing/testing.h"

namespace ingot {
namespace {

TEST(tensor, slices_select_and_reshape_keep_strides) {
  float x[24];
  for (int i = 0; i < 24; ++i) x[i] = float(i);
  const Tensor t(x, {2, 3, 4});
  EXPECT_TRUE(t.contiguous());
  EXPECT_EQ(t.rows(), 6);
  const Tensor s = t.slice(2, 1, 3);
  EXPECT_FALSE(s.contiguous());
  EXPECT_TRUE(s.rows_uniform());
  EXPECT_EQ(s.select(0, 1).select(0, 2).ptr<float>()[1], 22);
  EXPECT_EQ(t.reshape({4, 6}).row(3).ptr<float>()[0], 18);
  EXPECT_THROW(s.reshape({12}), Error);
}

TEST(tensor, filling_and_copying_refuse_tensors_outside_the_cpu) {
  float x[2] = {1, 2}, y[2] = {};
  const Tensor here(x, {2}), there(y, {2}, {Device::cuda, 1});
  EXPECT_THROW(fill_zero(there), Error);
  EXPECT_THROW(copy(here, there), Error);
  EXPECT_THROW(copy(there, here), Error);
  EXPECT_EQ(x[0] + y[0], 1);
}

TEST(tensor, an_error_prints_both_values) {
  try {
    INGOT_CHECK_EQ(2 + 2, 5, "arithmetic");
    FAIL() << "expected an Error";
  } catch (const Error& e) { EXPECT_STREQ(e.what(), "arithmetic: found 4, expected 5"); }
}

TEST(dtype, every_f16_and_bf16_survives_a_round_trip) {
  for (uint32_t b = 0; b < 65536; ++b) {
    f16 h;
    h.bits = uint16_t(b);
    const float f = h;
    if (std::isnan(f))
      EXPECT_TRUE(std::isnan(float(f16(f))));
    else
      EXPECT_EQ(f16(f).bits, h.bits);
    bf16 g;
    g.bits = uint16_t(b);
    if (std::isnan(float(g)))
      EXPECT_TRUE(std::isnan(float(bf16(float(g)))));
    else
      EXPECT_EQ(bf16(float(g)).bits, g.bits);
  }
}

TEST(dtype, rounding_to_f16_is_to_nearest_even) {
  EXPECT_EQ(f16(1.0f + 0x1p-11f).bits, f16(1.0f).bits);  // a tie goes to the even mantissa
  EXPECT_EQ(f16(1.0f + 3 * 0x1p-11f).bits, f16(1.0f + 0x1p-9f).bits);
  EXPECT_EQ(f16(65519.f).bits, 0x7bff);  // the largest finite value
  EXPECT_EQ(f16(65520.f).bits, 0x7c00);
  EXPECT_EQ(f16(0x1p-25f).bits, 0);  // half of the smallest subnormal ties to zero
  EXPECT_EQ(f16(0x1.8p-25f).bits, 1);
}

// A kernel that walks one element too far reads the guard of its input and writes the guard of its output.
TEST(buffer, a_copy_of_one_element_too_many_changes_a_guard) {
  for (const DType type : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i32, DType::u8}) {
    testing::Buffer x(type, {3, 7}), y(type, {3, 7});
    const Tensor from = x, to = y;
    std::memcpy(to.data, from.data, size_t(from.bytes()));
    EXPECT_TRUE(y.guards_intact()) << type;
    std::memcpy(to.data, from.data, size_t(from.bytes() + size_of(type)));
    EXPECT_FALSE(y.guards_intact()) << type;
  }
}

TEST(buffer, elements_and_guards_are_nans_in_every_floating_type) {
  for (const DType type : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (int buffer = 0; buffer < 16; ++buffer) {
      const testing::Buffer rows(type, {2, 3}, 5);
      const Tensor all(rows.tensor().data, type, {7});  // the gap between the rows is a guard
      for (const double v : testing::values(all)) EXPECT_TRUE(std::isnan(v)) << type;
    }
}

}  // namespace
}  // namespace ingot
