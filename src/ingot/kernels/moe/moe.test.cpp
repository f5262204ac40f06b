#include "ingot/kernels/moe/moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "ingot/kernels/quant/e4m3_blocks.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::assign;
using testing::Buffer;
using testing::error_of;
using testing::fill_normal;
using testing::values;

// Softmax over the chosen experts, or over all.
void check_route(bool renormalise) {
  for (DType dtype : {DType::f32, DType::f64})
    for (const auto& [tokens, E, k] :
         std::vector<std::array<int64_t, 3>>{{0, 4, 2}, {1, 1, 1}, {5, 8, 8}, {70, 128, 4}}) {
      Buffer logits(dtype, {tokens, E}), weights(dtype, {tokens, k}), chosen(DType::i32, {tokens, k});
      fill_normal(logits, 1, 2);
      route({.logits = logits, .experts = chosen, .weights = weights, .renormalise = renormalise}, {});
      const auto l = values(logits);
      std::vector<double> want;
      for (int64_t t = 0; t < tokens; ++t) {
        std::vector<int64_t> order(static_cast<size_t>(E));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t b) { return l[size_t(t * E + a)] > l[size_t(t * E + b)]; });
        double sum = 0;
        for (int64_t i = 0; i < (renormalise ? k : E); ++i) sum += std::exp(l[size_t(t * E + order[size_t(i)])]);
        for (int64_t i = 0; i < k; ++i) {
          EXPECT_EQ(chosen.tensor().ptr<int32_t>()[t * k + i], order[size_t(i)]);
          want.push_back(std::exp(l[size_t(t * E + order[size_t(i)])]) / sum);
        }
      }
      // Difference, exponential and quotient round once each, and the sum once for each of its terms.
      const double terms = double(renormalise ? k : E);
      const auto result = testing::compare(weights, want, 1e-30, (8 + terms) * testing::roundoff(dtype));
      EXPECT_TRUE(result.ok) << result.message;
      EXPECT_TRUE(weights.guards_intact() && chosen.guards_intact());
    }
}

TEST(route, takes_the_largest_logits_in_order_with_softmax_weights_over_the_chosen) { check_route(true); }
TEST(route, takes_the_largest_logits_in_order_with_softmax_weights_over_all) { check_route(false); }

TEST(route, equal_logits_go_to_the_lower_expert_and_nan_never_leads_out_of_range) {
  float logits[2][4] = {{1, 3, 3, 1}, {NAN, NAN, NAN, NAN}}, weights[2][3];
  int32_t chosen[2][3];
  route({.logits = Tensor(logits[0], {2, 4}),
         .experts = Tensor(chosen[0], {2, 3}),
         .weights = Tensor(weights[0], {2, 3})},
        {});
  EXPECT_EQ(chosen[0][0], 1);
  EXPECT_EQ(chosen[0][1], 2);
  EXPECT_EQ(chosen[0][2], 0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(chosen[1][i] >= 0 && chosen[1][i] < 4);
    EXPECT_TRUE(std::isnan(weights[1][i]));
  }
}

// A mixture: f32 operands and weights in a format, and the same numbers in f64 for the oracle.
struct Mixture {
  int64_t T, E, k, C, H;
  Buffer gu_data, gu_scales, down_data, down_scales, x, b_gu, b_down, weights, chosen, y;
  WeightMatrix gate_up, down;
  GateOptions options{.limit = 2, .alpha = 1.702, .up_offset = 1};

  Mixture(WeightFormat f, int64_t t, int64_t e, int64_t per, int64_t c, int64_t h)
      : T(t),
        E(e),
        k(per),
        C(c),
        H(h),
        gu_data(type(f), bank(f, e, 2 * h, c)),
        gu_scales(DType::u8, {e, 2 * h, c / 32}),
        down_data(type(f), bank(f, e, c, h)),
        down_scales(DType::u8, {e, c, h / 32}),
        x(DType::f32, {t, c}),
        b_gu(DType::f32, {e, 2 * h}),
        b_down(DType::f32, {e, c}),
        weights(DType::f32, {t, per}),
        chosen(DType::i32, {t, per}),
        y(DType::f32, {t, c}),
        gate_up(f, gu_data, f == WeightFormat::mxfp4 ? gu_scales.tensor() : Tensor()),
        down(f, down_data, f == WeightFormat::mxfp4 ? down_scales.tensor() : Tensor()) {
    fill(gate_up, 2 * H, C, 10);
    fill(down, C, H, 20);
    fill_normal(x, 1);
    fill_normal(b_gu, 2, 0.5);
    fill_normal(b_down, 3, 0.5);
    Buffer logits(DType::f32, {T, E});
    fill_normal(logits, 4, 1.5);
    for (int64_t i = 0; i < T / 2; ++i) logits.tensor().ptr<float>()[i * E] += 20;  // half of the tokens want expert 0
    route({.logits = logits, .experts = chosen, .weights = weights}, {});
  }
  static DType type(WeightFormat f) {
    return f == WeightFormat::mxfp4 ? DType::u8 : f == WeightFormat::bf16 ? DType::bf16 : DType::f32;
  }
  static Shape bank(WeightFormat f, int64_t e, int64_t rows, int64_t cols) {
    return f == WeightFormat::mxfp4 ? Shape{e, rows, cols / 32, 16} : Shape{e, rows, cols};
  }
  void fill(const WeightMatrix& w, int64_t rows, int64_t cols, uint64_t seed) const {
    Buffer numbers(DType::f32, {rows, cols});
    for (int64_t e = 0; e < E; ++e) {
      fill_normal(numbers, seed + uint64_t(e), 1.5 / std::sqrt(double(cols)));
      quantise(numbers, w.at(e), {});
    }
  }
  Experts arguments(const Tensor& workspace) const {
    return {.x = x,
            .experts = chosen,
            .weights = weights,
            .gate_up = gate_up,
            .b_gate_up = b_gu,
            .down = down,
            .b_down = b_down,
            .y = y,
            .workspace = workspace,
            .options = options};
  }
  int64_t workspace_bytes(DType t) const { return experts_workspace_bytes(T, k, E, C, H, t, {}); }
  // The formula, token by token, in fp64.
  std::vector<double> expected(bool bias, bool rounded = false) const {
    std::vector<double> out(size_t(T * C), 0);
    auto xs = values(x);
    for (int64_t t = 0; rounded && t < T; ++t) round_to_e4m3_blocks(&xs[size_t(t * C)], C);
    const auto bg = values(b_gu), bd = values(b_down), ws = values(weights);
    for (int64_t e = 0; e < E; ++e) {
      Buffer wide_gu(DType::f64, {2 * H, C}), wide_down(DType::f64, {C, H});
      dequantise(gate_up.at(e), wide_gu, {});
      dequantise(down.at(e), wide_down, {});
      const double *gu = wide_gu.tensor().ptr<double>(), *dn = wide_down.tensor().ptr<double>();
      for (int64_t s = 0; s < T * k; ++s) {
        if (chosen.tensor().ptr<int32_t>()[s] != e) continue;
        std::vector<double> h(static_cast<size_t>(H));
        for (int64_t j = 0; j < H; ++j) {
          double g = bias ? bg[size_t(e * 2 * H + 2 * j)] : 0, u = bias ? bg[size_t(e * 2 * H + 2 * j + 1)] : 0;
          for (int64_t c = 0; c < C; ++c) {
            g += gu[2 * j * C + c] * xs[size_t(s / k * C + c)];
            u += gu[(2 * j + 1) * C + c] * xs[size_t(s / k * C + c)];
          }
          g = std::min(g, options.limit);
          u = std::max(-options.limit, std::min(u, options.limit));
          h[size_t(j)] = g / (1 + std::exp(-options.alpha * g)) * (u + options.up_offset);
        }
        if (rounded) round_to_e4m3_blocks(h.data(), H);
        for (int64_t c = 0; c < C; ++c) {
          double sum = bias ? bd[size_t(e * C + c)] : 0;
          for (int64_t j = 0; j < H; ++j) sum += dn[c * H + j] * h[size_t(j)];
          out[size_t(s / k * C + c)] += ws[size_t(s)] * sum;
        }
      }
    }
    return out;
  }
};

TEST(experts, follow_the_formula_in_every_weight_format) {
  for (WeightFormat f : {WeightFormat::f32, WeightFormat::bf16, WeightFormat::mxfp4})
    for (const auto& [T, E, k, C, H] : std::vector<std::array<int64_t, 5>>{
             {0, 2, 1, 32, 32}, {1, 4, 2, 64, 32}, {3, 1, 1, 32, 64}, {29, 5, 3, 32, 96}})
      for (bool bias : {true, false}) {
        const Mixture m(f, T, E, k, C, H);
        Buffer workspace(DType::u8, {m.workspace_bytes(DType::f32)});
        Experts a = m.arguments(workspace);
        if (!bias) a.b_gate_up = a.b_down = {};
        experts(a, {});
        // Pre-activations around 1.6 with sqrt(C) roundings, times a slope of at most 1.1 * (limit + 1); then sqrt(H)
        // roundings of sums around 3: 6 deviations of both together.
        const double eps = testing::roundoff(DType::f32);
        const double allowed = 6 * eps * 8 * std::sqrt(double(C + H));
        const auto result = testing::compare(m.y, m.expected(bias), allowed, 4 * eps);
        EXPECT_TRUE(result.ok) << f << " " << T << ": " << result.message;
        EXPECT_TRUE(m.y.guards_intact() && workspace.guards_intact() && m.x.guards_intact());
      }
}

TEST(experts, in_fp64_are_the_formula_to_the_last_digits) {
  const Mixture m(WeightFormat::mxfp4, 11, 4, 2, 64, 32);
  Buffer x(DType::f64, {11, 64}), bg(DType::f64, {4, 64}), bd(DType::f64, {4, 64}), w(DType::f64, {11, 2});
  Buffer y(DType::f64, {11, 64}), workspace(DType::u8, {m.workspace_bytes(DType::f64)});
  assign(x, values(m.x));
  assign(bg, values(m.b_gu));
  assign(bd, values(m.b_down));
  assign(w, values(m.weights));
  Experts a = m.arguments(workspace);
  a.x = x, a.b_gate_up = bg, a.b_down = bd, a.weights = w, a.y = y;
  experts(a, {});
  const auto result = testing::compare(y, m.expected(true), 1e-13, 1e-13);
  EXPECT_TRUE(result.ok) << result.message;
  a.e4m3_inputs = true;
  experts(a, {});
  const auto rounded = testing::compare(y, m.expected(true, true), 1e-13, 1e-13);
  EXPECT_TRUE(rounded.ok) << rounded.message;
  EXPECT_FALSE(testing::compare(y, m.expected(true), 1e-3, 1e-3).ok) << "nothing was rounded";
}

TEST(experts, a_token_does_not_depend_on_the_tokens_beside_it) {
  const Mixture m(WeightFormat::bf16, 40, 3, 2, 32, 32);
  Buffer workspace(DType::u8, {m.workspace_bytes(DType::f32)});
  experts(m.arguments(workspace), {});
  const auto all = values(m.y);
  Experts a = m.arguments(workspace);
  for (const auto& [begin, end] : std::vector<std::array<int64_t, 2>>{{0, 1}, {7, 30}, {39, 40}}) {
    Buffer y(DType::f32, {end - begin, m.C});
    a.x = m.x.tensor().slice(0, begin, end), a.experts = m.chosen.tensor().slice(0, begin, end);
    a.weights = m.weights.tensor().slice(0, begin, end), a.y = y;
    experts(a, {});
    const std::vector<double> want(all.begin() + begin * m.C, all.begin() + end * m.C);
    const auto result = testing::compare(y, want, 2e-5, 1e-6);  // the same sums in another order
    EXPECT_TRUE(result.ok) << result.message;
  }
}

TEST(experts, operands_that_do_not_fit_are_refused_by_name) {
  Mixture m(WeightFormat::f32, 2, 4, 2, 32, 32);
  Buffer workspace(DType::u8, {m.workspace_bytes(DType::f32)});
  m.chosen.tensor().ptr<int32_t>()[1] = 4;
  EXPECT_EQ(error_of([&] { experts(m.arguments(workspace), {}); }),
            "invalid argument: experts: found expert 4 of token 0, expected 0 to 3");
  m.chosen.tensor().ptr<int32_t>()[1] = m.chosen.tensor().ptr<int32_t>()[0];
  EXPECT_NE(error_of([&] { experts(m.arguments(workspace), {}); }).find("twice for token 0, expected 2 different ones"),
            std::string::npos);
  Buffer wrong(DType::f32, {4, 63});
  Experts a = m.arguments(workspace);
  a.b_gate_up = wrong;
  EXPECT_EQ(
      error_of([&] { experts(a, {}); }),
      "invalid argument: experts: b_gate_up: found shape (4, 63) and dtype f32, expected (4, 64) f32, contiguous");
  m.chosen.tensor().ptr<int32_t>()[1] = (m.chosen.tensor().ptr<int32_t>()[0] + 1) % 4;
  using F = Experts;
  EXPECT_EQ(
      testing::device_not_checked(m.arguments(workspace),
                                  {&F::x, &F::experts, &F::weights, &F::b_gate_up, &F::b_down, &F::y, &F::workspace},
                                  [](const F& e, Stream stream) { experts(e, stream); }),
      "");
  Buffer logits(DType::f32, {1, 2}), weights(DType::f32, {1, 3}), chosen(DType::i32, {1, 3});
  EXPECT_EQ(error_of([&] { route({.logits = logits, .experts = chosen, .weights = weights}, {}); }),
            "invalid argument: route: found 3 experts per token, expected 1 to 2");
}

}  // namespace
}  // namespace ingot
