// Compares the CUDA kernels of every activation with its fp64 formula. Without a GPU these cases skip.
#include "ingot/kernels/activation/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ingot/gpu/device.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::DeviceBuffer;
using testing::roundoff;
using testing::values;

class ActivationCuda : public testing::GpuTest<> {};

template <class Use> void for_each_act(Use&& use) {
  int i = 0;
  for_each_activation([&](auto f) { use(f, Act(i++)); });
}

struct Case {
  int64_t rows, cols, gap = 0, shift = 0;  // elements between rows; elements off an aligned address
};
constexpr Case kCases[] = {{700, 1},    {1, 1000},      {3, 1001}, {70, 33, 7},
                           {70, 32, 8}, {70, 32, 0, 1}, {1, 1},    {130, 520}};

// f evaluated at an x off by some roundings, rounded some times: f32 library functions are within a few of theirs.
template <class F> double value_allowance(double x) {
  return 8 * roundoff(DType::f32) * (std::abs(F::value(x)) + std::abs(x * F::slope(x))) + 1e-37;
}
template <class F> double slope_allowance(double x) {
  const double h = 1e-4 * std::max(1.0, std::abs(x));
  const double bend = (F::slope(x + h) - F::slope(x - h)) / (2 * h);
  // Terms of a slope may cancel near its change of sign; the terms are below 2 there.
  return 8 * roundoff(DType::f32) * (std::abs(F::slope(x)) + std::abs(x * bend) + (std::abs(x) < 4 ? 2.0 : 0.0)) +
         1e-37;
}

void expect_agreement(const std::vector<DType>& types, int64_t largest) {
  for_each_act([&](auto f, Act act) {
    using F = decltype(f);
    for (DType t : types)
      for (const Case& c : kCases) {
        if (c.rows * c.cols > largest) continue;
        SCOPED_TRACE(::testing::Message() << f.name << ' ' << t << ' ' << c.rows << 'x' << c.cols << " gap " << c.gap
                                          << " shift " << c.shift);
        const Shape shape{c.rows, c.cols};
        DeviceBuffer x(t, shape, c.cols + c.gap, c.shift), y(t, shape, c.cols + c.gap, c.shift),
            dy(t, shape, c.cols + c.gap, c.shift), dx(t, shape, c.cols + c.gap, c.shift);
        testing::fill_normal(x.host(), 1, 3);
        testing::fill_normal(dy.host(), 2);
        for (DeviceBuffer* b : {&x, &y, &dy, &dx}) b->upload();
        activate({.act = act, .x = x, .y = y}, {});
        activate_backward({.act = act, .dy = dy, .x = x, .dx = dx}, {});
        for (DeviceBuffer* b : {&x, &y, &dy, &dx}) b->download();
        EXPECT_TRUE(x.untouched(true) && dy.untouched(true)) << "an input was written";
        EXPECT_TRUE(y.untouched() && dx.untouched()) << "written outside of an output";
        const auto in = values(x.host()), up = values(dy.host()), out = values(y.host()), back = values(dx.host());
        // For 16-bit results exponentials below 2^-126 are zero. A slope multiplies them by up to |2 u' x|, 240 for
        // gelu_tanh at the first such x.
        const double flushed = t == DType::f32 ? 0 : 240 * 0x1p-126;
        const double ends = t == DType::f32 ? 0 : 1.01 * roundoff(t), smallest = t == DType::f16 ? 0x1p-25 : flushed;
        for (size_t i = 0; i < in.size(); ++i) {
          const double value = F::value(in[i]), slope = F::slope(in[i]) * up[i];
          ASSERT_NEAR(out[i], value, value_allowance<F>(in[i]) + ends * std::abs(value) + smallest) << "at " << in[i];
          ASSERT_NEAR(
              back[i], slope,
              slope_allowance<F>(in[i]) * std::abs(up[i]) + (ends + roundoff(DType::f32)) * std::abs(slope) + smallest)
              << "slope at " << in[i];
        }
      }
  });
}

TEST_F(ActivationCuda, EveryActivationAgreesWithItsFormulaInEveryTypeAndShape) {
  expect_agreement({DType::f32, DType::bf16, DType::f16}, 1 << 20);
}

// Cases that a sanitizer runs in seconds.
TEST_F(ActivationCuda, AgreesWithItsFormulaWhenSmall) { expect_agreement({DType::bf16}, 2500); }

TEST_F(ActivationCuda, TailsKeepTheirRelativeAccuracyInFp32) {
  for_each_act([](auto f, Act act) {
    using F = decltype(f);
    std::vector<double> points;
    for (double x = -80; x <= 80; x += 0.0731) points.push_back(x);
    while (points.size() % 4 != 0) points.push_back(0);
    DeviceBuffer x(DType::f32, {int64_t(points.size())}), y(DType::f32, {int64_t(points.size())});
    testing::assign(x.host(), points);
    x.upload(), y.upload();
    activate({.act = act, .x = x, .y = y}, {});
    y.download();
    const auto in = values(x.host()), out = values(y.host());
    for (size_t i = 0; i < in.size(); ++i)
      ASSERT_NEAR(out[i], F::value(in[i]), value_allowance<F>(in[i])) << f.name << " at " << in[i];
  });
}

TEST_F(ActivationCuda, InfinityGivesTheLimitAndNanStaysNan) {
  constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  for_each_act([&](auto f, Act act) {
    for (DType t : {DType::f32, DType::bf16, DType::f16})
      for (int64_t cols : {8, 3}) {  // vectors and elements
        DeviceBuffer x(t, {1, cols}), y(t, {1, cols});
        std::vector<double> v(size_t(cols), 0.5);
        v[0] = kInf, v[1] = -kInf, v[2] = kNan;
        testing::assign(x.host(), v);
        x.upload(), y.upload();
        activate({.act = act, .x = x, .y = y}, {});
        y.download();
        const auto got = values(y.host());
        EXPECT_EQ(got[0], f.value(kInf)) << f.name << ' ' << t;
        EXPECT_EQ(got[1], f.value(-kInf)) << f.name << ' ' << t;
        EXPECT_TRUE(std::isnan(got[2])) << f.name << ' ' << t;
      }
  });
}

TEST_F(ActivationCuda, OutputsMayReplaceInputs) {
  for (int64_t cols : {256, 257}) {
    const Act act = activation_named("silu");
    DeviceBuffer x(DType::bf16, {40, cols}), y(DType::bf16, {40, cols}), dy(DType::bf16, {40, cols}),
        dx(DType::bf16, {40, cols});
    testing::fill_normal(x.host(), 1), testing::fill_normal(dy.host(), 2);
    for (DeviceBuffer* b : {&x, &y, &dy, &dx}) b->upload();
    activate({.act = act, .x = x, .y = y}, {});
    activate_backward({.act = act, .dy = dy, .x = x, .dx = dx}, {});
    activate_backward({.act = act, .dy = dy, .x = x, .dx = dy}, {});
    activate({.act = act, .x = x, .y = x}, {});
    for (DeviceBuffer* b : {&x, &y, &dy, &dx}) b->download();
    EXPECT_EQ(values(x.host()), values(y.host()));
    EXPECT_EQ(values(dy.host()), values(dx.host()));
  }
}

TEST_F(ActivationCuda, ReachesRowsBeyondTwoToThe31Elements) {
  constexpr int64_t kRows = 3, kCols = 128, kStride = (int64_t(1) << 30) + 8;
  if (gpu::device_info().memory_bytes < int64_t(24) << 30) GTEST_SKIP() << "needs 24 GiB of device memory";
  const gpu::DeviceMemory big((2 * kStride + kCols) * 2);
  Tensor far(big.data(), DType::bf16, {kRows, kCols}, Device{Device::cuda, 0});
  far.stride[0] = kStride;
  DeviceBuffer x(DType::bf16, {kRows, kCols}), y(DType::bf16, {kRows, kCols});
  testing::fill_normal(x.host(), 1, 2);
  x.upload(), y.upload();
  const Act act = activation_named("relu");
  activate({.act = act, .x = x, .y = far}, {});
  activate({.act = activation_named("identity"), .x = far, .y = y}, {});
  y.download();
  auto want = values(x.host());
  for (double& v : want) v = std::max(v, 0.0);
  EXPECT_EQ(values(y.host()), want);
}

TEST_F(ActivationCuda, AcceptsNoRowsAndRefusesFp64ByName) {
  DeviceBuffer x(DType::bf16, {0, 64}), y(DType::bf16, {0, 64}), wide(DType::f64, {2, 64});
  EXPECT_NO_THROW(activate({.x = x, .y = y}, {}));
  EXPECT_NO_THROW(activate_backward({.dy = x, .x = x, .dx = y}, {}));
  gpu::synchronize();
  try {
    activate_backward({.dy = wide, .x = wide, .dx = wide}, {});
    FAIL() << "f64 was not refused";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("activate_backward"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("f64"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace ingot
