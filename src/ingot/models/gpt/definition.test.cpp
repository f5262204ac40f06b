// Compares the model with its definition, spec/gpt.py: losses and gradients of two small models, which
// tools/make_model_goldens.py wrote to tests/data/gpt.json. The script and this test compute weights and ids from names
// and indices.
#include <gtest/gtest.h>

#include <cmath>

#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt/golden.test.h"
#include "ingot/models/gpt/gpt.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::bits;
using testing::Buffer;
using testing::number;

struct Batch {
  Batch(const std::vector<int64_t>& lengths, int64_t vocab) {
    cu.push_back(0);
    for (const int64_t n : lengths) {
      for (int64_t i = 0; i < n; ++i) positions.push_back(int32_t(i));
      cu.push_back(int32_t(positions.size()));
    }
    for (uint64_t t = 0; t < positions.size(); ++t) {
      tokens.push_back(int32_t(bits("tokens", t) % uint64_t(vocab)));
      targets.push_back(t % 6 == 4 ? -1 : int32_t(bits("targets", t) % uint64_t(vocab)));
    }
  }
  int64_t size() const { return int64_t(positions.size()); }
  operator TokenBatch() {
    return {Tensor(tokens.data(), {size()}), Tensor(targets.data(), {size()}), Tensor(positions.data(), {size()}),
            Tensor(cu.data(), {int64_t(cu.size())})};
  }
  std::vector<int32_t> tokens, targets, positions, cu;
};

TEST(gpt, losses_and_gradients_equal_the_definition) {
  constexpr double kLimit = 1e-9;  // fp64; as in tests/parity/parity.py
  const Json goldens = read_json_file(INGOT_SOURCE_DIR "/tests/data/gpt.json");
  ASSERT_EQ(goldens.size(), 2u);
  for (const auto& [name, golden] : goldens.items()) {
    const GptConfig config = gpt_config_from_json(golden["config"].dump(), name);
    const ParameterLayout layout(config);
    Batch batch(golden["lengths"], config.vocab);
    const int64_t T = batch.size();
    Buffer weights(DType::f64, {layout.padded_count()}), grads(DType::f64, {layout.padded_count()});
    Buffer dloss(DType::f64, {T}), loss(DType::f64, {T});
    fill_zero(grads);
    testing::fill_golden_weights(layout, weights);
    for (int64_t t = 0; t < T; ++t) dloss.tensor().ptr<double>()[t] = number("dloss", t);
    Gpt model(config, DType::f64, {.capacity = T, .looping = golden["looping"], .training = true});
    model.losses_and_gradients(weights.tensor(), batch, dloss, loss, grads);
    for (int64_t t = 0; t < T; ++t) {
      const double want = golden["losses"][size_t(t)];
      EXPECT_NEAR(loss.tensor().ptr<double>()[t], want, kLimit * std::abs(want)) << name << ", token " << t;
    }
    EXPECT_EQ(golden["gradients"].size(), layout.all().size());
    for (const Parameter& p : layout.all()) {
      testing::expect_golden(layout.view(grads, p), p, golden["gradients"][p.name], kLimit, name + ", " + p.name);
    }
  }
}

}  // namespace
}  // namespace ingot
