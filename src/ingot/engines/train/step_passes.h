#pragma once
// The passes of a step, forward and backward, that a rank makes: the model bound to the device and its launches.
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

  // Before the first step: keeps rows of the forward pass where they fit, and refuses what would be found out in the
  // middle of the run.
  void plan();
  // Leaves this rank's gradients in step_grads() and the sums of losses in `pass_losses`. `targets`: those of the step
  // that are scored, in all passes of all ranks; gradients are of the mean over them.
  void run(Prefetch& batches, bool loop, int64_t targets);
  void forget_model();
  double flops() const { return step_flops_; }  // of the latest step, by this rank
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
  int64_t targets_ = -1;  // that `dloss` was filled for
  DeviceBatch on_device_;
  std::unique_ptr<Gpt> model_;
  PassGraphs graphs_;  // of the model
};

// The products that a run asks for.
Products products_of(const TrainOptions& o);

}  // namespace ingot
