#pragma once
// The reports of a run: the status of a step, and the lines of log.jsonl.
#include "ingot/engines/train/evaluate.h"
#include "ingot/engines/train/run/run_progress.h"
#include "ingot/engines/train/run/train_state.h"
#include "ingot/io/json.h"

namespace ingot {

struct TrainStatus {
  int64_t step = 0, steps = 0;  // steps done, and steps in all (expected, if the run has a time budget)
  double progress = 0, loss = 0, grad_norm = 0, lr_factor = 1;
  double seconds = 0, tokens_per_second = 0, seconds_left = 0;
  double step_seconds = 0;  // of the last step; tokens_per_second is smoothed over about ten steps
  double flops_per_second =
      0;                   // of a rank, smoothed: the operations of the model's definition (models/gpt/config/flops.h)
  double utilisation = 0;  // flops_per_second as a share of the bf16 rate in the device's data sheet; 0: unknown rate
  int64_t memory_bytes = 0;  // in use on the GPU by all processes, or by this process on a CPU
  bool looping = false;
};

OrderedJson start_event(const TrainState& state, const RunProgress& at, const RunData& data, const RunRanks& ranks);
OrderedJson step_event(const TrainStatus& s);
OrderedJson score_event(const RunProgress& at, const Score& score);

}  // namespace ingot
