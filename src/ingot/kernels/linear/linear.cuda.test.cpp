// linear, linear_backward and matmul on a GPU against fp64 on the CPU. Where cuBLASLt is missing, products that the
// core cannot compute are refused by name; with INGOT_CUBLASLT naming no library, all remaining cases run on the core.
#include "ingot/kernels/linear/linear.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "ingot/gpu/cublaslt.h"
#include "ingot/gpu/gemm/variant.h"
#include "ingot/kernels/linear/sign_bits.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::DeviceBuffer;
using testing::roundoff;
using testing::values;

class LinearCuda : public testing::GpuTest<> {};

// Ragged sizes of several tiles; the emulator gets by with two tiles in each direction.
constexpr bool kFew = testing::kEmulated;
constexpr int64_t kRows = kFew ? 140 : 300, kColumns = kFew ? 136 : 264, kChannels = kFew ? 72 : 200;

struct Case {
  int64_t m, n, k;
  DType type = DType::bf16, out = DType::bf16;
  int64_t gap = 8;  // elements between rows
  bool transpose_a = false, transpose_b = false;
  double alpha = 1, beta = 0;
  bool add = false;  // the addend is a matrix different from c
  Products products = Products::fp32;
};
std::ostream& operator<<(std::ostream& o, const Case& c) {
  return o << c.m << " x " << c.n << " x " << c.k << ' ' << c.type << " to " << c.out << " gap " << c.gap
           << (c.transpose_a ? " a^T" : "") << (c.transpose_b ? " b^T" : "") << " alpha " << c.alpha << " beta "
           << c.beta << (c.add ? " add" : "") << " products " << int(c.products);
}
int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
int64_t stride_of(int64_t cols, int64_t gap) { return gap % 8 == 0 ? round_up(cols, 8) + gap : cols + gap; }
// f32 always goes to cuBLASLt, and so do operands whose rows are not whole multiples of 16 bytes apart; on Hopper also
// results whose rows are not whole.
bool needs_cublaslt(const Case& c) {
  if (c.type == DType::f32) return true;
  if (gemm::variant_on(0) == gemm::Variant::hopper) return c.gap % 8 != 0 || c.n % 8 != 0;
  return stride_of(c.transpose_a ? c.m : c.k, c.gap) % 8 != 0 || stride_of(c.transpose_b ? c.k : c.n, c.gap) % 8 != 0;
}

DeviceBuffer matrix(DType t, int64_t rows, int64_t cols, int64_t gap, uint64_t seed) {
  DeviceBuffer b(t, {rows, cols}, stride_of(cols, gap));
  testing::fill_normal(b.host(), seed);
  b.upload();
  return b;
}

// alpha op(a) op(b) + beta add + bias in fp64, and the same sum of absolute values: the scale of the rounding error.
struct Oracle {
  std::vector<double> sum, size;
};
std::vector<double> product_of(const Case& c, const std::vector<double>& a, const std::vector<double>& b) {
  const Buffer x(DType::f64, c.transpose_a ? Shape{c.k, c.m} : Shape{c.m, c.k}),
      y(DType::f64, c.transpose_b ? Shape{c.n, c.k} : Shape{c.k, c.n}), z(DType::f64, {c.m, c.n});
  testing::assign(x, a), testing::assign(y, b);
  matmul({.a = x, .b = y, .c = z, .transpose_a = c.transpose_a, .transpose_b = c.transpose_b}, {});
  return values(z);
}
Oracle oracle(const Case& c, const Tensor& a, const Tensor& b, const std::vector<double>& add,
              const std::vector<double>& bias = {}) {
  std::vector<double> x = values(a), y = values(b);
  Oracle want{product_of(c, x, y), {}};
  for (std::vector<double>* v : {&x, &y})
    for (double& e : *v) e = std::fabs(e);
  want.size = product_of(c, x, y);
  for (size_t i = 0; i < want.sum.size(); ++i) {
    const double old = c.beta != 0 ? c.beta * add[i] : 0, b_n = bias.empty() ? 0 : bias[i % size_t(c.n)];
    want.sum[i] = c.alpha * want.sum[i] + old + b_n;
    want.size[i] = std::fabs(c.alpha) * want.size[i] + std::fabs(old) + std::fabs(b_n);
  }
  return want;
}
// K + 4 additions of fp32, where a tensor core truncates addends (2^-23); operands rounded to 11 or 8 bits where asked
// for; one or two roundings to the output (the addend may be rounded in between).
double allowed(const Case& c, const Oracle& want, size_t i, double extra = 0) {
  const double operands = c.type != DType::f32           ? 0
                          : c.products == Products::tf32 ? 0x1p-10
                          : c.products == Products::bf16 ? 0x1p-7
                                                         : 0;
  const double roundings = c.beta != 0 || c.alpha != 1 ? 2.02 : 1.01;
  return (roundings * roundoff(c.out) + extra) * std::max(std::fabs(want.sum[i]), c.beta != 0 ? want.size[i] : 0) +
         (double(c.k + 4) * 0x1p-23 + operands) * want.size[i];
}
void expect_near(DeviceBuffer& got, const Case& c, const Oracle& want) {
  got.download();
  EXPECT_TRUE(got.untouched()) << "written outside of the result";
  const std::vector<double> have = values(got.host());
  ASSERT_EQ(have.size(), want.sum.size());
  int wrong = 0;
  for (size_t i = 0; i < have.size() && wrong < 4; ++i)
    if (!(std::fabs(have[i] - want.sum[i]) <= allowed(c, want, i))) {
      ++wrong;
      ADD_FAILURE() << "(" << int64_t(i) / c.n << ", " << int64_t(i) % c.n << "): found " << have[i] << ", expected "
                    << want.sum[i];
    }
}
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) { return e.what(); }
  return "";
}

void run_matmul(const Case& c, const Tensor& workspace = {}) {
  SCOPED_TRACE(::testing::Message() << c);
  DeviceBuffer a = c.transpose_a ? matrix(c.type, c.k, c.m, c.gap, 1) : matrix(c.type, c.m, c.k, c.gap, 1);
  DeviceBuffer b = c.transpose_b ? matrix(c.type, c.n, c.k, c.gap, 2) : matrix(c.type, c.k, c.n, c.gap, 2);
  DeviceBuffer out(c.out, {c.m, c.n}, stride_of(c.n, c.gap));
  DeviceBuffer add = matrix(c.out, c.m, c.n, c.gap, 3);
  if (c.beta != 0 && !c.add) testing::fill_normal(out.host(), 3);
  out.upload();
  const auto call = [&] {
    matmul({.a = a,
            .b = b,
            .c = out,
            .transpose_a = c.transpose_a,
            .transpose_b = c.transpose_b,
            .alpha = c.alpha,
            .beta = c.beta,
            .products = c.products,
            .add = c.add ? add.tensor() : Tensor(),
            .workspace = workspace},
           {});
  };
  if (needs_cublaslt(c) && !gpu::lt_available() && c.m * c.n * c.k > 0) {
    const std::string m = message_of(call);
    EXPECT_TRUE(m.find("matmul") != m.npos && m.find("cuBLASLt") != m.npos) << m;
    return;
  }
  const Oracle want = oracle(c, a.host(), b.host(), values(add.host()));
  call();
  expect_near(out, c, want);
}

// As many products in one call, with and without an addend, agree with separate calls of matmul within the bound of
// each product.
TEST_F(LinearCuda, EachOfABatchAgreesWithFp64) {
  constexpr int64_t kCount = 5;
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (int order = 0; order < 4; ++order) {
      Case c{.m = kFew ? 20 : 200, .n = 96, .k = kFew ? 40 : 136, .type = type, .out = DType::f32};
      c.transpose_a = order % 2, c.transpose_b = order / 2;
      c.beta = order == 0 ? 0 : 1;
      if (needs_cublaslt(c) && !gpu::lt_available()) continue;
      const int64_t rows_a = c.transpose_a ? c.k : c.m, cols_a = c.transpose_a ? c.m : c.k;
      const int64_t rows_b = c.transpose_b ? c.n : c.k, cols_b = c.transpose_b ? c.k : c.n;
      DeviceBuffer a = matrix(c.type, kCount * rows_a, cols_a, 0, 1), b = matrix(c.type, kCount * rows_b, cols_b, 0, 2);
      DeviceBuffer out(c.out, {kCount * c.m, c.n});
      if (c.beta != 0) testing::fill_normal(out.host(), 3);
      out.upload();
      const auto each = [](const Tensor& t) {
        Tensor v = t;
        v.shape = {kCount, t.rows() / kCount, t.cols()};
        v.stride[2] = 1, v.stride[1] = t.row_stride(), v.stride[0] = v.size(1) * t.row_stride();
        return v;
      };
      std::vector<Oracle> want;
      for (int64_t i = 0; i < kCount; ++i)
        want.push_back(oracle(c, each(a.host()).row(i), each(b.host()).row(i), values(each(out.host()).row(i))));
      matmul_each({.a = each(a),
                   .b = each(b),
                   .c = each(out),
                   .transpose_a = c.transpose_a,
                   .transpose_b = c.transpose_b,
                   .beta = c.beta},
                  {});
      out.download();
      EXPECT_TRUE(out.untouched());
      const std::vector<double> got = values(out.host());
      for (int64_t i = 0; i < kCount; ++i)
        for (int64_t j = 0; j < c.m * c.n; ++j)
          ASSERT_LE(std::fabs(got[size_t(i * c.m * c.n + j)] - want[size_t(i)].sum[size_t(j)]),
                    allowed(c, want[size_t(i)], size_t(j)))
              << c << ", product " << i << ", element " << j;
    }
}

// Every order of the operands, with and without an addend, for each type.
TEST_F(LinearCuda, ProductsAgreeWithFp64) {
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (DType out : {type, DType::f32})
      for (int order = 0; order < 4; ++order) {
        Case c{.m = kRows, .n = kColumns, .k = kChannels, .type = type, .out = out};
        c.transpose_a = order % 2, c.transpose_b = order / 2;
        run_matmul(c);
        c.beta = 1;
        run_matmul(c);
        c.alpha = -0.5, c.beta = 0.75;
        run_matmul(c);
        c.add = true;
        run_matmul(c);
        if (HasFailure() || type == out) break;
      }
}
TEST_F(LinearCuda, EverySizeIsMultipliedSmall) {
  for (DType type : {DType::f32, DType::bf16})
    for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{{1, 1, 1},
                                                                     {1, 8, 16},
                                                                     {7, 13, 5},
                                                                     {33, 31, 65},
                                                                     {1, 512, 1024},
                                                                     {129, 136, 1000},
                                                                     {17, 200, 0},
                                                                     {0, 64, 64},
                                                                     {64, 0, 64}})
      for (int64_t gap : {0, 3, 8}) {
        run_matmul({.m = m, .n = n, .k = k, .type = type, .out = type, .gap = gap, .transpose_b = true});
        if (HasFailure()) return;
      }
}
// So many tiles that the core computes the product even where cuBLASLt is present, with each of the core's tiles.
TEST_F(LinearCuda, LargeProductsAgreeWithFp64) {
  if (testing::kEmulated) GTEST_SKIP() << "too large for the emulator";
  for (int order = 0; order < 4; ++order)
    for (double beta : {0., 1.}) {
      Case c{.m = 1408, .n = 1536, .k = 136};
      c.transpose_a = order % 2, c.transpose_b = order / 2, c.beta = beta;
      c.out = beta == 1 ? DType::f32 : DType::bf16;
      run_matmul(c);
      c.m = 2816, c.n = 2304;
      if (order == 2 && beta == 0) run_matmul(c);
      if (HasFailure()) return;
    }
}
TEST_F(LinearCuda, WithWorkspaceAndRoundedOperands) {
  const gpu::DeviceMemory memory(linear_workspace_bytes({Device::cuda, 0}));
  const Tensor workspace(memory.data(), DType::u8, {memory.bytes()}, {Device::cuda, 0});
  run_matmul({.m = 64, .n = 128, .k = kFew ? 512 : 4096, .transpose_b = true}, workspace);
  for (Products products : {Products::tf32, Products::bf16})
    run_matmul({.m = 300, .n = 264, .k = 200, .type = DType::f32, .out = DType::f32, .products = products}, workspace);
}

const Act kActs[] = {act_of<Identity>,    act_of<Relu>, act_of<LeakyReluSquared>,
                     act_of<ReluSquared>, act_of<Gelu>, act_of<GeluTanh>};  // in the product's epilogue, and not
// f and f' in fp64.
std::vector<double> value_of(Act act, const std::vector<double>& x) {
  const Buffer in(DType::f64, {int64_t(x.size())}), out(DType::f64, {int64_t(x.size())});
  testing::assign(in, x);
  activate({.act = act, .x = in, .y = out}, {});
  return values(out);
}
std::vector<double> slope_of(Act act, const std::vector<double>& x) {
  const Buffer in(DType::f64, {int64_t(x.size())}), one(DType::f64, {int64_t(x.size())});
  testing::assign(in, x), testing::assign(one, std::vector<double>(x.size(), 1));
  activate_backward({.act = act, .dy = one, .x = in, .dx = one}, {});
  return values(one);
}
// The largest |f'|, and |f''|, within `by` of x: of squares 2 |x| and 2, of the remaining activations below 1.13 and
// 1.2.
double steepest(Act act, double x, double by) {
  return slope_follows_from_value_and_sign(act) ? 2 * (std::fabs(x) + by) : 1.13;
}
constexpr double kSteepestSlope = 2;

// Expects each element's bit to be the sign of `pre`; either value is accepted where `pre` is within `error` of 0.
void expect_signs(DeviceBuffer& signs, const Case& c, const Oracle& pre) {
  signs.download();
  EXPECT_TRUE(signs.untouched());
  const uint64_t* const words = reinterpret_cast<const uint64_t*>(signs.host().ptr<uint8_t>());
  int wrong = 0;
  for (int64_t r = 0; r < c.m; ++r)
    for (int64_t j = 0; j < c.n && wrong < 3; ++j)
      for (int lane = 0; lane < 32; ++lane)
        for (int bit = 0; bit < 64; ++bit) {
          const sign_bits::Place at = sign_bits::place(lane, bit);
          if (at.row != r % 16 || at.column != j % 128) continue;
          const size_t i = size_t(r * c.n + j);
          const bool positive = words[sign_bits::word_at(r, j, c.n, lane)] >> bit & 1;
          if (positive != (pre.sum[i] > 0) && std::fabs(pre.sum[i]) > allowed(c, pre, i)) {
            ++wrong;
            ADD_FAILURE() << "sign of (" << r << ", " << j << ") is wrong, of " << pre.sum[i];
          }
        }
}

TEST_F(LinearCuda, ForwardWithBiasAndActivation) {
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (Act act : kActs)
      for (int keeps : {0, 1, 2})  // keeps nothing, pre, or signs
        for (int64_t rows : {int64_t(1), kRows, int64_t(2816)}) {
          if (kFew && rows > kRows) continue;
          const Case c{.m = rows,
                       .n = kColumns + (rows > 2000 ? 504 : 0),
                       .k = kChannels,
                       .type = type,
                       .out = type,
                       .transpose_b = true};
          SCOPED_TRACE(::testing::Message() << c << " " << name_of(act) << " keeps " << keeps);
          if (needs_cublaslt(c) && !gpu::lt_available()) continue;
          if (keeps == 2 && (!slope_follows_from_value_and_sign(act) || type == DType::f16)) continue;
          DeviceBuffer x = matrix(type, c.m, c.k, 8, 1), w = matrix(type, c.n, c.k, 0, 2), b(type, {c.n}),
                       y(type, {c.m, c.n}), pre(type, {c.m, c.n}),
                       signs(DType::u8, {linear_sign_bytes(c.m, c.n, {Device::cuda, 0})});
          testing::fill_normal(b.host(), 3);
          for (DeviceBuffer* t : {&b, &y, &pre, &signs}) t->upload();
          linear({.x = x,
                  .w = w,
                  .b = b,
                  .y = y,
                  .pre = keeps == 1 ? pre.tensor() : Tensor(),
                  .signs = keeps == 2 ? signs.tensor() : Tensor(),
                  .act = act},
                 {});
          const Oracle want = oracle(c, x.host(), w.host(), {}, values(b.host()));
          if (keeps == 1) expect_near(pre, c, want);
          if (keeps == 2 && rows <= 300) expect_signs(signs, c, want);
          // The sum before the activation is rounded to the type where the caller keeps the sum.
          y.download();
          EXPECT_TRUE(y.untouched());
          const std::vector<double> got = values(y.host()), value = value_of(act, want.sum);
          for (size_t i = 0; i < got.size(); ++i) {
            const double before = allowed(c, want, i);
            ASSERT_LE(std::fabs(got[i] - value[i]),
                      steepest(act, want.sum[i], before) * before + 1.02 * roundoff(type) * std::fabs(value[i]) + 1e-6)
                << i << ": found " << got[i] << ", expected " << value[i];
          }
        }
}

// A sum that is much smaller than the product and the bias shows a rounding between the two additions. With 11 and 43
// channels the rows of x and w are unaligned.
TEST_F(LinearCuda, TheProductAndABiasAreRoundedOnce) {
  if (!gpu::lt_available()) GTEST_SKIP() << gpu::lt_version();
  for (DType type : {DType::bf16, DType::f16})
    for (int64_t channels : {int64_t(11), int64_t(16), int64_t(43)}) {
      const Case c{.m = kRows, .n = kColumns, .k = channels, .type = type, .out = type, .transpose_b = true};
      DeviceBuffer x = matrix(type, c.m, c.k, 0, 1), w = matrix(type, c.n, c.k, 0, 2), y(type, {c.m, c.n}, c.n + 8),
                   b = matrix(type, 1, c.n, 0, 3);
      y.upload();
      linear({.x = x, .w = w, .b = b.tensor().row(0), .y = y}, {});
      expect_near(y, c, oracle(c, x.host(), w.host(), {}, values(b.host())));
      matmul({.a = x, .b = w, .c = y, .transpose_b = true, .bias = b.tensor().row(0)}, {});
      expect_near(y, c, oracle(c, x.host(), w.host(), {}, values(b.host())));
    }
}

TEST_F(LinearCuda, BackwardAgreesWithFp64) {
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (DType sums : {type, DType::f32})
      for (int64_t rows : {int64_t(0), int64_t(1), kRows, int64_t(2000)}) {
        if (kFew && rows > kRows) continue;
        const int64_t n = kColumns, k = kChannels;
        SCOPED_TRACE(::testing::Message() << rows << " rows of " << type << ", sums " << sums);
        if (type == DType::f32 && !gpu::lt_available()) continue;
        DeviceBuffer dy = matrix(type, rows, n, 8, 1), x = matrix(type, rows, k, 0, 2), w = matrix(type, n, k, 0, 3),
                     dx(type, {rows, k}), dw = matrix(sums, n, k, 8, 4), db(sums, {n});
        testing::fill_normal(db.host(), 5);
        dx.upload(), db.upload();
        const std::vector<double> dw_before = values(dw.host()), db_before = values(db.host());
        linear_backward({.dy = dy, .x = x, .w = w, .dx = dx, .dw = dw, .db = db}, {});
        const Case of_dx{.m = rows, .n = k, .k = n, .type = type, .out = type};
        const Case of_dw{.m = n, .n = k, .k = rows, .type = type, .out = sums, .transpose_a = true, .beta = 1};
        expect_near(dx, of_dx, oracle(of_dx, dy.host(), w.host(), {}));
        expect_near(dw, of_dw, oracle(of_dw, dy.host(), x.host(), dw_before));
        db.download();
        const std::vector<double> got = values(db.host()), d = values(dy.host());
        for (int64_t j = 0; j < n; ++j) {
          double sum = db_before[size_t(j)], size = std::fabs(sum);
          for (int64_t r = 0; r < rows; ++r) sum += d[size_t(r * n + j)], size += std::fabs(d[size_t(r * n + j)]);
          ASSERT_LE(std::fabs(got[size_t(j)] - sum),
                    1.01 * roundoff(sums) * std::fabs(sum) + double(rows + 1) * 0x1p-24 * size)
              << "db " << j;
        }
        if (HasFailure()) return;
      }
}

TEST_F(LinearCuda, BackwardThroughAnActivation) {
  for (DType type : {DType::bf16, DType::f16})
    for (Act act : kActs)
      for (bool large : {false, true}) {
        if (kFew && large) continue;
        Case c{.m = kRows, .n = kFew ? 136 : 200, .k = kFew ? 72 : 264, .type = type, .out = type};
        if (large) c.m = 2816, c.n = 768, c.k = 136;
        SCOPED_TRACE(::testing::Message() << c << ' ' << name_of(act));
        DeviceBuffer dy = matrix(c.type, c.m, c.k, 8, 1), w = matrix(c.type, c.k, c.n, 0, 3),
                     pre = matrix(c.type, c.m, c.n, 8, 2), dx(c.type, {c.m, c.n}, c.n + 8);
        dx.upload();
        linear_backward({.dy = dy, .w = w, .dx = dx, .pre = pre, .act = act}, {});
        const Oracle want = oracle(c, dy.host(), w.host(), {});
        dx.download();
        EXPECT_TRUE(dx.untouched());
        const std::vector<double> got = values(dx.host()), slope = slope_of(act, values(pre.host()));
        for (size_t i = 0; i < got.size(); ++i)
          ASSERT_LE(std::fabs(got[i] - slope[i] * want.sum[i]),
                    std::fabs(slope[i]) * allowed(c, want, i) +
                        1.02 * roundoff(c.type) * std::fabs(slope[i] * want.sum[i]) + 2e-5 * std::fabs(want.sum[i]))
              << i;
      }
  DeviceBuffer dy = matrix(DType::bf16, 8, 16, 0, 1), w = matrix(DType::bf16, 16, 8, 0, 2),
               pre = matrix(DType::bf16, 8, 8, 0, 3);
  const std::string m = message_of([&] {
    linear_backward({.dy = dy, .w = w, .dx = pre, .pre = pre, .act = act_of<ReluSquared>, .accumulate_dx = true}, {});
  });
  EXPECT_NE(m.find("accumulate_dx"), m.npos) << m;
}

// The backward pass through the value and the sign that linear kept.
TEST_F(LinearCuda, BackwardFromAValueAndItsSign) {
  for (DType type : {DType::f32, DType::bf16})
    for (Act act : {act_of<LeakyReluSquared>, act_of<ReluSquared>})
      for (bool large : {false, true}) {
        if (kFew && large) continue;
        const int64_t rows = large ? 2816 : kRows, hidden = large ? 768 : kColumns, in = 72, out = kFew ? 40 : 136;
        SCOPED_TRACE(::testing::Message() << type << ' ' << name_of(act) << ' ' << rows << " rows");
        if (type == DType::f32 && !gpu::lt_available()) continue;
        const Case of_h{.m = rows, .n = hidden, .k = in, .type = type, .out = type, .transpose_b = true};
        const Case of_dx{.m = rows, .n = hidden, .k = out, .type = type, .out = type};
        DeviceBuffer x = matrix(type, rows, in, 0, 1), w1 = matrix(type, hidden, in, 0, 2),
                     h(type, {rows, hidden}, hidden + 8), dy = matrix(type, rows, out, 0, 3),
                     w2 = matrix(type, out, hidden, 8, 4), dx(type, {rows, hidden}),
                     signs(DType::u8, {linear_sign_bytes(rows, hidden, {Device::cuda, 0})});
        for (DeviceBuffer* t : {&h, &dx, &signs}) t->upload();
        linear({.x = x, .w = w1, .y = h, .signs = signs, .act = act}, {});
        linear_backward({.dy = dy, .x = h, .w = w2, .dx = dx, .signs = signs, .act = act}, {});
        const Oracle pre = oracle(of_h, x.host(), w1.host(), {}), sums = oracle(of_dx, dy.host(), w2.host(), {});
        h.download(), dx.download(), signs.download();
        EXPECT_TRUE(h.untouched() && dx.untouched() && signs.untouched());
        const std::vector<double> got = values(dx.host()), slope = slope_of(act, pre.sum);
        for (size_t i = 0; i < got.size(); ++i) {
          // The root of a square rounded to the type is off by half a rounding, and by the error of the sum.
          const double off = kSteepestSlope * allowed(of_h, pre, i) + roundoff(type) * std::fabs(slope[i]);
          ASSERT_LE(std::fabs(got[i] - slope[i] * sums.sum[i]),
                    (std::fabs(slope[i]) + off) * allowed(of_dx, sums, i) + off * std::fabs(sums.sum[i]) +
                        1.02 * roundoff(type) * std::fabs(slope[i] * sums.sum[i]))
              << i << ": found " << got[i] << ", expected " << slope[i] * sums.sum[i];
        }
      }
}

TEST_F(LinearCuda, RepeatsBitForBitAndWorksInAGraph) {
  if (testing::kEmulated) GTEST_SKIP() << "too large for the emulator";
  DeviceBuffer x = matrix(DType::bf16, 3000, 520, 0, 1), w = matrix(DType::bf16, 1032, 520, 0, 2),
               y(DType::bf16, {3000, 1032});
  y.upload();
  linear({.x = x, .w = w, .y = y}, {});
  y.download();
  const std::vector<double> first = values(y.host());
  gpu::fill_bytes(y.tensor().data, 0, y.tensor().bytes(), {});
  const gpu::OwnedStream stream;
  gpu::synchronize();
  const gpu::Graph graph(stream, [&] { linear({.x = x, .w = w, .y = y}, stream); });
  graph.launch(stream);
  y.download();
  EXPECT_EQ(values(y.host()), first);
}

// The stride between rows is so large that offsets need more than 32 bits.
TEST_F(LinearCuda, MoreThanTwoToThe31Elements) {
  if (gpu::device_info().memory_bytes < int64_t(24) << 30) GTEST_SKIP() << "needs 24 GiB of device memory";
  constexpr int64_t kRows = 5, kStride = (int64_t(1) << 29) + 8;
  const Case c{.m = kRows, .n = 264, .k = 200, .transpose_b = true};
  const gpu::DeviceMemory far_x((kRows - 1) * kStride * 2 + 4096), far_y((kRows - 1) * kStride * 2 + 4096);
  Tensor x(far_x.data(), DType::bf16, {kRows, c.k}, {Device::cuda, 0}),
      y(far_y.data(), DType::bf16, {kRows, c.n}, {Device::cuda, 0});
  x.stride[0] = y.stride[0] = kStride;
  DeviceBuffer near_x = matrix(c.type, kRows, c.k, 0, 1), w = matrix(c.type, c.n, c.k, 0, 2),
               near_y(c.type, {kRows, c.n});
  near_y.upload();
  for (int64_t r = 0; r < kRows; ++r) gpu::copy_on_device(x.row(r).data, near_x.tensor().row(r).data, c.k * 2, {});
  linear({.x = x, .w = w, .y = y}, {});
  for (int64_t r = 0; r < kRows; ++r) gpu::copy_on_device(near_y.tensor().row(r).data, y.row(r).data, c.n * 2, {});
  expect_near(near_y, c, oracle(c, near_x.host(), w.host(), {}));
}

TEST_F(LinearCuda, RefusesUnsupportedOperandsByName) {
  DeviceBuffer x(DType::f64, {8, 8}), w(DType::bf16, {8, 8}), y(DType::f32, {8, 8});
  std::string m = message_of([&] { linear({.x = x, .w = x, .y = x}, {}); });
  EXPECT_TRUE(m.find("f64") != m.npos) << m;
  m = message_of([&] { linear({.x = w, .w = w, .y = y}, {}); });
  EXPECT_TRUE(m.find("linear: y") != m.npos && m.find("f32") != m.npos) << m;
  m = message_of([&] { linear({.x = w, .w = w, .y = w, .workspace = y}, {}); });
  EXPECT_TRUE(m.find("workspace") != m.npos) << m;
}

}  // namespace
}  // namespace ingot
