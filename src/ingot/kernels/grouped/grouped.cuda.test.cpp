// Compares grouped products in every format, tile and variant with the product in fp64.
#ifdef INGOT_HAS_CUDA_GROUPED
#include "ingot/kernels/grouped/grouped.h"

#include <gtest/gtest.h>

#include "ingot/kernels/grouped/grouped_cases.test.h"
#include "ingot/kernels/grouped/launch.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::DeviceBuffer;

class GroupedCuda : public testing::GpuTest<> {};

using grouped_cases::Form;
void check(WeightFormat f, const std::vector<int32_t>& offsets, int64_t n, int64_t k, Form form) {
  grouped_cases::check<DeviceBuffer>(f, offsets, n, k, form);
}

TEST_F(GroupedCuda, EveryFormatTileAndForm) {
  if (testing::kEmulated) GTEST_SKIP() << "too large for the emulator";
  const std::vector<int32_t> few = {0, 0, 5, 22, 22, 30}, fair = {0, 40, 81, 81, 202}, some = {0, 3, 70, 70, 199, 200},
                             many = {0, 129, 140, 400, 400, 600};
  for (WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    for (Form form : {Form::plain, Form::adds, Form::gated}) {
      check(f, few, 40, 96, form);
      check(f, fair, 264, 64, form);
      check(f, some, 528, 160, form);
      check(f, many, 272, 32, form);
      check(f, {0, 130}, 600, 704, form);            // the ring wraps around
      check(f, {0, 600}, 4128, 32, form);            // a tile for every multiprocessor
      check(f, {0, 100, 260, 421}, 272, 416, form);  // groups that fill tiles, and groups of one row more
      check(f, {0, 24, 49, 97, 98, 120}, 272, 416, form);
      check(f, {0, 40, 81, 153, 226}, 272, 416, form);
      check(f, {0, 8, 17, 33, 33, 34}, 528, 224, form);
      if (::testing::Test::HasFailure()) return;
    }
  check(WeightFormat::bf16, few, 6, 46, Form::plain);
}

// One matrix: tiles of 64 rows of weights, and pipeline steps of several weight tiles that end beyond the matrix.
TEST_F(GroupedCuda, OneMatrixAndFewRows) {
  if (testing::kEmulated) GTEST_SKIP() << "too large for the emulator";
  for (WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    for (Form form : {Form::plain, Form::adds, Form::gated})
      for (int32_t rows : {1, 9, 16, 17, 40, 79, 100, 128, 230})
        for (int64_t k : {32, 192, 1024, 2048}) {
          if (k == 2048 && rows > 17) continue;  // more stages than the ring of 16 rows has
          check(f, {0, rows}, 1300, k, form);
          if (::testing::Test::HasFailure()) return;
        }
}

TEST_F(GroupedCuda, EveryFormatAndTileSmall) {
  for (WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    for (Form form : {Form::adds, Form::gated}) {
      check(f, {0, 0, 5, 22, 22, 30}, 40, 96, form);
      check(f, {0, 20, 43, 43, 120}, 264, 64, form);
      check(f, {0, 150}, 136, 96, form);
      check(f, {0, 100, 261}, 40, 96, form);
    }
  check(WeightFormat::bf16, {0, 100}, 1040, 96, Form::plain);
  // The portable form's widest tiles, in blocks that compute several and claim them.
  gpu::Limits few = gpu::limits(0);
  few.sms = 2;
  for (WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    for (Form form : {Form::adds, Form::gated})
      grouped_cases::check<DeviceBuffer>(f, {0, 360, 720}, 264, 96, form, [&](const GroupedLinear& a, Stream stream) {
        grouped::launch(a, few, stream);
      });
}

// K divided among several sums: together they are the product, and a row's sums have the same bits for any number of
// rows, which is for every kernel.
TEST_F(GroupedCuda, PartsOfAProductAddUpAndDoNotDependOnTheNumberOfRows) {
  if (!grouped_takes_parts({Device::cuda, 0})) GTEST_SKIP() << "only Hopper's kernels divide K";
  constexpr int64_t kN = 1300, kMostRows = 128;
  for (WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    for (int64_t k : {1088, 2880, 4096})
      for (int64_t parts : {2, 3}) {
        const grouped_cases::Bank<DeviceBuffer> bank(f, 1, kN, k);
        DeviceBuffer all(DType::bf16, {kMostRows, k}), bias(DType::f32, {kN});
        testing::fill_normal(all.host(), 1), testing::fill_normal(bias.host(), 2);
        all.upload(), bias.upload();
        const std::vector<double> in = testing::values(all.host()), b = testing::values(bias.host());
        std::vector<double> first_row;  // of each part, with the most rows
        for (int64_t rows : {kMostRows, int64_t(70), int64_t(16), int64_t(5)}) {
          SCOPED_TRACE(::testing::Message() << name_of(f) << ", " << rows << " rows of " << k << ", parts " << parts);
          DeviceBuffer starts(DType::i32, {parts + 1}), y(DType::f32, {parts * rows, kN});
          for (int64_t i = 0; i <= parts; ++i) starts.host().ptr<int32_t>()[i] = int32_t(i * rows);
          starts.upload(), y.upload();
          Tensor x = all.tensor();
          x.shape = {rows, k};
          grouped_linear({.x = x,
                          .w = bank.device.tensor().ptr<uint8_t>(),
                          .format = f,
                          .groups = 1,
                          .n = kN,
                          .bias = bias.tensor().ptr<float>(),
                          .offsets = starts.tensor().ptr<int32_t>(),
                          .y = y,
                          .parts = parts},
                         {});
          y.download();
          EXPECT_TRUE(y.untouched()) << "written outside of y";
          const std::vector<double> got = testing::values(y.host());
          int wrong = 0;
          std::vector<double> row;
          for (int64_t r : {int64_t(0), rows - 1})
            for (int64_t i = 0; i < kN; ++i) {
              double want = b[size_t(i)], size = std::fabs(want), sum = 0;
              for (int64_t c = 0; c < k; ++c) {
                const double v = bank.numbers[size_t(i * k + c)] * in[size_t(r * k + c)];
                want += v, size += std::fabs(v);
              }
              for (int64_t p = 0; p < parts; ++p) {
                sum += got[size_t((p * rows + r) * kN + i)];
                if (r == 0) row.push_back(got[size_t((p * rows + r) * kN + i)]);
              }
              wrong += !(std::fabs(sum - want) <= size * double(k) * 0x1p-23);  // a tensor core truncates its addends
            }
          EXPECT_EQ(wrong, 0);
          if (first_row.empty()) first_row = row;
          EXPECT_EQ(row, first_row);
          if (::testing::Test::HasFailure()) return;
        }
      }
}

TEST_F(GroupedCuda, NoRowsAndNoGroupsWriteNothing) {
  check(WeightFormat::mxfp4, {0, 0, 0}, 32, 64, Form::gated);
  DeviceBuffer x(DType::bf16, {0, 64}), y(DType::f32, {0, 16});
  grouped_linear({.x = x, .format = WeightFormat::bf16, .groups = 0, .n = 16, .y = y}, {});
}

// An unsupported product is refused before the GPU is used.
TEST(Grouped, RefusesUnsupportedOperandsByName) {
  const Device gpu{Device::cuda, 0};
  const auto of = [&](DType t, int64_t rows, int64_t cols) {
    return Tensor(reinterpret_cast<void*>(uintptr_t(4096)), t, {rows, cols}, gpu);
  };
  const auto error = [&](GroupedLinear a) -> std::string {
    try {
      grouped_linear(a, {});
    } catch (const Error& e) { return e.what(); }
    return "nothing was refused";
  };
  const GroupedLinear right{
      .x = of(DType::bf16, 4, 64), .format = WeightFormat::bf16, .groups = 1, .n = 16, .y = of(DType::f32, 4, 16)};
  const auto with = [&](auto&& change) {
    GroupedLinear a = right;
    change(a);
    return error(a);
  };
  using G = GroupedLinear;
  const std::pair<std::string, const char*> cases[] = {
      {with([&](G& a) { a.x = of(DType::f32, 4, 64); }), "found x of f32, expected bf16"},
      {with([&](G& a) { a.y = of(DType::f16, 4, 16); }), "found y of f16, expected f32, or bf16 for a gate"},
      {with([&](G& a) { a.format = WeightFormat::f32; }), "found weights of f32, expected bf16, fp8 or mxfp4"},
      {with([&](G& a) { a.y = of(DType::f32, 5, 16); }), "rows of y"},
      {with([&](G& a) { a.y = of(DType::f32, 4, 17); }), "columns of y"},
      {with([&](G& a) { a.y = of(DType::bf16, 4, 8), a.add = true; }), "found add beside a gate"},
      {with([&](G& a) { a.groups = 4096; }), "found 4096 groups, expected 0 to 2048"},
      {with([&](G& a) { a.parts = 2, a.groups = 2; }), "found 2 parts, expected 1"},
      {with([&](G& a) { a.parts = 0; }), "found 0 parts, expected 1"},
      {with([&](G& a) { a.x = of(DType::bf16, int64_t(1) << 32, 64), a.y = of(DType::f32, int64_t(1) << 32, 16); }),
       "found 4294967296 rows of 64 columns"}};
  for (const auto& [found, expected] : cases) {
    EXPECT_EQ(found.rfind("grouped_linear: ", 0), 0u) << found;
    EXPECT_NE(found.find(expected), std::string::npos) << found << ", expected " << expected;
  }
}

// Tensor copies (TMA) need rows that begin at multiples of 16 bytes.
TEST_F(GroupedCuda, RowsThatAreNotAlignedAreNamed) {
  const DeviceBuffer x(DType::bf16, {4, 60}, 61), y(DType::f32, {4, 16});
  try {
    grouped_linear({.x = x, .format = WeightFormat::bf16, .groups = 1, .n = 16, .y = y}, {});
    FAIL() << "nothing was refused";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("grouped_linear: x"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace ingot
#endif
