#include "ingot/kernels/rmsnorm/rmsnorm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::compare;
using testing::roundoff;
using testing::values;

struct Case {
  int64_t rows, heads, cols, gap;  // heads = 0: a matrix; gap: unused elements between rows
  DType x = DType::f32, w = DType::f32;
  bool weight = true, residual = false, unit_offset = false, dsum = false, accumulate = false, rstd = true;
  double scale = 1, eps = 1e-5;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.rows << "x" << c.heads << "x" << c.cols << " gap " << c.gap << ' ' << c.x << " w " << c.w
             << " weight " << c.weight << " residual " << c.residual << " offset " << c.unit_offset << " dsum "
             << c.dsum << " accumulate " << c.accumulate;
}
const Case kCases[] = {
    {5, 0, 64, 0},
    {3, 0, 1, 0},
    {1, 0, 7, 3, DType::f32, DType::f32, true, true},
    {0, 0, 16, 0},
    {70, 0, 33, 5, DType::f32, DType::f32, true, true, true, true, false, true, 0.3},
    {9, 4, 24, 8, DType::f32, DType::f32, true, false, false, false, true},
    {9, 2, 130, 0, DType::f32, DType::f32, false, true, false, true, true, false},
    {200, 0, 96, 0, DType::f32, DType::bf16, true, false, true},
    {17, 0, 72, 8, DType::bf16, DType::f32, true, true, false, true},
    {17, 3, 40, 0, DType::bf16, DType::bf16, true, false, true, false, true},
    {11, 0, 100, 4, DType::f16, DType::f32, true, true, true, true, true, false},
    {11, 0, 515, 1, DType::f64, DType::f64, true, true, true, true, true, false, 2},
};

Shape shape_of(const Case& c) { return c.heads ? Shape{c.rows, c.heads, c.cols} : Shape{c.rows, c.cols}; }
DType wide(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

// The operands of one case in the case's types, or all in f64 with the same (rounded) values: the oracle.
struct Operands {
  Buffer x, w, residual, sum, y, rstd, dy, dsum, dx, dw, workspace;
  Case c;
  explicit Operands(const Case& k, bool oracle = false)
      : x(oracle ? DType::f64 : k.x, shape_of(k), k.cols + k.gap),
        w(oracle ? DType::f64 : k.w, {k.cols}),
        residual(x.tensor().dtype, shape_of(k), k.cols + 2 * k.gap),
        sum(x.tensor().dtype, shape_of(k), k.cols + k.gap),
        y(x.tensor().dtype, shape_of(k), k.cols + k.gap),
        rstd(wide(x.tensor().dtype), {x.tensor().rows()}),
        dy(x.tensor().dtype, shape_of(k), k.cols + k.gap),
        dsum(x.tensor().dtype, shape_of(k), k.cols),
        dx(x.tensor().dtype, shape_of(k), k.cols + k.gap),
        dw(wide(x.tensor().dtype), {k.cols}),
        workspace(DType::u8, {rmsnorm_backward_workspace_bytes(x.tensor().rows(), k.cols, x.tensor().dtype, {})}),
        c(k) {
    fill(x, k.x, 1, 1);
    fill(w, k.w, 2, 0.5);
    fill(residual, k.x, 3, 2);
    fill(dy, k.x, 4, 1);
    fill(dsum, k.x, 5, 1);
  }
  // Rounded to `type` first, so that both sets hold the same numbers.
  static void fill(const Tensor& t, DType type, uint64_t seed, double scale) {
    Buffer rounded(type, t.shape);
    testing::fill_normal(rounded, seed, scale);
    testing::assign(t, values(rounded));
  }
  RmsNorm op() const {
    RmsNorm a{.x = x, .y = y, .eps = c.eps, .scale = c.scale, .unit_offset = c.unit_offset};
    if (c.weight) a.w = w;
    if (c.residual) a.residual = residual, a.sum = sum;
    if (c.rstd) a.rstd = rstd;
    return a;
  }
  RmsNormBackward backward_op() const {
    RmsNormBackward a{.dy = dy,
                      .s = c.residual ? sum : x,
                      .dx = dx,
                      .eps = c.eps,
                      .scale = c.scale,
                      .unit_offset = c.unit_offset,
                      .accumulate_dx = c.accumulate};
    if (c.weight) a.w = w, a.dw = dw, a.workspace = workspace;
    if (c.rstd) a.rstd = rstd;
    if (c.dsum) a.dsum = dsum;
    return a;
  }
  void run() {
    rmsnorm(op(), {});
    fill(dw, dw.tensor().dtype, 6, 1);  // dw accumulates
    if (c.accumulate) fill(dx, c.x, 7, 1);
    rmsnorm_backward(backward_op(), {});
  }
  bool guards() const {
    for (const Buffer* b : {&x, &w, &residual, &sum, &y, &rstd, &dy, &dsum, &dx, &dw, &workspace})
      if (!b->guards_intact()) return false;
    return true;
  }
};

double largest(const std::vector<double>& v) {
  double m = 0;
  for (double x : v) m = std::max(m, std::abs(x));
  return m;
}

TEST(RmsNorm, ForwardAndBackwardMatchTheFp64Oracle) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::PrintToString(c));
    Operands got(c), want(c, true);
    got.run();
    want.run();
    // A sum of n squares in at least eight parts, a few roundings more, and the operand's own type at the end (twice:
    // the stored sum is rounded, then the result).
    const double sums = (double(c.cols) / 8 + 16) * roundoff(wide(c.x)),
                 ends = c.x == wide(c.x) ? 0 : 2.01 * roundoff(c.x), stored = c.residual ? ends : 0;
    const auto near = [&](const Buffer& a, const Buffer& b, double absolute, double relative) {
      const auto result = compare(a, values(b), absolute, relative);
      EXPECT_TRUE(result.ok) << result.message;
    };
    near(got.y, want.y, 1e-30, sums + ends);
    if (c.rstd) near(got.rstd, want.rstd, 1e-30, sums + stored);
    if (c.residual) near(got.sum, want.sum, 1e-30, ends + roundoff(c.x));
    // dx is a difference of terms of its own size; every term carries the error of s and of the mean.
    const double size = largest(values(want.dx)) + 1;
    near(got.dx, want.dx, (2 * sums + 2 * stored) * size, ends);
    // dw: at most 32 + 64 additions in a row over terms of the size of dy * n.
    if (c.weight)
      near(got.dw, want.dw,
           (100 * roundoff(wide(c.x)) + stored) * double(c.rows * std::max<int64_t>(1, c.heads) + 1) * c.scale, stored);
    EXPECT_TRUE(got.guards());
  }
}

TEST(RmsNorm, MatchesTheFormulaOnNumbersWorkedByHand) {
  Buffer x(DType::f64, {1, 2}), w(DType::f64, {2}), y(DType::f64, {1, 2}), rstd(DType::f64, {1});
  testing::assign(x, {3, 4});
  testing::assign(w, {0, 1});
  rmsnorm({.x = x, .w = w, .y = y, .rstd = rstd, .eps = 3.5, .scale = 8, .unit_offset = true},
          {});  // mean square 12.5 + 3.5 = 16
  EXPECT_EQ(values(rstd), (std::vector<double>{0.25}));
  EXPECT_EQ(values(y), (std::vector<double>{6, 16}));
}

TEST(RmsNorm, GradientsAgreeWithFiniteDifferences) {
  for (const bool residual : {false, true})
    for (const bool unit_offset : {false, true}) {
      const Case c{6, 2, 11, 3, DType::f64, DType::f64, true, residual, unit_offset, true, false, true, 0.7, 1e-3};
      Operands a(c);
      testing::assign(a.dw, std::vector<double>(size_t(c.cols), 0));
      rmsnorm(a.op(), {});
      rmsnorm_backward(a.backward_op(), {});
      const auto loss = [&] {
        rmsnorm(a.op(), {});
        return testing::dot(a.y, a.dy) + testing::dot(residual ? a.sum : a.x, a.dsum);
      };
      EXPECT_LT(testing::gradient_error(loss, a.x, a.dx, 1), 1e-6);
      EXPECT_LT(testing::gradient_error(loss, a.w, a.dw, 2), 1e-6);
      if (residual) { EXPECT_LT(testing::gradient_error(loss, a.residual, a.dx, 3), 1e-6); }
    }
}

TEST(RmsNorm, OutputsMayAliasInputs) {
  const Case c{37, 0, 50, 2, DType::f32, DType::f32, true, false, false, true};
  Operands apart(c), same(c);
  apart.run();
  RmsNorm forward = same.op();
  forward.y = forward.x;
  rmsnorm(forward, {});
  EXPECT_EQ(values(same.x), values(apart.y));
  for (const bool over_dy : {true, false}) {
    Operands b(c);
    rmsnorm(b.op(), {});
    Operands::fill(b.dw, DType::f32, 6, 1);
    RmsNormBackward backward = b.backward_op();
    backward.dx = over_dy ? b.dy : b.dsum;
    rmsnorm_backward(backward, {});
    EXPECT_EQ(values(backward.dx), values(apart.dx));
    EXPECT_EQ(values(b.dw), values(apart.dw));
  }
  const Case d{5, 0, 20, 0, DType::f32, DType::f32, true, true};
  Operands sum_apart(d), sum_same(d);
  sum_apart.run();
  RmsNorm in_place = sum_same.op();
  in_place.sum = in_place.x;
  rmsnorm(in_place, {});
  EXPECT_EQ(values(sum_same.x), values(sum_apart.sum));
  EXPECT_EQ(values(sum_same.y), values(sum_apart.y));
}

TEST(RmsNorm, FrozenInputOrWeightSkipsOnlyThatGradient) {
  const Case c{40, 0, 33, 0};
  Operands both(c), only_w(c), only_x(c);
  both.run();
  for (Operands* a : {&only_w, &only_x}) {
    rmsnorm(a->op(), {});
    Operands::fill(a->dw, DType::f32, 6, 1);
    RmsNormBackward op = a->backward_op();
    if (a == &only_w)
      op.dx = {};
    else
      op.dw = {}, op.workspace = {};
    rmsnorm_backward(op, {});
  }
  EXPECT_EQ(values(only_w.dw), values(both.dw));
  EXPECT_EQ(values(only_x.dx), values(both.dx));
  EXPECT_TRUE(std::isnan(values(only_w.dx)[0]));
}

TEST(RmsNorm, ZeroRowsAndHugeRowsStayFinite) {
  Buffer x(DType::f32, {2, 40}), y(DType::f32, {2, 40}), dy(DType::f32, {2, 40}), dx(DType::f32, {2, 40});
  std::vector<double> v(80, 0);
  for (size_t i = 40; i < 80; ++i) v[i] = i % 2 ? 1e18 : -1e18;
  testing::assign(x, v);
  testing::fill_normal(dy, 1);
  rmsnorm({.x = x, .y = y, .eps = 0x1p-23}, {});
  rmsnorm_backward({.dy = dy, .s = x, .dx = dx, .eps = 0x1p-23}, {});
  for (size_t i = 0; i < 80; ++i) {
    EXPECT_TRUE(std::isfinite(values(dx)[i]));
    EXPECT_NEAR(values(y)[i], i < 40 ? 0 : i % 2 ? 1 : -1, 1e-5);
  }
}

// The second case has more rows than 64 blocks of 32, so that the number of rows decides the size of a block.
TEST(RmsNorm, ResultsAreBitwiseTheSameForAnyThreadCount) {
  const int before = thread_count();
  for (const int64_t rows : {333, 4133}) {
    const Case c{rows, 0, rows == 333 ? 65 : 9, 0, DType::f32, DType::f32, true, true, false, true};
    std::vector<std::vector<double>> seen;
    for (int threads : {1, 2, 3, 5}) {
      set_thread_count(threads);
      Operands a(c);
      a.run();
      std::vector<double> all = values(a.y);
      for (const Buffer* b : {&a.dx, &a.dw, &a.rstd})
        for (double v : values(*b)) all.push_back(v);
      seen.push_back(all);
    }
    for (size_t i = 1; i < seen.size(); ++i) EXPECT_EQ(seen[0], seen[i]) << rows << " rows";
  }
  set_thread_count(before);
}

// The backward pass reads the stored sum, so y and rstd must be those of the stored sum and not of the sum before its
// rounding.
TEST(RmsNorm, WithAResidualTheResultHasTheBitsOfTheNormOfTheStoredSum) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    Operands a({23, 0, 130, 0, type, type, true, true});
    rmsnorm(a.op(), {});
    Buffer y(type, {23, 130}), rstd(DType::f32, {23});
    rmsnorm({.x = a.sum, .w = a.w, .y = y, .rstd = rstd}, {});
    EXPECT_EQ(values(a.y), values(y)) << type;
    EXPECT_EQ(values(a.rstd), values(rstd)) << type;
  }
}

TEST(RmsNorm, ErrorsNameBothValues) {
  Buffer x(DType::f32, {3, 8}), w(DType::f32, {7}), y(DType::f32, {3, 8}), narrow(DType::f32, {3, 6}),
      d(DType::f64, {3, 8});
  const auto message = [](auto&& use) -> std::string {
    try {
      use();
    } catch (const Error& e) { return e.what(); }
    return "no error";
  };
  using ::testing::PrintToString;
  std::string m = message([&] { rmsnorm({.x = x, .w = w, .y = y}, {}); });
  EXPECT_TRUE(m.find('7') != m.npos && m.find('8') != m.npos) << m;
  m = message([&] { rmsnorm({.x = x, .y = narrow}, {}); });
  EXPECT_TRUE(m.find("(3, 6)") != m.npos && m.find("(3, 8)") != m.npos) << m;
  m = message([&] { rmsnorm({.x = x, .y = d}, {}); });
  EXPECT_TRUE(m.find("f64") != m.npos && m.find("f32") != m.npos) << m;
  m = message([&] { rmsnorm({.x = x, .residual = x, .y = y}, {}); });
  EXPECT_TRUE(m.find("expected both or neither") != m.npos) << m;
  Buffer dw(DType::f32, {8}), small(DType::u8, {4});
  m = message([&] { rmsnorm_backward({.dy = y, .s = x, .dw = dw, .workspace = small}, {}); });
  EXPECT_TRUE(m.find('4') != m.npos && m.find("32") != m.npos) << m;
}

TEST(RmsNorm, EveryOperandLiesOnOneDevice) {
  using F = RmsNorm;
  using B = RmsNormBackward;
  Buffer x(DType::f32, {3, 8}), y(DType::f32, {3, 8}), w(DType::f32, {8}), rstd(DType::f32, {3}),
      workspace(DType::u8, {rmsnorm_backward_workspace_bytes(3, 8, DType::f32, {})});
  const F a{.x = x, .w = w, .residual = x, .sum = y, .y = y, .rstd = rstd};
  EXPECT_EQ(testing::device_not_checked(a, {&F::x, &F::w, &F::residual, &F::sum, &F::y, &F::rstd}, rmsnorm), "");
  const B b{.dy = y, .s = x, .w = w, .rstd = rstd, .dsum = y, .dx = y, .dw = w, .workspace = workspace};
  EXPECT_EQ(testing::device_not_checked(b, {&B::dy, &B::s, &B::w, &B::rstd, &B::dsum, &B::dx, &B::dw, &B::workspace},
                                        rmsnorm_backward),
            "");
}

}  // namespace
}  // namespace ingot
