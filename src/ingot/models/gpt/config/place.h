#pragma once
// The device for training and scoring a small GPT: the CPU, or a capable GPU.
#include <string>

#include "ingot/core/tensor.h"
#include "ingot/models/gpt/config/config.h"
#include "ingot/models/registry.h"

namespace ingot {

struct GptPlace {
  Device device;
  std::string note;  // the reason why an existing GPU is not used; otherwise empty
};
// `choice` cuda requires a GPU: Error(unsupported) names the missing part.
GptPlace place_of_gpt(const GptConfig& config, DeviceChoice choice);

}  // namespace ingot
