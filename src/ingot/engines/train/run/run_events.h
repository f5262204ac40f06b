#pragma once
// What a run says of itself: a step's status, and the lines of log.jsonl.
#include "ingot/engines/train/evaluate.h"
#include "ingot/engines/train/run/run_progress.h"
#include "ingot/engines/train/run/train_state.h"
#include "ingot/io/json.h"

namespace ingot {

struct TrainStatus {
  int64_t step = 0, steps = 0;  // done, and in all (expected, when the run goes by time)
  double progress = 0, loss = 0, grad_norm = 0, lr_factor = 1;
  double seconds = 0, tokens_per_second = 0, seconds_left = 0;
  double step_seconds = 0;  // of the last one; tokens_per_second is smoothed over some ten
  double flops_per_second =
      0;                   // of a rank: what the model's definition asks for (models/gpt/config/flops.h), smoothed too
  double utilisation = 0;  // of that in what the device's data sheet promises for bf16; 0: not known of this device
  int64_t memory_bytes = 0;  // in use: of the GPU as a whole, or by this process
  bool looping = false;
};

OrderedJson start_event(const TrainState& state, const RunProgress& at, const RunData& data, const RunRanks& ranks);
OrderedJson step_event(const TrainStatus& s);
OrderedJson score_event(const RunProgress& at, const Score& score);

}  // namespace ingot
