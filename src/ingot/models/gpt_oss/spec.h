#pragma once
// Describes GPT-OSS as a DecoderSpec.
#include "ingot/models/gpt_oss/config.h"
#include "ingot/models/spec.h"

namespace ingot {

DecoderSpec spec_of(const GptOssConfig& config);

}  // namespace ingot
