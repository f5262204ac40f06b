#pragma once
// The progress of a run: by steps, or by the seconds taken.
#include <algorithm>

#include "ingot/engines/train/run/run_config.h"

namespace ingot {

struct RunProgress {
  const RunConfig& config;
  int64_t step = 0;
  double trained_seconds = 0;  // steps, scores and saves
  bool looped = false;         // the recurrence stays on, because the saved weights were trained with recurrence

  bool by_time() const { return config.train.seconds > 0; }
  double budget() const { return config.train.seconds - config.train.reserve_seconds; }
  double progress() const {
    if (by_time()) return std::min(1.0, trained_seconds / budget());
    return config.train.steps > 0 ? double(step) / double(config.train.steps) : 1;
  }
  int64_t expected_steps() const {
    if (!by_time()) return config.train.steps;
    const double p = progress();
    return p > 0.01 ? int64_t(double(step) / p) : std::max<int64_t>(step + 1, 100);
  }
  bool done() const { return by_time() ? trained_seconds >= budget() : step >= config.train.steps; }
  // The recurrence stays on, also if a longer run has made less progress.
  bool looping() const { return config.model.has_loop() && (looped || progress() >= config.model.loop_from); }
};

}  // namespace ingot
