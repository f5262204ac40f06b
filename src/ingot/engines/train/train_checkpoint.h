#pragma once
#include "ingot/engines/train/run_progress.h"
#include "ingot/engines/train/train_state.h"
#include "ingot/io/checkpoint.h"

namespace ingot {

// What a checkpoint holds of a run; its tensors are `here`'s.
CheckpointContent checkpoint_content(const TrainState& state, const HostState& here, const RunProgress& at,
                                     const RunData& data);
// Refuses one of other data.
void resume_from(const Checkpoint& found, const TrainState& state, RunProgress& at, const RunData& data);

}  // namespace ingot
