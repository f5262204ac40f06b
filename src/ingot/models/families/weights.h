#pragma once
// The weights of the families: their names in safetensors and GGUF files, and the reading of them.
#include "ingot/models/checkpoint/layout.h"
#include "ingot/models/spec.h"

namespace ingot {

// Every tensor must be there with the spec's shape and a type that is read, and none may be left over (but those of
// layers beyond the first `layers`). Matrices in f32 stay f32, all others become bf16. Without an arena the layout only
// checks and counts.
detail::CheckpointLayout lay_out_family(const detail::Checkpoint& checkpoint, const DecoderSpec& spec, int64_t layers,
                                        Arena* arena);

}  // namespace ingot
