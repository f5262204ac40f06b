// Products of few rows have the bits of grouped_linear().
#if defined(INGOT_HAS_CUDA_DECODE) && defined(INGOT_HAS_CUDA_GROUPED) && !defined(INGOT_EMULATE)
#include "ingot/models/decode/batch/batch_linear.h"

#include <gtest/gtest.h>

#include "ingot/kernels/grouped/grouped_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::DeviceBuffer;

class BatchLinearCuda : public testing::GpuTest<> {};

void check_linear(WeightFormat f, const std::vector<int64_t>& numbers_of_rows, int64_t n, int64_t k, int64_t parts,
                  bool has_bias, bool add = false) {
  const grouped_cases::Bank<DeviceBuffer> bank(f, 1, n, k);
  DeviceBuffer bias(DType::f32, {n});
  testing::fill_normal(bias.host(), 2), bias.upload();
  for (const int64_t rows : numbers_of_rows) {
    SCOPED_TRACE(::testing::Message() << name_of(f) << ", " << rows << " rows, " << n << " x " << k << ", " << parts
                                      << " parts");
    DeviceBuffer x(DType::bf16, {rows, k}, (k + 7) / 8 * 8 + 8), starts(DType::i32, {parts + 1});
    testing::fill_normal(x.host(), 1);
    for (int64_t i = 0; i <= parts; ++i) starts.host().ptr<int32_t>()[i] = int32_t(i * rows);
    x.upload(), starts.upload();
    std::vector<double> got[2];
    for (const bool few : {false, true}) {
      DeviceBuffer y(DType::f32, {parts * rows, n}, n + 3);
      if (add) testing::fill_normal(y.host(), 3);
      y.upload();
      const GroupedLinear a{.x = x,
                            .w = bank.device.tensor().ptr<uint8_t>(),
                            .format = f,
                            .groups = 1,
                            .n = n,
                            .bias = has_bias ? bias.tensor().ptr<float>() : nullptr,
                            .offsets = starts.tensor().ptr<int32_t>(),
                            .y = y,
                            .add = add,
                            .parts = parts};
      ASSERT_TRUE(decode::takes_batch_linear(a));
      few ? decode::batch_linear(a, {}) : grouped_linear(a, {});
      y.download();
      EXPECT_TRUE(y.untouched()) << "written outside of y";
      got[few] = testing::values(y.host());
    }
    ASSERT_EQ(got[1], got[0]);
  }
}

TEST_F(BatchLinearCuda, FewRowsHaveTheBitsOfGroupedLinear) {
  if (!grouped_takes_parts({Device::cuda, 0})) GTEST_SKIP() << "no Hopper";
  for (const WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
    check_linear(f, {64, 48, 33, 32, 24, 16, 13}, 5120, 2880, 1, true);
    check_linear(f, {64, 40, 17, 16, 1}, 2880, 4096, 2, true);
    check_linear(f, {16}, 40, 96, 1, true);  // fewer row tiles than multiprocessors; a last stage of two weight tiles
    check_linear(f, {5}, 1300, 1088, 3, false);
    check_linear(f, {16, 30}, 1024, 3072, 1, true, true);
    check_linear(f, {7}, 9000, 320, 1, true);  // several rounds of row tiles, and a last one of fewer
  }
  check_linear(WeightFormat::bf16, {16}, 40, 46, 1, true);  // columns beyond K
}

TEST_F(BatchLinearCuda, OtherProductsAreNotTaken) {
  DeviceBuffer x(DType::bf16, {65, 64}), y(DType::f32, {65, 64}), many(DType::f32, {32, 100000});
  GroupedLinear a{.x = x,
                  .w = nullptr,
                  .format = WeightFormat::bf16,
                  .groups = 1,
                  .n = 64,
                  .bias = nullptr,
                  .offsets = nullptr,
                  .y = y};
  EXPECT_FALSE(decode::takes_batch_linear(a)) << "65 rows";
  a.x.shape.dim[0] = a.y.shape.dim[0] = 32;
  EXPECT_EQ(decode::takes_batch_linear(a), grouped_takes_parts({Device::cuda, 0}));
  GroupedLinear other = a;
  other.add = true, other.parts = 2;
  EXPECT_FALSE(decode::takes_batch_linear(other)) << "parts that are added to y";
  other = a, other.y = many, other.n = 100000;
  EXPECT_FALSE(decode::takes_batch_linear(other)) << "more row tiles than the multiprocessors take";
}

}  // namespace
}  // namespace ingot
#endif
