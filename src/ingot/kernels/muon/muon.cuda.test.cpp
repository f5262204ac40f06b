// Compares Muon and its iteration on a GPU with fp64.
#include "ingot/kernels/muon/muon.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ingot/gpu/cublaslt.h"
#include "ingot/kernels/muon/newton_schulz.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::DeviceBuffer;
using testing::values;

class MuonCuda : public testing::GpuTest<> {};

using Matrix = std::vector<double>;
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

Matrix product(const Matrix& a, const Matrix& b, int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b) {
  const Buffer x(DType::f64, transpose_a ? Shape{k, m} : Shape{m, k}),
      y(DType::f64, transpose_b ? Shape{n, k} : Shape{k, n}), z(DType::f64, {m, n});
  testing::assign(x, a), testing::assign(y, b);
  matmul({.a = x, .b = y, .c = z, .transpose_a = transpose_a, .transpose_b = transpose_b}, {});
  return values(z);
}
Matrix absolute(Matrix m) {
  for (double& v : m) v = std::fabs(v);
  return m;
}
double norm(const Matrix& m) {
  double sum = 0;
  for (double v : m) sum += v * v;
  return std::sqrt(sum);
}
Matrix scaled(Matrix m, double by) {
  for (double& v : m) v *= by;
  return m;
}

// A step's parts: a x, b A x and c A A x, or with x on the left where x is tall. With absolute values: their sizes.
struct Step {
  Matrix first, second, third;
};
Step step_of(const Matrix& x, int64_t rows, int64_t cols) {
  const bool wide = rows <= cols;
  const int64_t side = std::min(rows, cols), length = std::max(rows, cols);
  const Matrix a = product(x, x, side, side, length, !wide, wide), aa = product(a, a, side, side, side, false, false);
  const auto apply = [&](const Matrix& s) {
    return product(wide ? s : x, wide ? x : s, rows, cols, side, false, false);
  };
  return {scaled(x, kA), scaled(apply(a), kB), scaled(apply(aa), kC)};
}
Matrix iterated(Matrix x, int64_t rows, int64_t cols, int steps) {
  x = scaled(x, 1 / (norm(x) + 1e-7));
  for (int s = 0; s < steps; ++s) {
    const Step step = step_of(x, rows, cols);
    for (size_t i = 0; i < x.size(); ++i) x[i] = step.first[i] + step.second[i] + step.third[i];
  }
  return x;
}

struct Sizes {
  int64_t count, rows, cols;
};
// Sizes below a tile, several tiles below the diagonal, sides that are no multiples of the tile, tall and wide
// matrices.
const Sizes kSizes[] = {{1, 1, 1},     {2, 8, 24},    {1, 31, 7},    {3, 128, 256}, {1, 200, 136}, {2, 300, 517},
                        {2, 389, 264}, {1, 520, 520}, {2, 200, 410}, {2, 523, 130}, {1, 96, 300}};

// One step, element by element. u: a rounding to f16. x carries one rounding, A three (two of x and its own), A A
// seven, b A + c A A eight; the result adds one. On the square a I has b A + c A A's rounding, too. Numbers below 2^-25
// have fewer bits.
TEST_F(MuonCuda, OneStepAgreesWithFp64Small) {
  constexpr double u = 0x1p-12 * 1.02, least = 0x1p-33;
  for (const Sizes& s : kSizes) {
    if (testing::kEmulated && s.rows * s.cols > 40000) continue;
    SCOPED_TRACE(::testing::Message() << s.rows << " x " << s.cols);
    DeviceBuffer x(DType::f32, {s.rows, s.cols}, s.cols + 3),
        room(DType::u8, {muon_workspace_bytes(1, s.rows, s.cols, DType::f32, {Device::cuda, 0})});
    testing::fill_normal(x.host(), 5);
    const Matrix given = values(x.host()), start = scaled(given, 1 / (norm(given) + 1e-7));
    x.upload(), room.upload();
    newton_schulz({.x = x, .workspace = room, .steps = 1, .products = Products::bf16}, {});
    x.download(), room.download();
    EXPECT_TRUE(x.untouched() && room.untouched());
    const Matrix got = values(x.host());
    const Step want = step_of(start, s.rows, s.cols), size = step_of(absolute(start), s.rows, s.cols);
    const double sums = double(s.rows + s.cols) * 0x1p-22;
    for (size_t i = 0; i < got.size(); ++i) {
      const double first = std::fabs(size.first[i]), second = std::fabs(size.second[i]),
                   third = std::fabs(size.third[i]);
      ASSERT_NEAR(got[i], want.first[i] + want.second[i] + want.third[i],
                  u * (3 * first + 6 * second + 10 * third) + sums * (first + second + third) + least)
          << i;
    }
  }
}

// A bound for the largest singular value of a normal matrix over the smallest, for long matrices (Marchenko and
// Pastur).
double spread(int64_t rows, int64_t cols) {
  const double root = std::sqrt(double(std::min(rows, cols)) / double(std::max(rows, cols)));
  return (1 + root) / (1 - root);
}

// Five steps and the code around them. A step's roundings are below 12 u of the matrix's norm (|a| + |b| + 2 |c| times
// a rounding of each factor), and no step magnifies an error more than the number with this error. On the square they
// are roundings of P, which is as large as it is for the smallest singular value.
TEST_F(MuonCuda, UpdatesAgreeWithFp64) {
  for (Products products : {Products::bf16, Products::fp32})
    for (const Sizes& s : kSizes)
      for (bool normalise : {false, true}) {
        if (products == Products::fp32 && !gpu::lt_available()) continue;
        if (testing::kEmulated && s.rows * s.cols > 1000) continue;
        SCOPED_TRACE(::testing::Message() << int(products) << ": " << s.count << " x " << s.rows << " x " << s.cols);
        const Shape shape{s.count, s.rows, s.cols};
        DeviceBuffer p(DType::f32, shape, s.cols + 1), g(DType::f32, shape), momentum(DType::f32, shape),
            room(DType::u8, {muon_workspace_bytes(s.count, s.rows, s.cols, DType::f32, {Device::cuda, 0})}),
            factor(DType::f64, {1});
        testing::fill_normal(p.host(), 1), testing::fill_normal(g.host(), 2, 0.01);
        testing::fill_normal(momentum.host(), 3, 0.02), testing::assign(factor.host(), {0.5});
        const Matrix p0 = values(p.host()), g0 = values(g.host()), m0 = values(momentum.host());
        for (DeviceBuffer* b : {&p, &g, &momentum, &room, &factor}) b->upload();
        muon({.p = p,
              .g = g,
              .momentum = momentum,
              .workspace = room,
              .lr = 0.1,
              .mu = 0.9,
              .weight_decay = 0.3,
              .factor = factor,
              .row_normalise = normalise,
              .products = products},
             {});
        for (DeviceBuffer* b : {&p, &g, &momentum, &room}) {
          b->download();
          EXPECT_TRUE(b->untouched());
        }
        EXPECT_TRUE(g.untouched(true));
        const Matrix got = values(p.host()), moved = values(momentum.host());
        const double shape_factor = std::sqrt(std::max(1.0, double(s.rows) / double(s.cols)));
        const size_t n = size_t(s.rows * s.cols);
        for (size_t i = 0; i < size_t(s.count); ++i) {
          Matrix u(n), update(n);
          for (size_t j = 0; j < n; ++j) {
            const double grad = 0.5 * g0[i * n + j], buffer = 0.9 * m0[i * n + j] + grad;
            ASSERT_NEAR(moved[i * n + j], buffer, 4 * 0x1p-24 * (std::fabs(grad) + 0.9 * std::fabs(m0[i * n + j])));
            u[j] = grad + 0.9 * buffer;
            update[j] = -(got[i * n + j] - p0[i * n + j] * (1 - 0.1 * 0.3)) / (0.1 * shape_factor);
          }
          for (size_t r = 0; r < size_t(s.rows) && normalise; ++r) {
            double squares = 0;
            for (size_t c = 0; c < size_t(s.cols); ++c)
              squares += u[r * size_t(s.cols) + c] * u[r * size_t(s.cols) + c];
            for (size_t c = 0; c < size_t(s.cols); ++c) u[r * size_t(s.cols) + c] /= std::max(std::sqrt(squares), 1e-7);
          }
          const Matrix want = iterated(u, s.rows, s.cols, 5);
          Matrix off(n);
          for (size_t j = 0; j < n; ++j) off[j] = update[j] - want[j];
          // fp32: the update is read from parameters of size 1, rounded to 6e-8 and divided by lr.
          const double factor = iterates_on_square(s.rows, s.cols) ? spread(s.rows, s.cols) : 1;
          const double bound = products == Products::bf16 ? 5 * 12 * 0x1p-12 * factor : 1e-4;
          ASSERT_LE(norm(off), bound * norm(want) + 2e-6 * std::sqrt(double(n)) / shape_factor) << "matrix " << i;
        }
      }
}

// One large singular value and many near 0.02 / sqrt(96): the large value's roundings, 2^-12 at most, grow by a in each
// step where other values are small, 485 times in all. The steps add as much again. A single part of five steps on the
// square would have an error of 12 and more here.
TEST_F(MuonCuda, SmallSingularValuesBesideALargeOne) {
  constexpr int64_t kSmall = 24, kLong = 96;
  for (const bool tall : {false, true}) {
    const int64_t rows = tall ? kLong : kSmall, cols = tall ? kSmall : kLong;
    DeviceBuffer x(DType::f32, {rows, cols}),
        room(DType::u8, {muon_workspace_bytes(1, rows, cols, DType::f32, {Device::cuda, 0})});
    testing::fill_normal(x.host(), 7, 0.02);
    Matrix given = values(x.host());
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) given[size_t(r * cols + c)] += std::sin(double(tall ? r : c));
    testing::assign(x.host(), given);
    const Matrix want = iterated(values(x.host()), rows, cols, 5);
    x.upload(), room.upload();
    newton_schulz({.x = x, .workspace = room, .products = Products::bf16}, {});
    x.download();
    Matrix off = values(x.host());
    for (size_t i = 0; i < off.size(); ++i) off[i] -= want[i];
    EXPECT_LE(norm(off), 2 * std::pow(kA, 5) * 0x1p-12) << rows << " x " << cols;
    EXPECT_GT(norm(want), 4);
  }
}

TEST_F(MuonCuda, CoefficientsThatLeadOutOfF16AreRefused) {
  DeviceBuffer x(DType::f32, {8, 8}), room(DType::u8, {1 << 20});
  EXPECT_THROW(newton_schulz({.x = x, .workspace = room, .a = 8, .b = -23, .c = 17, .products = Products::bf16}, {}),
               Error);
}

TEST_F(MuonCuda, ASumThatIsNotFiniteWritesNothingAndZerosStayZero) {
  for (double factor : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    DeviceBuffer p(DType::f32, {2, 24, 40}), g(DType::f32, {2, 24, 40}), momentum(DType::f32, {2, 24, 40}),
        room(DType::u8, {muon_workspace_bytes(2, 24, 40, DType::f32, {Device::cuda, 0})}), times(DType::f64, {1});
    testing::fill_normal(p.host(), 1), testing::fill_normal(g.host(), 2), testing::fill_normal(momentum.host(), 3);
    testing::assign(times.host(), {factor});
    std::memset(room.host().data, 0xff, size_t(room.host().numel()));
    for (DeviceBuffer* b : {&p, &g, &momentum, &room, &times}) b->upload();
    muon({.p = p, .g = g, .momentum = momentum, .workspace = room, .factor = times, .products = Products::bf16}, {});
    p.download(), momentum.download(), room.download();
    EXPECT_TRUE(p.untouched(true) && momentum.untouched(true) && room.untouched());
    // The iteration's memory, which begins with its matrices, was set to zeros: no old contents were read.
    const f16* const matrices = reinterpret_cast<const f16*>(room.host().ptr<uint8_t>());
    for (int64_t i = 0; i < 2 * (2 * 24 * 40 + 2 * 24 * 24); ++i) ASSERT_EQ(float(matrices[i]), 0) << i;
  }
  DeviceBuffer p(DType::f32, {1, 24, 40}), g(DType::f32, {1, 24, 40}), momentum(DType::f32, {1, 24, 40}),
      room(DType::u8, {muon_workspace_bytes(1, 24, 40, DType::f32, {Device::cuda, 0})});
  testing::fill_normal(p.host(), 1), testing::assign(g.host(), Matrix(960, 0)),
      testing::assign(momentum.host(), Matrix(960, 0));
  for (DeviceBuffer* b : {&p, &g, &momentum, &room}) b->upload();
  muon({.p = p, .g = g, .momentum = momentum, .workspace = room, .products = Products::bf16}, {});
  p.download();
  EXPECT_TRUE(p.untouched(true));
}

// Rates on the device give the same bits as rates on the host, and the replays of a graph read the rates anew.
TEST_F(MuonCuda, RatesOnTheDeviceServeAGraph) {
  if (testing::kEmulated) GTEST_SKIP() << "too large for the emulator";
  const Shape shape{2, 136, 200};
  DeviceBuffer g(DType::f32, shape), rates(DType::f64, {3}),
      room(DType::u8, {muon_workspace_bytes(2, 136, 200, DType::f32, {Device::cuda, 0})});
  testing::fill_normal(g.host(), 2);
  g.upload(), room.upload();
  const auto run = [&](const std::vector<double>& lrs, bool graph) {
    DeviceBuffer p(DType::f32, shape), momentum(DType::f32, shape);
    testing::fill_normal(p.host(), 1), testing::fill_normal(momentum.host(), 3);
    p.upload(), momentum.upload();
    Muon m{.p = p, .g = g, .momentum = momentum, .workspace = room, .mu = 0.9, .weight_decay = 0.1};
    m.products = Products::bf16;
    const gpu::OwnedStream stream;
    gpu::synchronize();
    if (!graph) {
      for (double lr : lrs) m.lr = lr, muon(m, stream);
    } else {
      m.rates = rates;
      const gpu::Graph replay(stream, [&] { muon(m, stream); });
      for (double lr : lrs) {
        testing::assign(rates.host(), {lr, 0.9, 0.1});
        rates.upload();
        replay.launch(stream);
        gpu::synchronize();
      }
    }
    p.download();
    return values(p.host());
  };
  EXPECT_EQ(run({0.1, 0.02}, false), run({0.1, 0.02}, true));
}

// A bank with more elements than 31 bits can count, a repetition of a few matrices: the last matrices have the same
// bits as in a small bank.
TEST_F(MuonCuda, MoreThanTwoToThe31Elements) {
  if (gpu::device_info().memory_bytes < int64_t(50) << 30) GTEST_SKIP() << "needs 50 GiB of device memory";
  constexpr int64_t kSide = 256, kFew = 8, kMany = (int64_t(1) << 31) / (kSide * kSide) + kFew;
  constexpr int64_t kFewBytes = kFew * kSide * kSide * 4, kManyBytes = kMany * kSide * kSide * 4;
  const Device device{Device::cuda, 0};
  const Shape shape{kFew, kSide, kSide};
  DeviceBuffer few[] = {{DType::f32, shape}, {DType::f32, shape}, {DType::f32, shape}};  // p, g, momentum
  DeviceBuffer got(DType::f32, shape);
  std::vector<gpu::DeviceMemory> memory;
  Tensor many[3];
  for (size_t i = 0; i < 3; ++i) {
    testing::fill_normal(few[i].host(), i + 1);
    few[i].upload();
    memory.emplace_back(kManyBytes);
    char* const to = static_cast<char*>(memory.back().data());
    gpu::copy_on_device(to, few[i].tensor().data, kFewBytes, {});
    for (int64_t done = kFewBytes; done < kManyBytes; done *= 2)
      gpu::copy_on_device(to + done, to, std::min(done, kManyBytes - done), {});
    many[i] = Tensor(to, DType::f32, {kMany, kSide, kSide}, device);
  }
  const auto step = [&](const Tensor* of) {
    const int64_t bytes = muon_workspace_bytes(of[0].size(0), kSide, kSide, DType::f32, device);
    const gpu::DeviceMemory room(bytes);
    muon({.p = of[0],
          .g = of[1],
          .momentum = of[2],
          .workspace = Tensor(room.data(), DType::u8, {bytes}, device),
          .lr = 0.1,
          .mu = 0.9,
          .weight_decay = 0.1,
          .row_normalise = true,
          .products = Products::bf16},
         {});
    gpu::synchronize();
  };
  const Tensor alone[3] = {few[0], few[1], few[2]};
  step(many), step(alone);
  for (const size_t i : {0, 2}) {
    gpu::copy_on_device(got.tensor().data, many[i].slice(0, kMany - kFew, kMany).data, kFewBytes, {});
    got.download(), few[i].download();
    EXPECT_EQ(values(got.host()), values(few[i].host())) << (i == 0 ? "p" : "momentum");
  }
}

TEST_F(MuonCuda, RefusesOtherTypesByName) {
  DeviceBuffer p(DType::f64, {1, 8, 8}), room(DType::u8, {1 << 20});
  std::string message;
  try {
    muon({.p = p, .g = p, .momentum = p, .workspace = room}, {});
  } catch (const Error& e) { message = e.what(); }
  EXPECT_NE(message.find("f64"), message.npos) << message;
}

}  // namespace
}  // namespace ingot
