// Compares grouped products in every format, tile and variant with the product in fp64.
#ifdef INGOT_HAS_CUDA_GROUPED
#include "ingot/kernels/grouped/grouped.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/kernels/grouped/schedule.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::DeviceBuffer;

// A bank of random matrices in a GPU's weight tiles, on the host and on the GPU, and their decoded numbers.
struct Bank {
  std::vector<uint8_t> memory;
  std::vector<double> numbers;  // (groups, n, k)
  gpu::DeviceMemory device;

  Bank(WeightFormat f, int64_t groups, int64_t n, int64_t k)
      : memory(size_t(groups * row_tile_count(n) * row_tile_bytes(f, k))),
        numbers(size_t(groups * n * k)),
        device(int64_t(memory.size())) {
    const WeightMatrix bank = weight_tiles_at(memory.data(), f, groups, n, k);
    for (int64_t g = 0; g < groups; ++g) {
      std::vector<float> wide(size_t(n * k));
      const Tensor x(wide.data(), {n, k});
      testing::fill_normal(x, 40 + uint64_t(g), g == 1 ? 30 : 0.05);  // scales on both sides of 1
      std::vector<char> data(size_t(n * k * 2)), scales(size_t(n * std::max<int64_t>(4, k)));
      const WeightMatrix rows =
          f == WeightFormat::bf16 ? WeightMatrix(Tensor(data.data(), DType::bf16, {n, k}))
          : f == WeightFormat::fp8
              ? WeightMatrix(f, Tensor(data.data(), DType::u8, {n, k}), Tensor(scales.data(), DType::f32, {n}))
              : WeightMatrix(f, Tensor(data.data(), DType::u8, {n, k / kMxBlock, kMxBlock / 2}),
                             Tensor(scales.data(), DType::u8, {n, k / kMxBlock}));
      if (f == WeightFormat::bf16)
        testing::assign(rows.data, std::vector<double>(wide.begin(), wide.end()));
      else
        quantise(x, rows, {});
      pack_weight_tiles(rows, bank.at(g));
      dequantise(bank.at(g), Tensor(&numbers[size_t(g * n * k)], {n, k}), {});
    }
    to_device_order(bank);
    gpu::copy_to_device(device.data(), memory.data(), int64_t(memory.size()));
  }
};

class GroupedCuda : public testing::GpuTest<> {};

enum class Form { plain, adds, gated };

void check(WeightFormat f, const std::vector<int32_t>& offsets, int64_t n, int64_t k, Form form) {
  const int64_t groups = int64_t(offsets.size()) - 1, rows = offsets.back();
  SCOPED_TRACE(::testing::Message() << name_of(f) << ", " << rows << " rows of " << groups << " groups, " << n << " x "
                                    << k << ", form " << int(form));
  const bool gated = form == Form::gated;
  const Bank bank(f, groups, n, k);
  DeviceBuffer x(DType::bf16, {rows, k}, (k + 7) / 8 * 8 + 8), bias(DType::f32, {groups, n}),
      starts(DType::i32, {groups + 1}), claims(DType::u32, {1}),
      y(gated ? DType::bf16 : DType::f32, {rows, gated ? n / 2 : n}, n + 8);
  testing::fill_normal(x.host(), 1);
  testing::fill_normal(bias.host(), 2);
  std::copy(offsets.begin(), offsets.end(), starts.host().ptr<int32_t>());
  if (form == Form::adds) testing::fill_normal(y.host(), 3);
  const std::vector<double> in = testing::values(x.host()), b = testing::values(bias.host()),
                            old = testing::values(y.host());
  claims.host().ptr<uint32_t>()[0] = 0;
  for (DeviceBuffer* d : {&x, &bias, &starts, &claims, &y}) d->upload();
  grouped_linear({.x = x,
                  .w = static_cast<const uint8_t*>(bank.device.data()),
                  .format = f,
                  .groups = groups,
                  .n = n,
                  .bias = bias.tensor().ptr<float>(),
                  .offsets = starts.tensor().ptr<int32_t>(),
                  .y = y,
                  .add = form == Form::adds,
                  .claims = groups > 1 ? claims.tensor().ptr<uint32_t>() : nullptr},
                 {});
  claims.download();
  EXPECT_EQ(claims.host().ptr<uint32_t>()[0], 0u) << "what the next launch begins with";
  y.download();
  EXPECT_TRUE(y.untouched()) << "written outside of y";
  const std::vector<double> got = testing::values(y.host());
  int wrong = 0;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t r = offsets[size_t(g)]; r < offsets[size_t(g + 1)]; ++r) {
      std::vector<double> sum(static_cast<size_t>(n)), size(sum);
      for (int64_t i = 0; i < n; ++i) {
        const double* const w = &bank.numbers[size_t((g * n + i) * k)];
        double s = b[size_t(g * n + i)], a = std::fabs(s);
        for (int64_t c = 0; c < k; ++c) {
          const double v = w[c] * in[size_t(r * k + c)];
          s += v, a += std::fabs(v);
        }
        sum[size_t(i)] = s, size[size_t(i)] = a * double(k) * 0x1p-23;  // a tensor core truncates its addends
      }
      for (int64_t i = 0; i < (gated ? n / 2 : n); ++i) {
        double want = sum[size_t(i)], allowed = size[size_t(i)];
        const size_t at = size_t(r * (gated ? n / 2 : n) + i);
        if (form == Form::adds) want += old[at], allowed += std::fabs(want) * 0x1p-23;
        if (gated) {
          const double e0 = size[size_t(2 * i)], e1 = size[size_t(2 * i + 1)];
          const double gate = std::min(sum[size_t(2 * i)], 7.), up = std::clamp(sum[size_t(2 * i + 1)], -7., 7.);
          want = gate / (1 + std::exp(-1.702 * gate)) * (up + 1);
          // |gate'| <= 1.2 and |gate| <= 7 on this side of the clamp; then bf16, and the hardware's exponential.
          allowed = 1.2 * e0 * 8 + std::fabs(gate) * e1 + std::fabs(want) * (0x1p-8 + 0x1p-15) + 1e-30;
        }
        if (std::fabs(got[at] - want) <= allowed) continue;
        if (++wrong <= 4) ADD_FAILURE() << "row " << r << ", " << i << ": found " << got[at] << ", expected " << want;
      }
    }
  EXPECT_EQ(wrong, 0);
}

TEST_F(GroupedCuda, EveryFormatTileAndForm) {
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
      check(f, {0, 100, 260, 421}, 272, 416, form);  // full tiles, and tiles with one row more
      check(f, {0, 24, 49, 97, 98, 120}, 272, 416, form);
      check(f, {0, 40, 81, 153, 226}, 272, 416, form);
      check(f, {0, 8, 17, 33, 33, 34}, 528, 224, form);
      if (::testing::Test::HasFailure()) return;
    }
  check(WeightFormat::bf16, few, 6, 46, Form::plain);
}

// One matrix: tiles of 64 rows of weights, and pipeline steps of several weight tiles that end beyond the matrix.
TEST_F(GroupedCuda, OneMatrixAndFewRows) {
  for (WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4})
    for (Form form : {Form::plain, Form::adds, Form::gated})
      for (int32_t rows : {1, 17, 40, 79, 100, 128, 230})
        for (int64_t k : {32, 192, 1024}) {
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
