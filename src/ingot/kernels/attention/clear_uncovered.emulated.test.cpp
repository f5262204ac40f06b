// The CUDA kernel for rows outside all segments, on the CPU, where sanitizers see its accesses.
#include "ingot/kernels/attention/clear_uncovered.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::values;

// Expects 7.25 where the row is covered, and 0 after the segments.
void expect_cleared(const Buffer& b, int64_t covered, const char* what) {
  const Tensor t = b;
  const auto found = values(b);
  for (int64_t row = 0; row < t.size(0); ++row)
    for (int64_t i = 0; i < t.size(1) * t.size(2); ++i)
      EXPECT_EQ(found[size_t(row * t.size(1) * t.size(2) + i)], row < covered ? 7.25 : 0.0) << what << " row " << row;
  EXPECT_TRUE(b.guards_intact());
}
Buffer offsets(std::vector<double> at) {
  Buffer b(DType::i32, {int64_t(at.size())});
  testing::assign(b, at);
  return b;
}
Buffer filled(DType type, const Shape& shape, int64_t stride = 0) {
  Buffer b = stride ? Buffer(type, shape, stride) : Buffer(type, shape);
  testing::assign(b, std::vector<double>(size_t(shape.numel()), 7.25));
  return b;
}

TEST(ClearUncoveredEmulated, RowsBehindTheLastSegmentBecomeZeroAndTheirLseMinusInfinity) {
  for (DType type : {DType::bf16, DType::f16})
    for (int64_t covered : {0, 1, 5, 9})
      for (int64_t width : {8, 40, 256}) {
        SCOPED_TRACE(::testing::Message() << type << ' ' << covered << ' ' << width);
        Buffer out = filled(type, {9, 3, width}, width + 8), lse = filled(DType::f32, {3, 9});
        const Buffer cu = offsets({0, double(covered) / 2 - double(covered % 2) / 2, double(covered)});
        cuda::clear_uncovered("attention", {.rows = out, .cu = cu, .lse = lse}, {}, {}, {});
        expect_cleared(out, covered, "out");
        const auto sums = values(lse);
        for (int64_t h = 0; h < 3; ++h)
          for (int64_t row = 0; row < 9; ++row)
            EXPECT_EQ(sums[size_t(h * 9 + row)], row < covered ? 7.25 : -INFINITY) << row;
        EXPECT_TRUE(lse.guards_intact());
      }
}

TEST(ClearUncoveredEmulated, GradientsOfQueriesAndOfKeysHaveOffsetsOfTheirOwn) {
  Buffer dq = filled(DType::bf16, {6, 4, 64}), dk = filled(DType::bf16, {300, 2, 64}),
         dv = filled(DType::bf16, {300, 2, 64});
  const Buffer cu_q = offsets({0, 4}), cu_k = offsets({0, 17});
  cuda::clear_uncovered("attention_backward", {.rows = dq, .cu = cu_q}, {.rows = dk, .cu = cu_k},
                        {.rows = dv, .cu = cu_k}, {});
  expect_cleared(dq, 4, "dq");
  expect_cleared(dk, 17, "dk");
  expect_cleared(dv, 17, "dv");
}

TEST(ClearUncoveredEmulated, AnAbsentOrEmptyTensorLaunchesNothing) {
  const Buffer cu = offsets({0});
  Buffer none(DType::bf16, {0, 2, 8});
  cuda::clear_uncovered("attention", {.rows = none, .cu = cu}, {}, {}, {});
}

}  // namespace
}  // namespace ingot
