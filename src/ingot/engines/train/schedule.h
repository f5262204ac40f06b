#pragma once
// How learning rate, momentum, averaging and the layer program change during a run. Progress is a number from 0 to 1:
// the share of the steps, or of the time budget. All functions here are pure functions of the progress.
#include <cstdint>
#include <string>

namespace ingot {

struct ScheduleOptions {
  int64_t warmup_steps = 0;  // linear from 0
  // linear: constant, then down to min_lr over the last `warmdown`; cosine: over all of the run.
  std::string decay = "linear";
  double warmdown = 0.72;  // linear: share of the run
  double min_lr = 0;       // as a share of the peak
  double momentum_start = 0.92, momentum_end = 0.97;
  double momentum_warmup = 0.3;  // share of the run with rising momentum of Muon
  double ema_horizon = 0.06;     // the average's memory as a share of the run; 0: no average
};
void check(const ScheduleOptions& o);

// `step` counts from 0 and matters for the warm-up only; `steps` is the run's length, expected when the run goes by
// time.
double learning_rate_factor(const ScheduleOptions& o, double progress, int64_t step, int64_t steps);
double muon_momentum(const ScheduleOptions& o, double progress);
double ema_decay(const ScheduleOptions& o, double steps);

}  // namespace ingot
