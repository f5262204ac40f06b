// Compares the fused kernel with the separate ops on the CPU in fp64.
#include "ingot/kernels/residual_norm/residual_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "ingot/kernels/mix/mix.h"
#include "ingot/kernels/scaled_add/scaled_add.h"
#include "ingot/testing/any_buffer.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::DeviceBuffer;
using testing::values;

class ResidualNormCuda : public testing::GpuTest<> {};

struct Case {
  int64_t rows, cols;
  bool branch, mix;
  DType type = DType::bf16;
};
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 8}, {5, 24}, {37, 256}, {70, 512}, {9, 1024}})
    for (int what = 0; what < 4; ++what)
      for (DType type : {DType::bf16, DType::f16}) all.push_back({rows, cols, (what & 1) != 0, (what & 2) != 0, type});
  all.push_back({3, 1032, true, false});  // too wide or of odd width, so the separate ops compute it
  all.push_back({3, 27, false, true});
  return all;
}

// A tensor on the GPU, and the same numbers in fp64 on the host.
struct Pair {
  Pair(DType type, Shape shape, uint64_t seed)
      : there(testing::normal<DeviceBuffer>(type, shape, seed)), here(testing::exact(there)) {}
  DeviceBuffer there;
  Buffer here;
};
void expect_near(DeviceBuffer& got, const Buffer& want, double absolute, double relative) {
  testing::expect_close(got, values(want), absolute, relative);
}

TEST_F(ResidualNormCuda, ForwardAgreesWithFp64) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << c.type << " branch " << c.branch << " mix "
                                      << c.mix);
    const Shape all{c.rows, c.cols}, channels{c.cols};
    Pair x(c.type, all, 1), branch(c.type, all, 2), x0(c.type, all, 3);
    Pair scale(DType::f32, channels, 4), a(DType::f32, channels, 5), b(DType::f32, channels, 6);
    DeviceBuffer sum(c.type, all), mixed(c.type, all), y(c.type, all), rstd(DType::f32, {c.rows});
    Buffer sum64(DType::f64, all), mixed64(DType::f64, all), y64(DType::f64, all), rstd64(DType::f64, {c.rows});
    for (DeviceBuffer* t : {&sum, &mixed, &y, &rstd}) t->upload();
    const auto op = [&](auto&& of, const Tensor& s, const Tensor& m, const Tensor& out, const Tensor& r) {
      ResidualNorm n{.x = of(x), .y = out, .rstd = r, .eps = 1e-3, .norm_scale = 0.7};
      if (c.branch) n.branch = of(branch), n.scale = of(scale), n.sum = s;
      if (c.mix) n.x0 = of(x0), n.a = of(a), n.b = of(b), n.mixed = m;
      residual_norm(n, {});
    };
    op([](const Pair& p) { return p.there.tensor(); }, sum, mixed, y, rstd);
    op([](const Pair& p) { return p.here.tensor(); }, sum64, mixed64, y64, rstd64);
    const double u = testing::roundoff(c.type);
    // s is rounded, and m, of terms below 20; y then has their errors times 1 / rms and its own rounding.
    if (c.branch) expect_near(sum, sum64, 1e-6, 1.01 * u);
    if (c.mix) expect_near(mixed, mixed64, 20 * u, 2 * u);
    expect_near(rstd, rstd64, 1e-6, c.branch || c.mix ? 4 * u : 1e-5);
    expect_near(y, y64, 20 * u, 6 * u);
  }
}

// Values recomputed without this op must have the same bits.
TEST_F(ResidualNormCuda, SumAndMixEqualTheSeparateOps) {
  const Shape all{61, 512}, channels{512};
  Pair x(DType::bf16, all, 1), branch(DType::bf16, all, 2), a(DType::f32, channels, 4), b(DType::f32, channels, 5);
  DeviceBuffer one(DType::bf16, all), other(DType::bf16, all), y(DType::bf16, all);
  for (bool mixes : {false, true}) {
    for (DeviceBuffer* t : {&one, &other, &y}) t->upload();
    ResidualNorm n{.x = x.there, .y = y};
    if (mixes) {
      n.x0 = branch.there, n.a = a.there, n.b = b.there, n.mixed = one;
      mix({.x = x.there, .x0 = branch.there, .a = a.there, .b = b.there, .y = other}, {});
    } else {
      n.branch = branch.there, n.scale = a.there, n.sum = one;
      scaled_add({.x = x.there, .branch = branch.there, .scale = a.there, .y = other}, {});
    }
    residual_norm(n, {});
    one.download(), other.download();
    EXPECT_EQ(values(one.host()), values(other.host()));
  }
}

TEST_F(ResidualNormCuda, BackwardAgreesWithFp64) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << c.type << " branch " << c.branch << " mix "
                                      << c.mix);
    const Shape all{c.rows, c.cols}, channels{c.cols};
    Pair dy(c.type, all, 1), x(c.type, all, 2), x0(c.type, all, 3), branch(c.type, all, 4), dsum(c.type, all, 5),
        dx0(c.type, all, 6);
    Pair scale(DType::f32, channels, 7), a(DType::f32, channels, 8), b(DType::f32, channels, 9);
    Pair dscale(DType::f32, channels, 10), da(DType::f32, channels, 11), db(DType::f32, channels, 12);
    DeviceBuffer m(c.type, all), y(c.type, all), rstd(DType::f32, {c.rows}), dbranch(c.type, all);
    DeviceBuffer work(DType::u8, {residual_workspace_bytes(c.rows, c.cols, {Device::cuda, 0})});
    for (DeviceBuffer* t : {&m, &y, &rstd, &dbranch, &work}) t->upload();
    ResidualNorm n{.x = x.there, .y = y, .rstd = rstd, .eps = 1e-3, .norm_scale = 0.7};
    if (c.mix) n.x0 = x0.there, n.a = a.there, n.b = b.there, n.mixed = m;
    residual_norm(n, {});
    rstd.download(), m.download();
    const Buffer m64 = testing::exact(c.mix ? m : x.there), rstd64 = testing::exact(rstd);
    Buffer dbranch64(DType::f64, all);
    const auto op = [&](auto&& of, const Tensor& normed, const Tensor& r, const Tensor& to, const Tensor& workspace) {
      ResidualNormBackward g{.dy = of(dy),
                             .m = normed,
                             .rstd = r,
                             .dsum = of(dsum),
                             .dx = of(dsum),
                             .workspace = workspace,
                             .eps = 1e-3,
                             .norm_scale = 0.7};
      if (c.mix) {
        g.x = of(x), g.x0 = of(x0), g.a = of(a), g.b = of(b);
        g.dx0 = of(dx0), g.da = of(da), g.db = of(db);
      }
      if (c.branch) g.branch = of(branch), g.scale = of(scale), g.dbranch = to, g.dscale = of(dscale);
      residual_norm_backward(g, {});
    };
    op([](const Pair& p) { return p.there.tensor(); }, c.mix ? m.tensor() : x.there.tensor(), rstd, dbranch, work);
    op([](const Pair& p) { return p.here.tensor(); }, m64, rstd64, dbranch64, {});
    const double u = testing::roundoff(c.type), walk = std::sqrt(double(c.rows));
    // The gradient is rounded, times a factor below 4 rounded again, and once more for the branch.
    expect_near(dsum.there, dsum.here, 1e-5, 2.1 * u);
    // Sums over tokens of terms of size 10 whose gradient was rounded.
    if (c.mix) {
      expect_near(dx0.there, dx0.here, 20 * u, u);
      expect_near(da.there, da.here, 20 * u * walk, 1e-5);
      expect_near(db.there, db.here, 20 * u * walk, 1e-5);
    }
    if (c.branch) {
      expect_near(dbranch, dbranch64, 1e-5, 3.1 * u);
      expect_near(dscale.there, dscale.here, 60 * u * walk, 1e-5);
    }
  }
}

// The gradient of a further reader of x: in memory of its own, or in dx, then without dsum as in a block of two lanes.
TEST_F(ResidualNormCuda, TheGradientOfAFurtherReaderIsAdded) {
  for (const Case& c : cases())
    for (const bool in_place : {false, true}) {
      if (c.branch) continue;
      SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << c.type << " mix " << c.mix
                                        << " in place " << in_place);
      const Shape all{c.rows, c.cols}, channels{c.cols};
      Pair dy(c.type, all, 1), x(c.type, all, 2), x0(c.type, all, 3), dsum(c.type, all, 5), more(c.type, all, 6);
      Pair dx(c.type, all, 7), dx0(c.type, all, 8), spare(c.type, all, 13);
      Pair a(DType::f32, channels, 9), b(DType::f32, channels, 10), da(DType::f32, channels, 11),
          db(DType::f32, channels, 12);
      DeviceBuffer m(c.type, all), y(c.type, all), rstd(DType::f32, {c.rows});
      DeviceBuffer work(DType::u8, {residual_workspace_bytes(c.rows, c.cols, {Device::cuda, 0})});
      for (DeviceBuffer* t : {&m, &y, &rstd, &work}) t->upload();
      ResidualNorm n{.x = x.there, .y = y, .rstd = rstd, .eps = 1e-3, .norm_scale = 0.7};
      if (c.mix) n.x0 = x0.there, n.a = a.there, n.b = b.there, n.mixed = m;
      residual_norm(n, {});
      rstd.download(), m.download();
      const Buffer m64 = testing::exact(c.mix ? m : x.there), rstd64 = testing::exact(rstd);
      const auto op = [&](auto&& of, const Tensor& normed, const Tensor& r, const Tensor& workspace) {
        ResidualNormBackward g{.dy = of(dy), .m = normed, .rstd = r, .dx = of(dx), .more = of(in_place ? dx : more)};
        g.workspace = workspace, g.eps = 1e-3, g.norm_scale = 0.7;
        if (in_place)
          g.spare = of(spare);
        else
          g.dsum = of(dsum);
        if (c.mix) {
          g.x = of(x), g.x0 = of(x0), g.a = of(a), g.b = of(b);
          g.dx0 = of(dx0), g.da = of(da), g.db = of(db);
        }
        residual_norm_backward(g, {});
      };
      op([](const Pair& p) { return p.there.tensor(); }, c.mix ? m.tensor() : x.there.tensor(), rstd, work);
      op([](const Pair& p) { return p.here.tensor(); }, m64, rstd64, {});
      const double u = testing::roundoff(c.type), walk = std::sqrt(double(c.rows));
      expect_near(dx.there, dx.here, 40 * u, u);  // terms below 20, rounded up to twice, and the sum
      if (!c.mix) continue;
      expect_near(dx0.there, dx0.here, 20 * u, u);
      expect_near(da.there, da.here, 20 * u * walk, 1e-5);
      expect_near(db.there, db.here, 20 * u * walk, 1e-5);
    }
}

// Frozen factors: operands that only their gradients need may be left out, without an effect on the rest.
TEST_F(ResidualNormCuda, FrozenFactorsChangeNoBits) {
  for (const Case& c : cases()) {
    if (!c.mix && !c.branch) continue;
    SCOPED_TRACE(::testing::Message() << c.rows << " x " << c.cols << ' ' << c.type << " branch " << c.branch << " mix "
                                      << c.mix);
    const Shape all{c.rows, c.cols}, channels{c.cols};
    Pair dy(c.type, all, 1), x(c.type, all, 2), x0(c.type, all, 3), branch(c.type, all, 4), dsum(c.type, all, 5);
    Pair scale(DType::f32, channels, 7), a(DType::f32, channels, 8), b(DType::f32, channels, 9);
    Pair dx0(c.type, all, 6), da(DType::f32, channels, 11), db(DType::f32, channels, 12),
        dscale(DType::f32, channels, 10);
    DeviceBuffer m(c.type, all), y(c.type, all), rstd(DType::f32, {c.rows});
    DeviceBuffer work(DType::u8, {residual_workspace_bytes(c.rows, c.cols, {Device::cuda, 0})});
    DeviceBuffer dx[2] = {{c.type, all}, {c.type, all}}, dbranch[2] = {{c.type, all}, {c.type, all}};
    for (DeviceBuffer* t : {&m, &y, &rstd, &work, &dx[0], &dx[1], &dbranch[0], &dbranch[1]}) t->upload();
    ResidualNorm n{.x = x.there, .y = y, .rstd = rstd};
    if (c.mix) n.x0 = x0.there, n.a = a.there, n.b = b.there, n.mixed = m;
    residual_norm(n, {});
    for (const bool frozen : {false, true}) {
      ResidualNormBackward g{.dy = dy.there,
                             .m = c.mix ? m.tensor() : x.there.tensor(),
                             .rstd = rstd,
                             .dsum = dsum.there,
                             .dx = dx[frozen],
                             .workspace = work};
      if (c.mix) g.a = a.there;
      if (c.mix && (!frozen || c.branch)) {
        g.x = x.there, g.x0 = x0.there, g.b = b.there, g.dx0 = dx0.there;
        if (!frozen) g.da = da.there, g.db = db.there;
      }
      if (c.branch) g.branch = branch.there, g.scale = scale.there, g.dbranch = dbranch[frozen];
      if (c.branch && !frozen) g.dscale = dscale.there;
      residual_norm_backward(g, {});
      dx[frozen].download(), dbranch[frozen].download();
    }
    EXPECT_EQ(values(dx[0].host()), values(dx[1].host()));
    if (c.branch) EXPECT_EQ(values(dbranch[0].host()), values(dbranch[1].host()));
  }
}

TEST_F(ResidualNormCuda, OperandsThatDoNotFitTogetherAreRefused) {
  DeviceBuffer x(DType::bf16, {4, 8}), c(DType::f32, {8});
  EXPECT_THROW(residual_norm({.x = x, .branch = x, .scale = c, .y = x}, {}), Error);
  EXPECT_THROW(residual_norm_backward({.dy = x, .m = x, .dsum = x, .dx = x, .branch = x}, {}), Error);
  EXPECT_THROW(residual_norm_backward({.dy = x, .m = x, .dx = x, .more = x}, {}), Error);
}

}  // namespace
}  // namespace ingot
