#include "ingot/engines/export/hessian.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/core/rng.h"
#include "ingot/models/gpt/gpt_variants.test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using Rows = std::vector<std::vector<double>>;

// Three tokens, in fp64, with every parameter random.
struct Case {
  Case(const GptConfig& c, bool looping)
      : layout(c),
        weights(size_t(layout.padded_count())),
        grads(weights.size()),
        loss(3),
        dloss{1, 0.5, 2},
        model(c, DType::f64, {.capacity = 3, .looping = looping, .training = true}) {
    initialise(c, layout, flat(weights), 3);
    for (const Parameter& p : layout.all())
      testing::fill_normal(layout.view(flat(weights), p), uint64_t(p.offset), 0.3);
  }
  Tensor flat(std::vector<double>& v) { return Tensor(v.data(), {layout.padded_count()}); }
  TokenBatch batch() { return {Tensor(tokens, {3}), Tensor(targets, {3}), Tensor(positions, {3}), Tensor(cu, {2})}; }

  ParameterLayout layout;
  std::vector<double> weights, grads, loss, dloss;
  int32_t tokens[3] = {5, 11, 2}, targets[3] = {11, 2, 7}, positions[3] = {0, 1, 2}, cu[2] = {0, 3};
  Gpt model;
};

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
void take_out(std::vector<double>& from, const std::vector<double>& unit) {
  const double share = dot(from, unit);
  for (size_t i = 0; i < from.size(); ++i) from[i] -= share * unit[i];
}
// An orthonormal basis of the row space of a symmetric matrix.
Rows basis_of(Rows rows) {
  Rows basis;
  double first = 0;
  for (;;) {
    size_t best = 0;
    for (size_t i = 0; i < rows.size(); ++i)
      if (dot(rows[i], rows[i]) > dot(rows[best], rows[best])) best = i;
    const double norm = std::sqrt(dot(rows[best], rows[best]));
    if (first == 0) first = norm;
    if (norm <= 1e-11 * first) return basis;
    std::vector<double> unit = rows[best];
    for (double& u : unit) u /= norm;
    for (const auto& b : basis) take_out(unit, b);
    const double again = std::sqrt(dot(unit, unit));
    for (double& u : unit) u /= again;
    for (auto& r : rows) take_out(r, unit);
    basis.push_back(unit);
  }
}

// dW = dY^T X, so every row of a matrix's gradient lies in the span of the input rows, the row space of H: three rows
// for each layer call, fewer than columns. Rows of a wrong input would not span the gradient.
TEST(Hessians, gradients_of_all_matrices_lie_in_the_span_of_their_inputs) {
  for (const testing::Variant& v : testing::variants()) {
    Case c(v.config, v.looping);
    Hessians hessians(v.config, DType::f64, {}, {});
    c.model.losses(c.flat(c.weights), c.batch(), Tensor(c.loss.data(), {3}), nullptr, &hessians);
    hessians.end_batch();
    c.model.losses_and_gradients(c.flat(c.weights), c.batch(), Tensor(c.dloss.data(), {3}), Tensor(c.loss.data(), {3}),
                                 c.flat(c.grads));
    int checked = 0;
    for (const Parameter& p : c.layout.all()) {
      const std::span<const double> h = hessians.of(p.name);
      if (p.kind == ParameterKind::scalar) EXPECT_TRUE(h.empty()) << p.name;
      if (h.empty()) continue;
      const size_t n = size_t(p.shape[-1]);
      ASSERT_EQ(h.size(), n * n) << p.name;
      Rows rows;
      for (size_t i = 0; i < n; ++i) rows.emplace_back(h.begin() + long(i * n), h.begin() + long((i + 1) * n));
      const Rows basis = basis_of(rows);
      // XSA removes all of a first token's attention, which is to the token itself.
      EXPECT_GE(basis.size(), p.name.ends_with("attn.o.weight") ? 2u : 3u) << v.name << " " << p.name;
      ASSERT_LT(basis.size(), n) << v.name << " " << p.name << ": nothing is shown";
      const Tensor grad = c.layout.view(c.flat(c.grads), p);
      double largest = 0, outside = 0;
      for (int64_t r = 0; r < p.shape[0]; ++r) {
        // A tied table's gradient has the embedding's part too, in the rows of the tokens.
        if (p.name == "tok_emb.weight" && (r == 5 || r == 11 || r == 2)) continue;
        const double* at = grad.ptr<double>() + r * int64_t(n);
        std::vector<double> row(at, at + n);
        largest = std::max(largest, std::sqrt(dot(row, row)));
        for (const auto& b : basis) take_out(row, b);
        outside = std::max(outside, std::sqrt(dot(row, row)));
      }
      EXPECT_GT(largest, 0) << v.name << " " << p.name;
      // H's small eigenvalues are squares: their span is known to the root of fp64's precision.
      EXPECT_LE(outside, 1e-4 * largest) << v.name << " " << p.name;
      ++checked;
    }
    EXPECT_GE(checked, int(6 * v.config.layers + 1)) << v.name;
  }
}

// Normed rows without a gain have a mean square of s^2, s = 1 / sqrt(layer + 1), so the diagonal's sum counts
// layer calls.
TEST(Hessians, layer_calls_of_a_looped_layer_are_summed) {
  const GptConfig config = testing::small_golf();
  for (const bool looping : {false, true}) {
    Case c(config, looping);
    Hessians hessians(config, DType::f64, {}, {});
    for (int batch = 0; batch < 2; ++batch) {
      c.model.losses(c.flat(c.weights), c.batch(), Tensor(c.loss.data(), {3}), nullptr, &hessians);
      hessians.end_batch();
    }
    for (int i = 0; i < int(config.layers); ++i) {
      int applied = 0;
      for (const LayerCall& a : c.model.program().layer_calls) applied += a.layer == i;
      for (const char* name : {".attn.k.weight", ".mlp.up.weight"}) {
        const std::span<const double> h = hessians.of("blocks." + std::to_string(i) + name);
        double trace = 0;
        for (int64_t k = 0; k < config.dim; ++k) trace += h[size_t(k * (config.dim + 1))];
        // The norm's epsilon, 1.2e-7, against mean squares of about 0.1.
        EXPECT_NEAR(trace * (i + 1) / double(2 * 3 * config.dim), applied, 1e-4) << i << name << looping;
      }
    }
  }
}

TEST(Hessians, an_observer_changes_no_loss) {
  Case c(testing::small_golf(), true);
  c.model.losses(c.flat(c.weights), c.batch(), Tensor(c.loss.data(), {3}));
  const std::vector<double> without = c.loss;
  Hessians hessians(testing::small_golf(), DType::f64, {}, {});
  c.model.losses(c.flat(c.weights), c.batch(), Tensor(c.loss.data(), {3}), nullptr, &hessians);
  EXPECT_EQ(c.loss, without);
}

TEST(Hessians, calibration_text_shorter_than_asked_is_refused) {
  const GptConfig config = testing::small_golf();
  const ParameterLayout layout(config);
  std::vector<float> weights(size_t(layout.padded_count()));
  const Tensor flat(weights.data(), {layout.padded_count()});
  initialise(config, layout, flat, 1);
  const auto text = [](int64_t n) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < n; ++i) tokens.push_back(int32_t(i * 7 % 37));
    return tokens_in_memory(tokens, {0}, -1, 37, "a.txt");
  };
  const CalibrationOptions four{.batches = 4, .batch_tokens = 16};
  const Hessians first = capture_hessians(config, flat, text(65), four);
  const Hessians again = capture_hessians(config, flat, text(65), four);
  const auto a = first.of("blocks.0.mlp.down.weight"), b = again.of("blocks.0.mlp.down.weight");
  ASSERT_FALSE(a.empty());
  EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end()));
  try {
    capture_hessians(config, flat, text(64), four);
    FAIL() << "64 tokens were enough";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::bad_data);
    EXPECT_NE(std::string(e.what()).find("found 64 tokens for calibration, expected 4 batches of 16"),
              std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace ingot
