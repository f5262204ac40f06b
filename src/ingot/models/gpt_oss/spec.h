#pragma once
// GPT-OSS as a value of the decode engine's spec.
#include "ingot/models/gpt_oss/config.h"
#include "ingot/models/spec.h"

namespace ingot {

DecoderSpec spec_of(const GptOssConfig& config);

}  // namespace ingot
