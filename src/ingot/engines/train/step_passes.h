#pragma once
// The forward and backward passes of a step on a rank: the model bound to the device, and its launches.
#include <memory>

#include "ingot/data/prefetch.h"
#include "ingot/engines/train/device_batch.h"
#include "ingot/engines/train/pass_graphs.h"
#include "ingot/engines/train/run/train_state.h"
#include "ingot/models/gpt/config/flops.h"
#include "ingot/models/gpt/gpt.h"

namespace ingot {

class StepPasses {
 public:
  explicit StepPasses(TrainState& state);

  // Call before the first step: decides whether the rows of the forward pass are kept (if memory suffices), and refuses
  // a batch that is too large for a later part of the run.
  void plan();
  // Writes this rank's gradients to step_grads() and the sums of losses to `pass_losses`. `targets` is the number of
  // scored targets of the step, in all passes of all ranks; the gradients belong to the mean loss over these targets.
  void run(Prefetch& batches, bool loop, int64_t targets);
  void forget_model();
  double flops() const { return step_flops_; }  // of the latest step on this rank
  int64_t replays() const { return graphs_.replays(); }

 private:
  GptOptions options_of(bool loop, int64_t tokens) const;
  int64_t planned_bytes(int64_t tokens) const;  // of all layer programs
  void require_room() const;
  Gpt& bound_model(bool loop);

  TrainState& s_;
  bool keep_rows_ = false;  // GptOptions
  GptFlops flops_;          // of the model's program
  double step_flops_ = 0;
  int64_t targets_ = -1;  // the number of targets of the contents of `dloss`
  DeviceBatch on_device_;
  std::unique_ptr<Gpt> model_;
  PassGraphs graphs_;  // of the model
};

}  // namespace ingot
