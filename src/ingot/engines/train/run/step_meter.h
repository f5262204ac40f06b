#pragma once
// The speed of a run's steps, and the memory in use.
#include <cstdint>

#include "ingot/core/tensor.h"
#include "ingot/engines/train/trainer.h"

namespace ingot {

class StepMeter {
 public:
  explicit StepMeter(Device device);
  // Adds speed, smoothed over the run, and memory to the status of a step of so many tokens and operations. The memory
  // is the last known one without `ask_for_memory`, because asking takes time and the answer hardly changes.
  void measure(TrainStatus& s, double tokens, double flops, bool ask_for_memory);

 private:
  const Device device_;
  const double promised_flops_;  // per second; 0 where not known
  const int64_t gpu_memory_;
  int64_t used_memory_ = 0;
  double tokens_rate_ = 0, flops_rate_ = 0;  // per second
};

}  // namespace ingot
