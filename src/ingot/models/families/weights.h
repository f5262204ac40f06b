#pragma once
// The weights of the families: their names in safetensors and GGUF files, and how they are read.
#include "ingot/models/checkpoint/layout.h"
#include "ingot/models/spec.h"

namespace ingot {

// Every tensor must be present with the spec's shape and a supported type, and no tensor may be unused (except for
// layers beyond the first `layers`). Matrices in f32 stay f32, all further matrices become bf16. Without an arena the
// layout only checks and counts.
detail::CheckpointLayout lay_out_family(const detail::Checkpoint& checkpoint, const DecoderSpec& spec, int64_t layers,
                                        Arena* arena);

}  // namespace ingot
