#pragma once
// The order of the blocks. A layer program is built once per recurrence state; weights are indexed by physical layer;
// activations, caches and adapters by layer call.
#include <vector>

#include "ingot/models/gpt/config/config.h"

namespace ingot {

struct LayerCall {
  int layer = 0;              // physical
  int skip_slot = -1;         // decoder position whose skip weights merge before this layer call, or -1
  int skip_from = -1;         // layer call whose output is merged, or -1
  bool pushes = false;        // an encoder layer call: its output is kept for a skip
  bool lanes = false;         // a two-lane block
  bool enters_lanes = false;  // the first of the two-lane blocks: both lanes start as copies of x
  bool exclude_self = false;
};
using Application = LayerCall;  // the earlier name, for one version
struct LayerProgram {
  std::vector<LayerCall> layer_calls;
  bool looping = false;
};
LayerProgram layer_program(const GptConfig& config, bool looping);
// Skip slots of the config: the larger of its programs' counts.
int skip_slots(const GptConfig& config);

}  // namespace ingot
