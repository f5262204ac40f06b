#pragma once
// GPT-OSS: a decoder with alternating sliding and full attention, sinks, YaRN, and a mixture of experts in every layer.
// spec/gpt_oss.py defines the computation. The decode engine (models/decode) runs the model from the description that
// spec_of() returns.
#include "ingot/models/decode/cpu/cpu_model.h"
#include "ingot/models/gpt_oss/spec.h"
#include "ingot/models/gpt_oss/weights.h"

namespace ingot {

using GptOss = decode::CpuModel;
using GptOssCache = decode::KeyValueCache;
using GptOssOptions = decode::CpuModelOptions;

}  // namespace ingot
