#include "ingot/kernels/quant/quant.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "ingot/core/cpu/cpu.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::error_of;
using testing::fill_normal;
using testing::values;

constexpr WeightFormat kFormats[] = {WeightFormat::f32, WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4};

// Memory for a matrix in a format. Bytes start as 0xcc.
struct Stored {
  Stored(WeightFormat f, int64_t rows, int64_t cols)
      : data(f == WeightFormat::f32    ? DType::f32
             : f == WeightFormat::bf16 ? DType::bf16
                                       : DType::u8,
             f == WeightFormat::mxfp4 ? Shape{rows, cols / 32, 16} : Shape{rows, cols}),
        scales(f == WeightFormat::fp8 ? DType::f32 : DType::u8, f == WeightFormat::fp8     ? Shape{rows}
                                                                : f == WeightFormat::mxfp4 ? Shape{rows, cols / 32}
                                                                                           : Shape{0}),
        w(f, data, f == WeightFormat::fp8 || f == WeightFormat::mxfp4 ? scales.tensor() : Tensor()) {}
  Buffer data, scales;
  WeightMatrix w;
};

double nearest_by_search(float x, int codes, float (*value)(int)) {
  double best = 1e300, found = 0;
  for (int c = 0; c < codes; ++c) {
    const double v = value(c);
    if (std::isnan(v)) continue;
    const double d = std::abs(v - double(x));
    // At the middle between two codes the even code wins; positive and negative zero are the same number.
    if (d < best || (d == best && c % 2 == 0)) best = d, found = v;
  }
  return found;
}

TEST(quant, the_published_test_vectors_decode) {
  uint8_t bytes[32] = {0x21, 0}, scales[2] = {127, 120};
  bytes[16] = 0xF9;
  const WeightMatrix w(WeightFormat::mxfp4, Tensor(bytes, {1, 2, 16}), Tensor(scales, {1, 2}));
  float out[64];
  dequantise(w, Tensor(out, {1, 64}), {});
  EXPECT_EQ(out[0], 0.5f);
  EXPECT_EQ(out[1], 1.f);
  EXPECT_EQ(out[32], -0.5f * 0x1p-7f);
  EXPECT_EQ(out[33], -6 * 0x1p-7f);
}

TEST(quant, every_code_and_every_scale_widens_to_its_exact_value_at_every_cpu_level) {
  const CpuLevel before = cpu_level();
  for (CpuLevel level : {CpuLevel::baseline, cpu_level_available()}) {
    set_cpu_level(level);
    Stored fp4(WeightFormat::mxfp4, 256, 32), fp8(WeightFormat::fp8, 3, 259);
    for (int s = 0; s < 256; ++s) {
      fp4.scales.tensor().ptr<uint8_t>()[s] = uint8_t(s);
      for (int b = 0; b < 16; ++b) fp4.data.tensor().ptr<uint8_t>()[s * 16 + b] = uint8_t(b | (15 - b) << 4);
    }
    Buffer out(DType::f32, {256, 32}, 35);
    dequantise(fp4.w, out, {});
    for (int s = 0; s < 255; ++s)
      for (int k = 0; k < 32; ++k) {
        const double want = double(e2m1_value(k % 2 == 0 ? k / 2 : 15 - k / 2)) * std::ldexp(1.0, s - 127);
        ASSERT_EQ(out.tensor().ptr<float>()[s * 35 + k], float(want)) << s << " " << k;
      }
    EXPECT_TRUE(std::isnan(out.tensor().ptr<float>()[255 * 35 + 3]));
    EXPECT_TRUE(out.guards_intact());
    const float row_scale[3] = {1, 0x1p-5f, 3};
    for (int64_t n = 0; n < 3; ++n) {
      fp8.scales.tensor().ptr<float>()[n] = row_scale[n];
      for (int64_t k = 0; k < 259; ++k) fp8.data.tensor().ptr<uint8_t>()[n * 259 + k] = uint8_t(k);
    }
    Buffer wide(DType::f32, {3, 259});
    dequantise(fp8.w, wide, {});
    for (int64_t n = 0; n < 3; ++n)
      for (int64_t k = 0; k < 259; ++k) {
        const float got = wide.tensor().ptr<float>()[n * 259 + k], want = e4m3_value(uint8_t(k)) * row_scale[n];
        if (std::isnan(want))
          EXPECT_TRUE(std::isnan(got)) << k;
        else
          EXPECT_EQ(got, want) << n << " " << k;
      }
  }
  set_cpu_level(before);
}

TEST(quant, narrow_numbers_are_the_nearest_ones_with_ties_to_even_and_saturation) {
  std::vector<float> inputs = {0,       -0.f,      0.25f,  0.75f, 1.25f, 1.75f, 2.5f,    3.5f,     5,
                               6,       7,         1e9f,   448,   464,   480,   0x1p-9f, 0x1p-10f, 0x1.8p-10f,
                               0x1p-6f, 0x1.fp-7f, 1e-30f, 17,    18,    19,    0.3f};
  const Rng rng(1, Purpose::test);
  for (int i = 0; i < 2000; ++i) inputs.push_back(float(rng.normal(uint64_t(i)) * std::exp2(double(i % 16) - 8)));
  for (const float x : inputs)
    for (const float v : {x, -x}) {
      EXPECT_EQ(e2m1_value(e2m1_nearest(v)), nearest_by_search(v, 16, e2m1_value)) << v;
      EXPECT_EQ(e4m3_value(e4m3_nearest(v)), nearest_by_search(v, 256, [](int c) { return e4m3_value(uint8_t(c)); }))
          << v;
    }
  EXPECT_TRUE(std::isnan(e4m3_value(e4m3_nearest(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(quant, a_block_has_the_nearest_codes_of_the_better_of_two_scales) {
  constexpr int64_t kRows = 400;
  const CpuLevel before = cpu_level();
  Buffer x(DType::f32, {kRows, 32});
  fill_normal(x, 7, 1);
  for (int64_t n = 0; n < kRows; ++n) {
    float* row = x.tensor().ptr<float>() + n * 32;
    if (n % 4 == 1)  // quarters: middles between two magnitudes
      for (int i = 0; i < 32; ++i) row[i] = std::round(row[i] * 8) / 4;
    for (int i = 0; i < 32; ++i) row[i] *= std::ldexp(1.f, int(n % 270) - 145);  // from subnormal numbers to 2^125
  }
  for (CpuLevel level : {CpuLevel::baseline, cpu_level_available()}) {
    set_cpu_level(level);
    Stored s(WeightFormat::mxfp4, kRows, 32);
    quantise(x, s.w, {});
    for (int64_t n = 0; n < kRows; ++n) {
      const float* row = x.tensor().ptr<float>() + n * 32;
      const auto error = [&](int scale) {
        double sum = 0;
        for (int i = 0; i < 32; ++i) {
          const double unit = std::ldexp(1.0, scale - 127), y = row[i] / unit;
          sum += std::pow((y - e2m1_value(e2m1_nearest(float(y)))) * unit, 2);
        }
        return sum;
      };
      float top = 0;
      for (int i = 0; i < 32; ++i) top = std::max(top, std::abs(row[i]));
      const int low = top > 0 ? std::max(0, std::ilogb(top) + 125) : 127, scale = s.w.scales.ptr<uint8_t>()[n];
      ASSERT_TRUE(scale == low || scale == low + 1) << n;
      EXPECT_LE(error(scale), error(scale == low ? low + 1 : low) * (1 + 1e-5)) << n;
      for (int i = 0; i < 32; ++i) {
        const int byte = s.w.data.ptr<uint8_t>()[n * 16 + i / 2];
        EXPECT_EQ(i % 2 == 0 ? byte & 15 : byte >> 4, e2m1_nearest(std::ldexp(row[i], 127 - scale))) << row[i];
      }
    }
  }
  set_cpu_level(before);
}

TEST(quant, storing_decoded_numbers_again_changes_nothing) {
  for (WeightFormat f : kFormats) {
    Stored first(f, 9, 96), second(f, 9, 96);
    Buffer x(DType::f32, {9, 96}, 99), y(DType::f32, {9, 96}), z(DType::f32, {9, 96});
    fill_normal(x, 3, 0.02);
    for (int64_t k = 0; k < 96; ++k) x.tensor().ptr<float>()[4 * 99 + k] = 0;  // a row of zeros
    quantise(x, first.w, {});
    dequantise(first.w, y, {});
    quantise(y, second.w, {});
    dequantise(second.w, z, {});
    EXPECT_EQ(values(y), values(z)) << f;
    EXPECT_TRUE(first.data.guards_intact() && y.guards_intact());
  }
}

TEST(quant, the_error_of_a_stored_matrix_is_within_the_bound_of_the_format) {
  // Largest relative error of a number whose format has m bits of mantissa: 2^-(m+1). mxfp4 numbers below the block's
  // largest by more than 2^2 are subnormal, and those above 6 * scale saturate: bounded by a third of the block's top.
  const double allowed[] = {0, 0x1p-8, 0x1p-4, 1.0 / 3};
  for (int i = 0; i < 4; ++i) {
    Stored s(kFormats[i], 40, 128);
    Buffer x(DType::f32, {40, 128}), y(DType::f32, {40, 128});
    fill_normal(x, 5, 1);
    quantise(x, s.w, {});
    dequantise(s.w, y, {});
    const auto a = values(x), b = values(y);
    double sum = 0, norm = 0;
    for (size_t j = 0; j < a.size(); ++j) {
      double top = std::abs(a[j]);
      if (kFormats[i] == WeightFormat::mxfp4)
        for (size_t k = j / 32 * 32; k < j / 32 * 32 + 32; ++k) top = std::max(top, std::abs(a[k]));
      if (kFormats[i] == WeightFormat::fp8) top = std::max(top, 4.0 / 448 * 0x1p-5);
      EXPECT_LE(std::abs(a[j] - b[j]), allowed[i] * top) << kFormats[i] << " " << a[j];
      sum += (a[j] - b[j]) * (a[j] - b[j]);
      norm += a[j] * a[j];
    }
    // E2M1's levels under a normal distribution lose about 1 % of the energy; a wrong scale rule loses 3 % and more.
    EXPECT_LT(sum / norm, 0.0145) << kFormats[i];
  }
}

struct Sizes {
  int64_t tokens, rows, cols;
};
TEST(quant, products_follow_the_fp64_oracle_in_every_format) {
  const Sizes sizes[] = {{0, 5, 64},   {1, 1, 32},  {1, 37, 64},  {2, 130, 288}, {3, 19, 96},
                         {5, 64, 160}, {7, 33, 64}, {8, 65, 320}, {9, 65, 320},  {40, 150, 96}};
  const CpuLevel before = cpu_level();
  for (CpuLevel level : {CpuLevel::baseline, cpu_level_available()})
    for (WeightFormat f : kFormats)
      for (const Sizes& s : sizes)
        for (bool bias : {false, true}) {
          set_cpu_level(level);
          Stored stored(f, s.rows, s.cols);
          Buffer numbers(DType::f32, {s.rows, s.cols}), x(DType::f32, {s.tokens, s.cols}, s.cols + 3);
          Buffer b(DType::f32, {s.rows}), y(DType::f32, {s.tokens, s.rows}, s.rows + 1);
          fill_normal(numbers, 1, 2 / std::sqrt(double(s.cols)));
          fill_normal(x, 2);
          fill_normal(b, 3);
          quantise(numbers, stored.w, {});
          stored_linear({.x = x, .w = stored.w, .b = bias ? b.tensor() : Tensor(), .y = y}, {});
          Buffer x64(DType::f64, {s.tokens, s.cols}), b64(DType::f64, {s.rows}), y64(DType::f64, {s.tokens, s.rows});
          testing::assign(x64, values(x));
          testing::assign(b64, values(b));
          stored_linear({.x = x64, .w = stored.w, .b = bias ? b64.tensor() : Tensor(), .y = y64}, {});
          // Products of numbers around 2 / sqrt(K) and 1: sqrt(K) roundings of partial sums around 2 add up in random
          // directions; 6 of these, and a rounding of the result.
          const double eps = testing::roundoff(DType::f32);
          const auto result = testing::compare(y, values(y64), 6 * 4 * std::sqrt(double(s.cols)) * eps, 2 * eps);
          EXPECT_TRUE(result.ok) << f << " " << s.tokens << " " << s.rows << " " << s.cols << ": " << result.message;
          EXPECT_TRUE(y.guards_intact());
        }
  set_cpu_level(before);
}

TEST(quant, rows_whose_length_is_no_multiple_of_a_vector_are_summed_to_their_end) {
  for (WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8})
    for (int64_t cols : {1, 7, 17, 45, 99}) {
      Stored s(f, 3, cols);
      Buffer x(DType::f32, {2, cols}), ones(DType::f32, {3, cols}), y(DType::f32, {2, 3});
      for (int64_t i = 0; i < 2 * cols; ++i) x.tensor().ptr<float>()[i] = float(i % cols + 1);
      for (int64_t i = 0; i < 3 * cols; ++i) ones.tensor().ptr<float>()[i] = 1;
      quantise(ones, s.w, {});
      stored_linear({.x = x, .w = s.w, .y = y}, {});
      for (double v : values(y)) EXPECT_NEAR(v, double(cols * (cols + 1) / 2), 1e-3 * double(cols)) << f << cols;
    }
}

TEST(quant, operands_that_do_not_fit_are_refused_by_name) {
  Stored s(WeightFormat::mxfp4, 4, 64);
  Buffer x(DType::f32, {2, 64}), y(DType::f32, {2, 5}), scales(DType::u8, {4, 3});
  EXPECT_EQ(error_of([&] { stored_linear({.x = x, .w = s.w, .y = y}, {}); }),
            "invalid argument: stored_linear: found y of shape (2, 5) and dtype f32, expected (2, 4) f32, row-major");
  const WeightMatrix odd(WeightFormat::mxfp4, s.data, scales);
  EXPECT_EQ(error_of([&] { stored_linear({.x = x, .w = odd, .y = y}, {}); }),
            "invalid argument: stored_linear: w: found scales of shape (4, 3) and dtype u8, expected (4, 2) u8, "
            "contiguous");
  EXPECT_EQ(error_of([&] { weight_bytes(WeightFormat::mxfp4, 2, 33); }),
            "invalid argument: weights: found rows of 33 numbers, expected a multiple of 32 for mxfp4");
  Buffer bad(DType::f32, {4, 64});
  fill_normal(bad, 1);
  bad.tensor().ptr<float>()[70] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(error_of([&] { quantise(bad, s.w, {}); }),
            "numeric: quantise: found inf in row 1, column 6, expected finite numbers");
  Buffer b(DType::f32, {4}), fits(DType::f32, {2, 4});
  using F = StoredLinear;
  const F a{.x = x, .w = s.w, .b = b, .y = fits};
  EXPECT_EQ(testing::device_not_checked(a, {&F::x, &F::b, &F::y}, stored_linear), "");
}

}  // namespace
}  // namespace ingot
