#include "ingot/kernels/linear/linear.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <initializer_list>
#include <vector>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/linear/cpu/linear_tiles.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::assign;
using testing::Buffer;
using testing::fill_normal;
using testing::values;

struct Case {
  int64_t m, n, k;
  bool transpose_a = false, transpose_b = false;
  double alpha = 1, beta = 0;
  int64_t pad = 0;  // columns between rows
  bool bias = false;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.m << "x" << c.n << "x" << c.k << (c.transpose_a ? " a^T" : " a") << (c.transpose_b ? " b^T" : " b")
             << " alpha " << c.alpha << " beta " << c.beta << " pad " << c.pad;
}

Buffer matrix(DType dtype, int64_t rows, int64_t cols, int64_t pad, uint64_t seed, double scale = 1) {
  Buffer b(dtype, {rows, cols}, cols + pad);
  fill_normal(b, seed, scale);
  return b;
}
// Calls body(): as the CPU runs products, and by tiles with a plain loop in place of the instruction.
template <class Body> void as_is_and_by_emulated_tiles(Body&& body) {
  for (bool tiles : {false, true}) {
    SCOPED_TRACE(tiles ? "emulated tiles" : "as is");
    detail::emulate_tiles(tiles);
    body();
  }
  detail::emulate_tiles(false);
}
// Small integers, -3 .. 3: products and sums are exact in every format, so any order gives the same bits.
void fill_small_integers(const Tensor& t, uint64_t seed) {
  const Rng rng(seed, Purpose::test);
  std::vector<double> v(size_t(t.numel()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = double(rng.below(i, 7)) - 3;
  assign(t, v);
}

// Sizes around the micro-tiles of every level, and past a depth step.
std::vector<Case> cases() {
  std::vector<Case> all;
  const int64_t sizes[] = {1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129};
  int turn = 0;
  for (int64_t m : sizes)
    for (int64_t n : sizes) {
      const int64_t k = sizes[(turn * 5 + 3) % 13];
      all.push_back({m, n, k, (turn & 1) != 0, (turn & 2) != 0, turn % 3 ? 1.0 : -0.5, turn % 5 ? 0.0 : 2.0, turn % 4});
      ++turn;
    }
  for (int t = 0; t < 4; ++t) {
    all.push_back({65, 33, 641, (t & 1) != 0, (t & 2) != 0, 0.25, 1, 5});
    all.push_back({6, 129, 2049, (t & 1) != 0, (t & 2) != 0, 1, 0, 0});
    all.push_back({40, 24, 0, (t & 1) != 0, (t & 2) != 0, 1, t > 1 ? 0.5 : 0, 1});
    all.push_back({0, 24, 8, (t & 1) != 0, (t & 2) != 0});
    all.push_back({24, 0, 8, (t & 1) != 0, (t & 2) != 0});
  }
  return all;
}

// By the plain loop in fp64: the product, and sum over p of |a||b|, the scale of a dot product's rounding error. Zeros
// where all sums are exact.
struct Oracle {
  std::vector<double> value, scale;
};
std::vector<double> turned(const std::vector<double>& x, int64_t rows, int64_t cols) {
  std::vector<double> out(x.size());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) out[size_t(j * rows + i)] = x[size_t(i * cols + j)];
  return out;
}
// The operands are turned so that the loop reads both in memory order, several times as fast.
Oracle oracle(const Case& c, std::vector<double> a, std::vector<double> b, std::vector<double> start, bool exact) {
  if (c.transpose_a) a = turned(a, c.k, c.m);
  if (!c.transpose_b) b = turned(b, c.k, c.n);
  const auto product = [&](double alpha, double beta) {
    const Buffer rows(DType::f64, {c.m, c.k}), columns(DType::f64, {c.n, c.k}), sums(DType::f64, {c.m, c.n});
    assign(rows, a);
    assign(columns, b);
    assign(sums, start);
    matmul_plain({.a = rows, .b = columns, .c = sums, .transpose_b = true, .alpha = alpha, .beta = beta});
    return values(sums);
  };
  Oracle out{.value = product(c.alpha, c.beta), .scale = std::vector<double>(start.size(), 0.0)};
  if (exact) return out;
  for (auto* v : {&a, &b, &start})
    for (double& x : *v) x = std::abs(x);
  out.scale = product(std::abs(c.alpha), std::abs(c.beta));
  return out;
}

// |error| <= gamma * sum |a||b|, gamma = terms * u / (1 - terms * u): this bound holds for every order of summation
// (Higham 2002, 3.1). Three more roundings: alpha, beta, and the sum of both.
void expect_within(const Tensor& got, const Oracle& want, int64_t k, double unit, const Case& c) {
  const auto have = values(got);
  const double gamma = double(k + 3) * unit / (1 - double(k + 3) * unit);
  for (size_t i = 0; i < have.size(); ++i)
    ASSERT_LE(std::abs(have[i] - want.value[i]), gamma * want.scale[i])
        << c << ", element " << i << ": found " << have[i] << ", expected " << want.value[i];
}

// A way of computing a product.
struct Way {
  DType dtype;
  Products products;
  bool emulated_tiles = false;
};
constexpr Way kFp32{DType::f32, Products::fp32}, kFp64{DType::f64, Products::fp32}, kBf16{DType::f32, Products::bf16},
    kBf16Tiles{DType::f32, Products::bf16, true};
std::ostream& operator<<(std::ostream& out, const Way& w) {
  return out << name_of(w.dtype) << (w.products == Products::bf16 ? " by bf16" : "")
             << (w.emulated_tiles ? " in emulated tiles" : "");
}

std::vector<double> numbers(DType dtype, int64_t rows, int64_t cols, uint64_t seed, bool integers) {
  const Buffer t(dtype, {rows, cols});
  integers ? fill_small_integers(t, seed) : fill_normal(t, seed);
  return values(t);
}
// Moves every number by less than half a bf16 ulp, away from ties: rounding to bf16 restores the number.
void unround(std::vector<double>& v, bool integers) {
  for (size_t i = 0; i < v.size(); ++i) v[i] *= 1 + 0x1p-10 * (i % 2 ? 1 : -1) * (integers ? 0.5 : 0.4);
}

void run_one(const Case& c, const Way& way, std::vector<double> a, std::vector<double> b,
             const std::vector<double>& start, const Oracle& want, bool integers) {
  SCOPED_TRACE(::testing::Message() << way);
  const int64_t a_rows = c.transpose_a ? c.k : c.m, a_cols = c.transpose_a ? c.m : c.k;
  const int64_t b_rows = c.transpose_b ? c.n : c.k, b_cols = c.transpose_b ? c.k : c.n;
  if (way.products == Products::bf16) {
    unround(a, integers);
    unround(b, integers);
  }
  const Buffer left(way.dtype, {a_rows, a_cols}, a_cols + c.pad),
      right(way.dtype, {b_rows, b_cols}, b_cols + c.pad * 2);
  assign(left, a);
  assign(right, b);
  const auto expect_right = [&](auto&& product) {
    const Buffer y(way.dtype, {c.m, c.n}, c.n + c.pad);
    if (c.beta != 0) assign(y, start);  // otherwise c stays poisoned
    detail::emulate_tiles(way.emulated_tiles);
    product(y);
    detail::emulate_tiles(false);
    EXPECT_TRUE(y.guards_intact()) << c;
    expect_within(y, want, c.k, integers ? 0 : testing::roundoff(way.dtype), c);
  };
  expect_right([&](const Tensor& y) {
    matmul({.a = left,
            .b = right,
            .c = y,
            .transpose_a = c.transpose_a,
            .transpose_b = c.transpose_b,
            .alpha = c.alpha,
            .beta = c.beta,
            .products = way.products},
           {});
  });
  // A layer's few last columns run as dot products.
  if (!c.transpose_a && c.transpose_b && (c.beta == 0 || c.beta == 1))
    expect_right([&](const Tensor& y) {
      linear({.x = left, .w = right, .y = y, .alpha = c.alpha, .accumulate = c.beta == 1, .products = way.products},
             {});
    });
}
// Every way of computing a product against the same oracle. All ways but the first get numbers that are exact in the
// way's type, or integers.
void run(const Case& c, std::initializer_list<Way> ways, bool integers) {
  const Way& first = *ways.begin();
  const DType seen = first.products == Products::bf16 ? DType::bf16 : first.dtype;
  const auto a = numbers(seen, c.m, c.k, 1, integers), b = numbers(seen, c.k, c.n, 2, integers);
  const auto start = c.beta != 0 ? numbers(first.dtype, c.m, c.n, 3, integers) : std::vector<double>(size_t(c.m * c.n));
  const Oracle want = oracle(c, a, b, start, integers);
  for (const Way& way : ways) run_one(c, way, a, b, start, want, integers);
}

TEST(matmul, f32_obeys_the_bound_of_a_dot_product_for_odd_sizes_strides_and_transposes) {
  for (const Case& c : cases()) run(c, {kFp32}, false);
}
TEST(matmul, f64_obeys_the_bound_of_a_dot_product_for_odd_sizes_strides_and_transposes) {
  for (const Case& c : cases()) run(c, {kFp64}, false);
}
TEST(matmul, bf16_products_round_both_operands_and_nothing_else) {
  // dpbf16 adds pairs with an additional rounding per pair; gamma counts a rounding per term and covers these.
  for (const Case& c : cases()) run(c, {kBf16, kBf16Tiles}, false);
}
TEST(matmul, small_integers_are_exact) {
  for (const Case& c : cases()) run(c, {kBf16, kBf16Tiles, kFp32, kFp64}, true);
}

TEST(matmul, every_cpu_level_agrees) {
  const CpuLevel before = cpu_level();
  for (CpuLevel level : {CpuLevel::baseline, CpuLevel::avx512, CpuLevel::avx512_bf16, CpuLevel::avx512_amx}) {
    if (level > cpu_level_available()) continue;
    set_cpu_level(level);
    for (const Case& c :
         {Case{65, 47, 129}, Case{29, 129, 340, true}, Case{31, 33, 7, false, true}, Case{70, 80, 650, true, true}})
      for (const Way& way : {kFp32, kBf16})
        for (bool integers : {false, true}) run(c, {way}, integers);
  }
  set_cpu_level(before);
}

TEST(matmul, large_products_cut_into_several_chunks_are_exact_on_integers) {
  for (const Case& c :
       {Case{17, 600, 2101}, Case{9, 40, 27000, true}, Case{34, 40, 9000, true}, Case{10, 1600, 700, false, true},
        Case{50, 90, 2200, true, true, 1, 1}, Case{33, 530, 2100, false, true, -0.5, 2, 3}})
    run(c, {kFp32, kBf16, kBf16Tiles}, true);
}

// Where both operands lie across the sum, some CPUs read one or both operands in place, by the width and stride of b.
TEST(matmul, weight_gradients_of_every_kind_of_width_are_exact_on_integers) {
  for (const Case& c : {Case{75, 48, 2101, true}, Case{65, 32, 600, true, false, 2, 1}, Case{29, 600, 700, true},
                        Case{97, 80, 129, true, false, 1, 1}, Case{28, 512, 300, true, false, 1, 1, 0}})
    run(c, {kFp32, kBf16, kBf16Tiles}, true);
}

// Elements of a tile beyond the matrix are zero, and must stay without effect.
TEST(matmul, a_nan_or_an_infinity_stays_in_its_row_and_column) {
  as_is_and_by_emulated_tiles([] {
    for (bool transposed : {false, true})
      for (const float bad : {std::nanf(""), INFINITY}) {
        const int64_t m = 37, n = 21, k = 45;
        const Buffer a = matrix(DType::f32, transposed ? k : m, transposed ? m : k, 3, 1),
                     b = matrix(DType::f32, transposed ? n : k, transposed ? k : n, 5, 2);
        auto v = values(a), w = values(b);
        v[size_t(transposed ? 44 * m + 36 : 36 * k + 44)] = bad;
        w[size_t(transposed ? 20 * k + 44 : 44 * n + 20)] = bad;
        assign(a, v);
        assign(b, w);
        Buffer y(DType::f32, {m, n});
        matmul(
            {.a = a, .b = b, .c = y, .transpose_a = transposed, .transpose_b = transposed, .products = Products::bf16},
            {});
        const auto got = values(y);
        for (int64_t i = 0; i < m; ++i)
          for (int64_t j = 0; j < n; ++j)
            EXPECT_EQ(std::isfinite(got[size_t(i * n + j)]), i != 36 && j != 20) << i << ", " << j;
      }
  });
}

void expect_same_bits_with_any_threads(Products products) {
  const int before = thread_count();
  for (const Case& c : {Case{129, 65, 700}, Case{128, 128, 768, true}, Case{3, 700, 500, false, true},
                        Case{300, 70, 130, false, true}, Case{200, 140, 2100, true}}) {
    const Buffer a = matrix(DType::f32, c.transpose_a ? c.k : c.m, c.transpose_a ? c.m : c.k, 0, 1);
    const Buffer b = matrix(DType::f32, c.transpose_b ? c.n : c.k, c.transpose_b ? c.k : c.n, 0, 2);
    std::vector<double> first;
    for (int threads : {1, 2, 3}) {
      set_thread_count(threads);
      Buffer y(DType::f32, {c.m, c.n});
      matmul({.a = a, .b = b, .c = y, .transpose_a = c.transpose_a, .transpose_b = c.transpose_b, .products = products},
             {});
      if (threads == 1) first = values(y);
      EXPECT_EQ(values(y), first) << c << " with " << threads << " threads";
    }
  }
  set_thread_count(before);
}
TEST(matmul, the_number_of_threads_changes_no_bit) {
  expect_same_bits_with_any_threads(Products::fp32);
  as_is_and_by_emulated_tiles([] { expect_same_bits_with_any_threads(Products::bf16); });
}

TEST(matmul, a_symmetric_result_is_mirrored_and_equals_the_full_product) {
  for (DType dtype : {DType::f32, DType::f64})
    for (int64_t n : {1, 5, 31, 64, 130, 257}) {
      const Buffer x = matrix(dtype, n, 77, 3, 9);
      Buffer whole(dtype, {n, n}), half(dtype, {n, n}, n + 3);
      matmul({.a = x, .b = x, .c = whole, .transpose_b = true}, {});
      matmul({.a = x, .b = x, .c = half, .transpose_b = true, .symmetric = true}, {});
      const auto got = values(half);
      EXPECT_TRUE(half.guards_intact());
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < n; ++j) EXPECT_EQ(got[size_t(i * n + j)], got[size_t(j * n + i)]);
      EXPECT_TRUE(testing::compare(half, values(whole), 77 * testing::roundoff(dtype) * 77 * 4, 0).ok);
    }
}
TEST(matmul, by_tiles_a_symmetric_result_has_the_bits_of_the_full_product) {
  as_is_and_by_emulated_tiles([] {
    for (int64_t n : {9, 31, 64, 130, 257}) {
      const Buffer x = matrix(DType::f32, n, 77, 3, 9);
      Buffer whole(DType::f32, {n, n}), half(DType::f32, {n, n}, n + 3);
      matmul({.a = x, .b = x, .c = whole, .transpose_b = true, .products = Products::bf16}, {});
      matmul({.a = x, .b = x, .c = half, .transpose_b = true, .products = Products::bf16, .symmetric = true}, {});
      EXPECT_TRUE(half.guards_intact());
      EXPECT_EQ(values(half), values(whole)) << n;
    }
  });
}

// The rows of a matrix lie between rows of its neighbours, as heads and tokens of segments do.
TEST(matmul, each_of_a_batch_has_the_bits_of_its_own_product) {
  for (const DType dtype : {DType::f32, DType::f64})
    for (const bool transposed : {false, true}) {
      const int64_t count = 3, m = 21, n = 34, k = 13;
      const Buffer a = matrix(dtype, count * (transposed ? k : m), transposed ? m : k, 2, 1);
      const Buffer b = matrix(dtype, transposed ? n : k, count * (transposed ? k : n), 0, 2);
      Buffer together(dtype, {count * m, n}, n + 5), alone(dtype, {count * m, n}, n + 5);
      testing::fill_normal(together, 3);
      testing::fill_normal(alone, 3);
      const auto stacked = [&](const Tensor& t) {
        Tensor v = t;
        v.shape = {count, t.rows() / count, t.cols()};
        v.stride[2] = 1, v.stride[1] = t.row_stride(), v.stride[0] = v.size(1) * t.row_stride();
        return v;
      };
      const auto side_by_side = [&](const Tensor& t) {
        Tensor v = t;
        v.shape = {count, t.rows(), t.cols() / count};
        v.stride[2] = 1, v.stride[1] = t.row_stride(), v.stride[0] = v.size(2);
        return v;
      };
      MatMul all{.a = stacked(a),
                 .b = side_by_side(b),
                 .c = stacked(together),
                 .transpose_a = transposed,
                 .transpose_b = transposed,
                 .alpha = 0.5,
                 .beta = 1};
      matmul_each(all, {});
      for (int64_t i = 0; i < count; ++i) {
        MatMul one = all;
        one.a = all.a.row(i), one.b = all.b.row(i), one.c = stacked(alone).row(i);
        matmul(one, {});
      }
      EXPECT_EQ(values(together), values(alone));
      EXPECT_TRUE(together.guards_intact());
      // The same matrix is added to each product.
      all.add = stacked(alone).row(0);
      all.c = stacked(together);
      std::vector<double> expected;
      Buffer result(dtype, all.add.shape);
      for (int64_t i = 0; i < count; ++i) {
        MatMul one = all;
        one.a = all.a.row(i), one.b = all.b.row(i), one.c = result;
        matmul(one, {});
        const auto some = values(result);
        expected.insert(expected.end(), some.begin(), some.end());
      }
      matmul_each(all, {});
      EXPECT_EQ(values(together), expected);
    }
}

TEST(matmul, add_is_read_in_place_of_c_and_may_be_an_operand) {
  const Buffer a = matrix(DType::f64, 40, 40, 0, 1), b = matrix(DType::f64, 40, 40, 0, 2);
  Buffer y(DType::f64, {40, 40}), want(DType::f64, {40, 40});
  matmul({.a = a, .b = b, .c = y, .alpha = 2, .beta = -3, .add = b}, {});
  matmul_plain({.a = a, .b = b, .c = want, .alpha = 2, .beta = -3, .add = b});
  EXPECT_TRUE(testing::compare(y, values(want), 1e-12, 0).ok);
}

// --- linear

struct Layer {
  int64_t t, n, k;
  int64_t pad = 0;
};
const std::vector<Layer> kLayers = {{0, 5, 7},       {1, 33, 65, 2},   {2, 1, 3},    {7, 65, 31},
                                    {9, 17, 129, 1}, {65, 130, 63, 3}, {130, 31, 64}};

TEST(linear, every_activation_bias_and_pre_follow_the_product) {
  for_each_activation([&](auto f) {
    using F = decltype(f);
    const Act act = activation_named(F::name);
    for (const Layer& s : kLayers)
      for (bool keep_pre : {false, true}) {
        const Buffer x = matrix(DType::f64, s.t, s.k, s.pad, 1),
                     w = matrix(DType::f64, s.n, s.k, s.pad, 2, 1 / std::sqrt(double(s.k)));
        const Buffer b = matrix(DType::f64, 1, s.n, 0, 3);
        Buffer y(DType::f64, {s.t, s.n}, s.n + s.pad), pre(DType::f64, {s.t, s.n}, s.n + 2 * s.pad),
            want(DType::f64, {s.t, s.n});
        linear({.x = x,
                .w = w,
                .b = b.tensor().row(0),
                .y = y,
                .pre = keep_pre ? pre.tensor() : Tensor(),
                .act = act,
                .alpha = 0.7},
               {});
        matmul_plain({.a = x, .b = w, .c = want, .transpose_b = true, .alpha = 0.7});
        auto before = values(want), bias = values(b), after = before;
        for (size_t i = 0; i < before.size(); ++i) {
          before[i] += bias[i % size_t(s.n)];
          after[i] = F::value(before[i]);
        }
        // The product's own error is below 1e-13 at these lengths; activations amplify it by |slope| < 20.
        EXPECT_TRUE(testing::compare(y, after, 1e-11, 1e-11).ok)
            << F::name << testing::compare(y, after, 1e-11, 1e-11).message;
        if (keep_pre) { EXPECT_TRUE(testing::compare(pre, before, 1e-12, 1e-12).ok) << F::name; }
        EXPECT_TRUE(y.guards_intact() && pre.guards_intact());
      }
  });
}

// Sizes with a single chunk and with several, both ways, an odd sum, a last panel of dot products, few rows, a stride.
void expect_packed_weights_change_no_bit(DType dtype, Products products) {
  struct Case {
    int64_t t, n, k, gap;
  };
  for (const Case& c : {Case{40, 65, 33, 0}, {9, 16, 1, 3}, {3, 40, 20, 0}, {30, 5000, 300, 1}, {20, 40, 4501, 0}}) {
    const Buffer x = matrix(dtype, c.t, c.k, 0, 1), w = matrix(dtype, c.n, c.k, c.gap, 2);
    Buffer y(dtype, {c.t, c.n}), want(dtype, {c.t, c.n});
    Buffer packed(DType::u8, {linear_packed_bytes(w, products)});
    linear({.x = x, .w = w, .y = want, .products = products}, {});
    linear_pack({.w = w, .packed = packed, .products = products});
    linear({.x = x, .w = w, .y = y, .products = products, .w_packed = packed}, {});
    EXPECT_EQ(values(y), values(want)) << c.t << " x " << c.n << " x " << c.k;
    EXPECT_TRUE(packed.guards_intact());
    if (c.t <= 8) continue;
    // w is not read where w_packed is given.
    Buffer gone(dtype, {c.n, c.k}, c.k + c.gap);
    y.poison();
    linear({.x = x, .w = gone, .y = y, .products = products, .w_packed = packed}, {});
    EXPECT_EQ(values(y), values(want));
  }
}
TEST(linear, weights_packed_before_change_no_bit) {
  expect_packed_weights_change_no_bit(DType::f64, Products::fp32);
  expect_packed_weights_change_no_bit(DType::f32, Products::fp32);
  as_is_and_by_emulated_tiles([] { expect_packed_weights_change_no_bit(DType::f32, Products::bf16); });
}

TEST(linear, accumulate_adds_to_y) {
  for (const Layer& s : kLayers) {
    const Buffer x = matrix(DType::f64, s.t, s.k, s.pad, 1), w = matrix(DType::f64, s.n, s.k, s.pad, 2),
                 y = matrix(DType::f64, s.t, s.n, s.pad, 3);
    Buffer want(DType::f64, {s.t, s.n});
    matmul_plain({.a = x, .b = w, .c = want, .transpose_b = true, .beta = 1, .add = y});
    linear({.x = x, .w = w, .y = y, .accumulate = true}, {});
    EXPECT_TRUE(testing::compare(y, values(want), 1e-11, 1e-11).ok);
  }
}

TEST(linear, gradients_match_finite_differences) {
  for (const Layer& s : kLayers) {
    if (s.t == 0) continue;
    for_each_activation([&](auto f) {
      using F = decltype(f);
      if (F::name != std::string_view("leaky_relu_squared") && F::name != std::string_view("silu")) return;
      const Act act = activation_named(F::name);
      // x = f(pre), y = x W^T + b: the backward pass of the second layer goes through the first one's activation.
      const Buffer pre = matrix(DType::f64, s.t, s.k, s.pad, 1), w = matrix(DType::f64, s.n, s.k, s.pad, 2),
                   b = matrix(DType::f64, 1, s.n, 0, 3);
      const Buffer dy = matrix(DType::f64, s.t, s.n, s.pad, 4), x = matrix(DType::f64, s.t, s.k, 0, 5);
      Buffer y(DType::f64, {s.t, s.n}), dpre(DType::f64, {s.t, s.k}, s.k + s.pad),
          dw = matrix(DType::f64, s.n, s.k, s.pad, 6), db(DType::f64, {1, s.n});
      const auto loss = [&] {
        activate({.act = act, .x = pre, .y = x}, {});
        linear({.x = x, .w = w, .b = b.tensor().row(0), .y = y}, {});
        return testing::dot(y, dy);
      };
      loss();
      fill_zero(dw);
      fill_zero(db);
      linear_backward(
          {.dy = dy, .x = x, .w = w, .dx = dpre, .dw = dw, .db = db.tensor().row(0), .pre = pre, .act = act}, {});
      EXPECT_LT(testing::gradient_error(loss, pre, dpre, 1), 1e-6);
      EXPECT_LT(testing::gradient_error(loss, w, dw, 2), 1e-6);
      EXPECT_LT(testing::gradient_error(loss, b, db, 3), 1e-6);
      EXPECT_TRUE(dpre.guards_intact() && dw.guards_intact() && db.guards_intact());
    });
  }
}

TEST(linear, backward_recomputes_x_where_x_was_not_kept) {
  const Act act = activation_named("gelu");
  for (const Layer& s : kLayers)
    for (const DType dtype : {DType::f32, DType::f64})
      for (const int way : {0, 1, 2}) {  // slopes computed beside values; added to dx; without dx
        const Buffer w = matrix(dtype, s.n, s.k, 0, 2), dy = matrix(dtype, s.t, s.n, 1, 4),
                     pre = matrix(dtype, s.t, s.k, s.pad, 5);
        Buffer kept(dtype, {s.t, s.k}, s.k + s.pad), formed(dtype, {s.t, s.k}, s.k + 1), want(dtype, {s.t, s.k}),
            dx(dtype, {s.t, s.k}), dw_want(dtype, {s.n, s.k}), dw(dtype, {s.n, s.k});
        for (const Buffer* t : {&want, &dx, &dw_want, &dw}) fill_zero(*t);
        activate({.act = act, .x = pre, .y = kept}, {});
        LinearBackward b{
            .dy = dy, .x = kept, .w = w, .dx = want, .dw = dw_want, .pre = pre, .act = act, .accumulate_dx = way == 1};
        if (way == 2) b.dx = Tensor();
        linear_backward(b, {});
        b.x = formed;
        b.dw = dw;
        b.form_x = true;
        if (way != 2) b.dx = dx;
        linear_backward(b, {});
        EXPECT_EQ(values(formed), values(kept));
        EXPECT_EQ(values(dw), values(dw_want));
        // A slope formed beside its value may differ by roundings of its terms, times a sum of s.n products.
        const double ulps = dtype == DType::f32 ? 0x1p-22 : 0x1p-51;
        const auto same = testing::compare(dx, values(want), ulps * std::sqrt(double(s.n)) * 4, ulps);
        EXPECT_TRUE(same.ok) << same.message;
        EXPECT_TRUE(formed.guards_intact() && dx.guards_intact() && dw.guards_intact());
      }
}

// The signs kept beside x serve as pre does, in every way a product is cut; x is linear's result, in the same memory.
TEST(linear, signs_serve_in_place_of_pre) {
  for (DType dtype : {DType::f32, DType::f64})
    for (Act act : {act_of<LeakyReluSquared>, act_of<ReluSquared>})
      for (const auto& [t, n, k] : {std::array<int64_t, 3>{1, 5, 3}, {7, 64, 33}, {200, 300, 130}, {0, 8, 8}}) {
        SCOPED_TRACE(::testing::Message() << dtype << ' ' << name_of(act) << ' ' << t << "x" << n << "x" << k);
        const Buffer x = matrix(dtype, t, k, 2, 1), w1 = matrix(dtype, n, k, 0, 2), w2 = matrix(dtype, k, n, 1, 3),
                     dy = matrix(dtype, t, k, 0, 4), b = matrix(dtype, 1, n, 0, 5);
        const Buffer pre(dtype, {t, n}), kept(dtype, {t, n}, n + 3), plain(dtype, {t, n}), dx(dtype, {t, n}, n + 1),
            want(dtype, {t, n}), signs(DType::u8, {linear_sign_bytes(t, n, {})});
        const Tensor bias = b.tensor().row(0);
        linear({.x = x, .w = w1, .b = bias, .y = plain, .pre = pre, .act = act}, {});
        linear({.x = x, .w = w1, .b = bias, .y = kept, .signs = signs, .act = act}, {});
        EXPECT_EQ(values(kept), values(plain));
        linear_backward({.dy = dy, .w = w2, .dx = want, .pre = pre, .act = act}, {});
        linear_backward({.dy = dy, .x = kept, .w = w2, .dx = dx, .signs = signs, .act = act}, {});
        EXPECT_TRUE(kept.guards_intact() && dx.guards_intact());
        // The root of a rounded square, and a product more: 3 roundings in all.
        const std::vector<double> got = values(dx), expected = values(want);
        for (size_t i = 0; i < got.size(); ++i)
          ASSERT_NEAR(got[i], expected[i], 4 * testing::roundoff(dtype) * std::fabs(expected[i])) << i;
      }
}

TEST(linear, backward_accumulates_parameters_always_and_dx_when_asked) {
  for (const Layer& s : kLayers)
    for (bool sloped : {false, true}) {
      const Buffer x = matrix(DType::f64, s.t, s.k, 0, 1), w = matrix(DType::f64, s.n, s.k, 0, 2),
                   dy = matrix(DType::f64, s.t, s.n, 1, 4);
      const Buffer pre = matrix(DType::f64, s.t, s.k, 0, 5);
      Buffer dx(DType::f64, {s.t, s.k}), twice(DType::f64, {s.t, s.k}), dw(DType::f64, {s.n, s.k}),
          db(DType::f64, {s.n});
      LinearBackward once{.dy = dy, .x = x, .w = w, .dx = dx, .act = sloped ? activation_named("silu") : Act::identity};
      if (sloped) once.pre = pre;
      linear_backward(once, {});
      fill_zero(dw);
      fill_zero(db);
      fill_zero(twice);
      LinearBackward again = once;
      again.dx = twice;
      again.dw = dw;
      again.db = db;
      again.accumulate_dx = true;
      linear_backward(again, {});
      linear_backward(again, {});
      auto want = values(dx);
      for (double& v : want) v *= 2;
      EXPECT_TRUE(testing::compare(twice, want, 1e-13, 1e-13).ok)
          << testing::compare(twice, want, 1e-13, 1e-13).message;
      Buffer dw_want(DType::f64, {s.n, s.k});
      matmul_plain({.a = dy, .b = x, .c = dw_want, .transpose_a = true, .alpha = 2});
      EXPECT_TRUE(testing::compare(dw, values(dw_want), 1e-11, 1e-11).ok);
    }
}

void expect_a_layer_with_threads_is_bitwise_the_same(Products products) {
  const int before = thread_count();
  const int64_t t = 150, n = 70, k = 90;
  const Buffer x = matrix(DType::f32, t, k, 0, 1), w = matrix(DType::f32, n, k, 0, 2, 0.1),
               dy = matrix(DType::f32, t, n, 0, 3), pre = matrix(DType::f32, t, k, 0, 4);
  std::vector<double> first;
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    Buffer y(DType::f32, {t, n}), dx(DType::f32, {t, k}), dw(DType::f32, {n, k}), db(DType::f32, {n});
    fill_zero(dw);
    fill_zero(db);
    linear({.x = x, .w = w, .y = y, .act = activation_named("gelu"), .products = products}, {});
    linear_backward({.dy = dy,
                     .x = x,
                     .w = w,
                     .dx = dx,
                     .dw = dw,
                     .db = db,
                     .pre = pre,
                     .act = activation_named("gelu"),
                     .products = products},
                    {});
    std::vector<double> all = values(y);
    for (const Buffer* b : {&dx, &dw, &db}) {
      const auto v = values(*b);
      all.insert(all.end(), v.begin(), v.end());
    }
    if (threads == 1) first = all;
    EXPECT_EQ(all, first) << threads << " threads";
    // db against fp64: t terms, |sum| of at most t * max|dy|.
    const auto d = values(dy), got = values(db);
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0, scale = 0;
      for (int64_t i = 0; i < t; ++i) {
        sum += d[size_t(i * n + j)];
        scale += std::abs(d[size_t(i * n + j)]);
      }
      EXPECT_LE(std::abs(got[size_t(j)] - sum), double(t) * 0x1p-24 * scale);
    }
  }
  set_thread_count(before);
}
TEST(linear, f32_with_threads_is_bitwise_the_same_and_close_to_f64) {
  expect_a_layer_with_threads_is_bitwise_the_same(Products::fp32);
  as_is_and_by_emulated_tiles([] { expect_a_layer_with_threads_is_bitwise_the_same(Products::bf16); });
}

// Integers: every order of sums is exact, so both ways must agree to the bit, with every option of a layer.
TEST(linear, by_tiles_a_bias_accumulation_an_activation_and_gradients_are_exact_on_integers) {
  for (const Layer& s : {Layer{70, 65, 33, 2}, Layer{130, 31, 64}, Layer{33, 600, 40, 1}, Layer{96, 64, 64}}) {
    const Buffer x = matrix(DType::f32, s.t, s.k, s.pad, 1), w = matrix(DType::f32, s.n, s.k, s.pad, 2),
                 b = matrix(DType::f32, 1, s.n, 0, 3), dy = matrix(DType::f32, s.t, s.n, s.pad, 4),
                 pre = matrix(DType::f32, s.t, s.k, s.pad, 5);
    for (const Buffer* t : {&x, &w, &b, &dy, &pre}) fill_small_integers(*t, 7);
    std::vector<double> first;
    as_is_and_by_emulated_tiles([&] {
      Buffer y(DType::f32, {s.t, s.n}, s.n + s.pad), kept(DType::f32, {s.t, s.n}), sum(DType::f32, {s.t, s.n}, s.n + 3),
          dx(DType::f32, {s.t, s.k}, s.k + 1), more(DType::f32, {s.t, s.k}), dw(DType::f32, {s.n, s.k});
      for (const Buffer* t : {&sum, &more, &dw}) fill_small_integers(*t, 8);
      const Tensor bias = b.tensor().row(0);
      const Act relu = activation_named("relu");
      linear({.x = x, .w = w, .b = bias, .y = y, .pre = kept, .act = relu, .products = Products::bf16}, {});
      linear({.x = x, .w = w, .y = sum, .alpha = 2, .accumulate = true, .products = Products::bf16}, {});
      linear_backward(
          {.dy = dy, .x = x, .w = w, .dx = dx, .dw = dw, .pre = pre, .act = relu, .products = Products::bf16}, {});
      linear_backward({.dy = dy, .w = w, .dx = more, .accumulate_dx = true, .products = Products::bf16}, {});
      std::vector<double> all;
      for (const Buffer* t : {&y, &kept, &sum, &dx, &more, &dw}) {
        EXPECT_TRUE(t->guards_intact());
        const auto v = values(*t);
        all.insert(all.end(), v.begin(), v.end());
      }
      if (first.empty()) first = all;
      EXPECT_EQ(all, first);
    });
  }
}

template <class Call> std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) { return e.what(); }
  return "";
}

TEST(linear, errors_name_the_found_and_the_expected_value) {
  const Buffer x = matrix(DType::f32, 4, 8, 0, 1), w = matrix(DType::f32, 5, 9, 0, 2),
               ok = matrix(DType::f32, 5, 8, 0, 2);
  Buffer y(DType::f32, {4, 5}), wide(DType::f64, {4, 5});
  EXPECT_EQ(message_of([&] { linear({.x = x, .w = w, .y = y}, {}); }), "linear: w: found (5, 9), expected 5 rows of 8");
  EXPECT_EQ(message_of([&] { matmul_each({.a = x, .b = w, .c = y}, {}); }),
            "matmul_each: a: found shape (4, 8), expected rank 3 and as many matrices as a of shape (4, 8)");
  EXPECT_EQ(message_of([&] { linear({.x = x, .w = ok, .y = wide}, {}); }), "linear: y: found dtype f64, expected f32");
  EXPECT_NE(message_of([&] {
              linear({.x = x, .w = ok, .y = y, .act = activation_named("relu"), .accumulate = true}, {});
            }).find("accumulate"),
            std::string::npos);
  EXPECT_NE(message_of([&] { matmul({.a = x, .b = ok, .c = y}, {}); }).find("found (5, 8), expected 8 rows of"),
            std::string::npos);
  Tensor gpu = x;
  gpu.device = {Device::cuda, 0};
  EXPECT_NE(message_of([&] { linear({.x = gpu, .w = ok, .y = y}, {}); }).find("expected cuda:0"), std::string::npos);
}

TEST(linear, signs_are_refused_where_they_do_not_determine_the_slope) {
  const Buffer x(DType::f32, {4, 8}), w(DType::f32, {8, 8}), y(DType::f32, {4, 8}), h(DType::f16, {4, 8}),
      hw(DType::f16, {8, 8}), signs(DType::u8, {32}), few(DType::u8, {31});
  const Act act = act_of<ReluSquared>;
  EXPECT_EQ(message_of([&] { linear({.x = x, .w = w, .y = y, .signs = signs, .act = act_of<Gelu>}, {}); }),
            "linear: found signs with gelu, expected leaky_relu_squared or relu_squared");
  EXPECT_EQ(message_of([&] { linear({.x = x, .w = w, .y = y, .signs = few, .act = act}, {}); }),
            "linear: signs: found (31) of u8, expected 32 contiguous bytes");
  EXPECT_EQ(message_of([&] { linear({.x = h, .w = hw, .y = h, .signs = signs, .act = act}, {}); }),
            "linear: found signs with f16, whose squares underflow; expected pre");
  EXPECT_EQ(message_of([&] { linear_backward({.dy = y, .w = w, .dx = x, .signs = signs, .act = act}, {}); }),
            "linear_backward: found signs with no x, expected x and none of the others");
  EXPECT_EQ(message_of(
                [&] { linear_backward({.dy = y, .x = x, .w = w, .dx = x, .pre = x, .signs = signs, .act = act}, {}); }),
            "linear_backward: found signs with pre, expected x and none of the others");
}

TEST(linear, operands_on_different_devices_are_refused) {
  using F = Linear;
  using B = LinearBackward;
  const Buffer x = matrix(DType::f32, 4, 8, 0, 1), w = matrix(DType::f32, 5, 8, 0, 2);
  Buffer y(DType::f32, {4, 5}), b(DType::f32, {5}), packed(DType::u8, {linear_packed_bytes(w, Products::fp32)});
  linear_pack({.w = w, .packed = packed});
  const F a{.x = x, .w = w, .b = b, .y = y, .pre = y, .w_packed = packed};
  EXPECT_EQ(testing::device_not_checked(a, {&F::x, &F::w, &F::b, &F::y, &F::pre, &F::w_packed}, linear), "");
  const B back{.dy = y, .x = x, .w = w, .dx = x, .dw = w, .db = b, .pre = x};
  EXPECT_EQ(testing::device_not_checked(back, {&B::dy, &B::x, &B::w, &B::dx, &B::dw, &B::db, &B::pre}, linear_backward),
            "");
}

TEST(MatMul, ABiasIsAddedToEveryRow) {
  for (bool transpose_a : {false, true})
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{3, 5, 7}, {70, 130, 300}, {4, 6, 0}}) {
      const Buffer a = matrix(DType::f64, transpose_a ? k : m, transpose_a ? m : k, 1, 1),
                   b = matrix(DType::f64, k, n, 2, 2);
      const Buffer bias = matrix(DType::f64, 1, n, 0, 3), c = matrix(DType::f64, m, n, 3, 4),
                   want = matrix(DType::f64, m, n, 0, 4);
      const Tensor vector(bias.tensor().data, DType::f64, {n});
      matmul_plain({.a = a, .b = b, .c = want, .transpose_a = transpose_a, .alpha = 2, .beta = 0.5});
      matmul({.a = a, .b = b, .c = c, .transpose_a = transpose_a, .alpha = 2, .beta = 0.5, .bias = vector}, {});
      const auto got = values(c), plain = values(want), added = values(bias);
      for (size_t i = 0; i < got.size(); ++i)
        ASSERT_NEAR(got[i], plain[i] + added[i % size_t(n)], 1e-12 * double(k + 1)) << i;
    }
}

}  // namespace
}  // namespace ingot
