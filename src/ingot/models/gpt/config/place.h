#pragma once
// The device of a small GPT: the CPU, or a capable GPU.
#include <string>

#include "ingot/core/tensor.h"
#include "ingot/models/gpt/config/config.h"
#include "ingot/models/registry.h"

namespace ingot {

struct GptPlace {
  Device device;
  std::string note;  // the reason why an existing GPU is not used; otherwise empty
};
// Training, scoring and generation run on GPUs of compute capability 8.0 or later. `choice` cuda requires a GPU:
// Error(unsupported) names the missing part.
GptPlace place_of_gpt(const GptConfig& config, DeviceChoice choice);

}  // namespace ingot
