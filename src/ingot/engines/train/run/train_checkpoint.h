#pragma once
#include <string>

#include "ingot/engines/train/run/run_progress.h"
#include "ingot/engines/train/run/train_state.h"
#include "ingot/io/checkpoint.h"

namespace ingot {

// The content of a run's checkpoint; the tensors are views of `here`.
CheckpointContent checkpoint_content(const TrainState& state, const HostState& here, const RunProgress& at,
                                     const RunData& data);
// A line about a slow save ("saving step 4 took 38s, 381.3 MB at 10.0 MB/s, ..."), or "" for a fast save. Training
// waits for a save, and a signal to stop is answered after the save.
std::string note_of_slow_save(int64_t step, const CheckpointContent& content, double seconds);
// Refuses a checkpoint of a run on different data.
void resume_from(const Checkpoint& found, const TrainState& state, RunProgress& at, const RunData& data);

}  // namespace ingot
