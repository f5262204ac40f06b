#include "ingot/engines/train/optimizer/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/engines/train/run/run_config.h"
#include "ingot/engines/train/schedule.h"
#include "ingot/io/file.h"
#include "ingot/models/gpt/golden.test.h"
#include "ingot/testing/poisoned_memory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;

// Compares with spec/optimizer.py, whose numbers tools/make_model_goldens.py wrote.
TEST(optimizer, weights_and_their_average_equal_the_definition) {
  const Json goldens = read_json_file(INGOT_SOURCE_DIR "/tests/data/optimizer.json");
  ASSERT_EQ(goldens.size(), 2u);
  for (const auto& [name, golden] : goldens.items()) {
    const TrainOptions train = run_config_from_json(Json{{"train", golden["train"]}}.dump(), name).train;
    const ScheduleOptions& schedule = train.schedule;
    const ParameterLayout layout(gpt_config_from_json(golden["config"].dump(), name));
    Buffer weights(DType::f64, {layout.padded_count()}), grads(DType::f64, {layout.padded_count()});
    fill_zero(weights);
    fill_zero(grads);
    testing::fill_golden_weights(layout, weights);
    Optimizer optimizer(layout, DType::f64, train.optimizer, true);
    optimizer.start_average(weights);
    const int64_t steps = golden["steps"];
    for (int64_t k = 0; k < golden["taken"].get<int64_t>(); ++k) {
      for (const Parameter& p : layout.all())
        for (int64_t i = 0; i < p.shape.numel(); ++i)
          layout.view(grads, p).ptr<double>()[i] =
              testing::number("gradient " + std::to_string(k) + " " + p.name, i) * (k % 2 == 1 ? 0.01 : 1);
      const double progress = double(k) / double(steps);
      optimizer.step(weights.tensor(), grads,
                     {.step = k + 1,
                      .lr_factor = learning_rate_factor(schedule, progress, k, steps),
                      .momentum = muon_momentum(schedule, progress),
                      .ema = ema_decay(schedule, double(steps))});
    }
    constexpr double kLimit = 1e-9;  // fp64
    for (const Parameter& p : layout.all()) {
      testing::expect_golden(layout.view(weights, p), p, golden["weights"][p.name], kLimit, name + ", " + p.name);
      testing::expect_golden(layout.view(optimizer.average(), p), p, golden["average"][p.name], kLimit,
                             name + ", average of " + p.name);
    }
  }
}

// On memory with arbitrary initial contents, and with a copy of the weights in the products' type.
TEST(optimizer, the_optimizer_s_state_begins_at_zero_and_the_copy_follows_the_weights) {
  GptConfig c = gpt_preset("nano");
  c.vocab = 40, c.dim = 16, c.layers = 1, c.heads = c.kv_heads = 2, c.head_dim = 8, c.mlp_hidden = 24;
  const ParameterLayout layout(c);
  const Shape flat{layout.padded_count()};
  Buffer grads(DType::f32, flat), there(DType::f32, flat), here(DType::f32, flat), copied(DType::bf16, flat);
  testing::fill_normal(grads, 1);
  initialise(c, layout, there, 2), initialise(c, layout, here, 2);
  testing::PoisonedMemory poisoned;
  Optimizer on_poison(layout, DType::f32, {}, true, {.memory = &poisoned}), plain(layout, DType::f32, {}, true);
  on_poison.start_average(there), plain.start_average(here);
  for (int64_t step = 1; step <= 2; ++step) {
    on_poison.step(GptWeights(there, copied), grads, {.step = step, .ema = 0.9});
    plain.step(here.tensor(), grads, {.step = step, .ema = 0.9});
  }
  EXPECT_EQ(testing::values(there), testing::values(here));
  EXPECT_EQ(testing::values(on_poison.average()), testing::values(plain.average()));
  auto rounded = testing::values(there);
  for (double& x : rounded) x = float(bf16(float(x)));
  EXPECT_EQ(testing::values(copied), rounded);
  double squares = 0;
  for (double g : testing::values(grads)) squares += g * g;
  EXPECT_NEAR(plain.gradient_norm().ptr<double>()[0], std::sqrt(squares), 1e-9 * std::sqrt(squares));

  const auto before = testing::values(here);
  grads.tensor().ptr<float>()[3] = HUGE_VALF;
  plain.step(here.tensor(), grads, {.step = 3, .ema = 0.9});
  EXPECT_EQ(testing::values(here), before) << "a gradient that is not finite changes nothing";
}

}  // namespace
}  // namespace ingot
