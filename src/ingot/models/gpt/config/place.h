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
// Training and scoring run on GPUs of compute capability 8.0 or later, with cuBLASLt where the GPU is not a Hopper.
// Generation expects a Hopper, as it has not been run on another GPU yet.
enum class GptUse { training, generation };
// `choice` cuda requires a GPU: Error(unsupported) names the missing part.
GptPlace place_of_gpt(const GptConfig& config, DeviceChoice choice, GptUse use = GptUse::training);

}  // namespace ingot
