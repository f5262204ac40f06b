#include "ingot/models/gpt/config/program.h"

#include <algorithm>

#include "ingot/core/check.h"

namespace ingot {
namespace {

std::vector<int> layer_order(const GptConfig& config, bool looping) {
  std::vector<int> order;
  for (int layer = 0; layer < config.layers; ++layer) {
    order.push_back(layer);
    if (!looping || !config.has_loop() || layer != config.loop_last) continue;
    for (int64_t extra = 0; extra < config.loop_extra; ++extra)
      for (int64_t again = config.loop_first; again <= config.loop_last; ++again) order.push_back(int(again));
  }
  return order;
}

}  // namespace

LayerProgram layer_program(const GptConfig& config, bool looping) {
  LayerProgram program;
  program.looping = looping && config.has_loop();
  const std::vector<int> order = layer_order(config, program.looping);
  const int count = int(order.size()), encoders = config.unet_skips ? count / 2 : 0;
  std::vector<int> stack;  // encoder layer calls whose output waits for its decoder
  bool in_lanes = false;
  for (int i = 0; i < count; ++i) {
    LayerCall a;
    a.layer = order[size_t(i)];
    a.exclude_self = a.layer >= config.layers - config.xsa_layers;
    a.lanes = config.lane_start >= 0 && a.layer >= config.lane_start;
    INGOT_CHECK(a.lanes || !in_lanes, "gpt: layer ", a.layer, " has one lane but runs after layer ", config.lane_start,
                " opened two; expected the loop to end before lane_start");
    a.enters_lanes = a.lanes && !in_lanes;
    in_lanes = a.lanes;
    a.pushes = i < encoders;
    INGOT_CHECK(!(a.pushes && a.lanes), "gpt: found lane_start = ", config.lane_start,
                ", expected two-lane layers in the second half only, where skips are read");
    if (a.pushes) {
      stack.push_back(i);
    } else if (!stack.empty() && i - encoders < std::min(encoders, count - encoders)) {
      a.skip_slot = i - encoders;
      a.skip_from = stack.back();
      stack.pop_back();
    }
    program.layer_calls.push_back(a);
  }
  return program;
}

int skip_slots(const GptConfig& config) {
  int slots = 0;
  for (bool looping : {false, true})
    for (const LayerCall& a : layer_program(config, looping).layer_calls) slots = std::max(slots, a.skip_slot + 1);
  return slots;
}

}  // namespace ingot
