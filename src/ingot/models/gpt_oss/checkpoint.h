#pragma once
// The tensors of a GPT-OSS checkpoint under any of their names. Used inside models/gpt_oss only.
#include "ingot/models/checkpoint/layout.h"
#include "ingot/models/gpt_oss/weights.h"

namespace ingot::detail {

// Throws where the checkpoint is not a model of `config`. Without an arena the function only checks and counts.
CheckpointLayout lay_out(const Checkpoint& checkpoint, const GptOssConfig& config, int64_t layers, Arena* arena);

int64_t layers_of(const GptOssConfig& config, const GptOssLoad& load);

}  // namespace ingot::detail
