#include "ingot/engines/train/optimizer.h"

#include <gtest/gtest.h>

#include "ingot/engines/train/run_config.h"
#include "ingot/engines/train/schedule.h"
#include "ingot/io/file.h"
#include "ingot/models/gpt/golden.test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;

// spec/optimizer.py, by the numbers that tools/make_model_goldens.py wrote.
TEST(optimizer, weights_and_their_average_are_those_of_the_definition) {
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
      optimizer.step(weights, grads,
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

}  // namespace
}  // namespace ingot
