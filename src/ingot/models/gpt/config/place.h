#pragma once
// Where a small GPT is trained and scored: the CPU, or a GPU that can run it.
#include <string>

#include "ingot/core/tensor.h"
#include "ingot/models/gpt/config/config.h"
#include "ingot/models/registry.h"

namespace ingot {

struct GptPlace {
  Device device;
  std::string note;  // why a GPU that is there is not taken; empty otherwise
};
// `choice` cuda insists: Error(unsupported) says what is missing.
GptPlace place_of_gpt(const GptConfig& config, DeviceChoice choice);

}  // namespace ingot
