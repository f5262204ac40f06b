#pragma once
#include <string>

#include "ingot/engines/train/run/run_progress.h"
#include "ingot/engines/train/run/train_state.h"
#include "ingot/io/checkpoint.h"

namespace ingot {

// What a checkpoint holds of a run; its tensors are `here`'s.
CheckpointContent checkpoint_content(const TrainState& state, const HostState& here, const RunProgress& at,
                                     const RunData& data);
// What a person should know of a save that took so long: "saving step 4 took 38s, 381.3 MB at 10.0 MB/s, ...", or "".
// Training waits for it, and a signal to stop is answered after it.
std::string note_of_slow_save(int64_t step, const CheckpointContent& content, double seconds);
// Refuses one of other data.
void resume_from(const Checkpoint& found, const TrainState& state, RunProgress& at, const RunData& data);

}  // namespace ingot
