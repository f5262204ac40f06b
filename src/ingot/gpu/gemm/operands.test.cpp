#include "ingot/gpu/gemm/operands.h"

#include <gtest/gtest.h>

#include <string>

#include "ingot/testing/temporary_directory.h"

namespace ingot::gemm {
namespace {

template <class Check> std::string said(Check&& check, const Tensor& t) {
  return testing::error_of([&] { check("room: y", t); });
}
Tensor of(DType type, const Shape& shape, int64_t stride) {
  Tensor t(nullptr, type, shape, {Device::cuda, 0});
  t.stride[t.rank() - 2] = stride;
  if (t.rank() == 3) t.stride[0] = shape[1] * stride;
  return t;
}
struct Type {
  DType type;
  int64_t of_16_bytes;
};
constexpr Type kTypes[] = {{DType::bf16, 8}, {DType::f16, 8}, {DType::f32, 4}, {DType::f64, 2}};

TEST(GemmOperands, OnlyRowsOfWhole16BytesHaveNoNeighboursToHarm) {
  for (const auto& [type, whole] : kTypes)
    for (int64_t cols = 1; cols <= 24; ++cols)
      for (const Shape& shape : {Shape{3, cols}, Shape{2, 3, cols}})
        EXPECT_EQ(said(check_whole_rows, of(type, shape, 32)) == "", cols % whole == 0) << type << ' ' << shape;
}
TEST(GemmOperands, PaddingSufficesIfItReachesTheNext16Bytes) {
  for (const auto& [type, whole] : kTypes)
    for (int64_t cols = 1; cols <= 24; ++cols)
      for (int64_t stride = cols; stride <= 32; ++stride)
        for (const Shape& shape : {Shape{3, cols}, Shape{2, 3, cols}})
          EXPECT_EQ(said(check_padded_rows, of(type, shape, stride)) == "",
                    stride >= (cols + whole - 1) / whole * whole)
              << type << ' ' << shape << " at " << stride;
}
TEST(GemmOperands, RowsWithoutPaddingOrWithTooLittleAreRefusedByName) {
  const std::string whole = said(check_whole_rows, of(DType::bf16, {3, 68}, 72));
  for (const char* part : {"room: y", "rows of 68 elements of bf16", "136 bytes", "a multiple of 16"})
    EXPECT_NE(whole.find(part), std::string::npos) << whole;
  const std::string padded = said(check_padded_rows, of(DType::bf16, {3, 68}, 70));
  for (const char* part : {"room: y", "rows of 136 bytes", "every 140", "144 or more"})
    EXPECT_NE(padded.find(part), std::string::npos) << padded;
}

}  // namespace
}  // namespace ingot::gemm
