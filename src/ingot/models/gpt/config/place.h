#pragma once
// The device on which a small GPT is trained and scored: the CPU, or a GPU that can run the model.
#include <string>

#include "ingot/core/tensor.h"
#include "ingot/models/gpt/config/config.h"
#include "ingot/models/registry.h"

namespace ingot {

struct GptPlace {
  Device device;
  std::string note;  // the reason why an existing GPU is not used; otherwise empty
};
// `choice` cuda requires a GPU: Error(unsupported) says what is missing.
GptPlace place_of_gpt(const GptConfig& config, DeviceChoice choice);

}  // namespace ingot
