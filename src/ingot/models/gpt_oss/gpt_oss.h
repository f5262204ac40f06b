#pragma once
// GPT-OSS: a decoder with sliding and full attention in turn, sinks, YaRN, and a mixture of experts in every layer.
// spec/gpt_oss.py defines what is computed. The decode engine runs it (models/decode), as spec_of() describes it.
#include "ingot/models/decode/cpu/cpu_model.h"
#include "ingot/models/gpt_oss/spec.h"
#include "ingot/models/gpt_oss/weights.h"

namespace ingot {

using GptOss = decode::CpuModel;
using GptOssCache = decode::KeyValueCache;
using GptOssOptions = decode::CpuModelOptions;

}  // namespace ingot
