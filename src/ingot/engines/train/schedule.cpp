#include "ingot/engines/train/schedule.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/check.h"

namespace ingot {

void check(const ScheduleOptions& o) {
  const auto share = [](const char* name, double x) {
    if (!(x >= 0 && x <= 1)) fail(ErrorCode::usage, "train.schedule.", name, ": found ", x, ", expected 0 to 1");
  };
  if (o.warmup_steps < 0)
    fail(ErrorCode::usage, "train.schedule.warmup_steps: found ", o.warmup_steps, ", expected at least 0");
  if (o.decay != "linear" && o.decay != "cosine")
    fail(ErrorCode::usage, "train.schedule.decay: found '", o.decay, "', expected linear or cosine");
  share("warmdown", o.warmdown);
  share("min_lr", o.min_lr);
  share("momentum_start", o.momentum_start);
  share("momentum_end", o.momentum_end);
  share("momentum_warmup", o.momentum_warmup);
  share("ema_horizon", o.ema_horizon);
}

double learning_rate_factor(const ScheduleOptions& o, double progress, int64_t step, int64_t steps) {
  if (step < o.warmup_steps) return double(step + 1) / double(o.warmup_steps + 1);
  if (o.decay == "cosine") {
    const double warm = steps > 0 ? double(o.warmup_steps) / double(steps) : 0;
    const double p = warm < 1 ? std::clamp((progress - warm) / (1 - warm), 0.0, 1.0) : 1;
    return o.min_lr + (1 - o.min_lr) * 0.5 * (1 + std::cos(3.141592653589793 * p));
  }
  if (o.warmdown <= 0 || progress < 1 - o.warmdown) return 1;
  return std::max(o.min_lr, (1 - std::min(progress, 1.0)) / o.warmdown);
}

double muon_momentum(const ScheduleOptions& o, double progress) {
  const double p = o.momentum_warmup > 0 ? std::min(progress / o.momentum_warmup, 1.0) : 1;
  return o.momentum_start + (o.momentum_end - o.momentum_start) * p;
}

double ema_decay(const ScheduleOptions& o, double steps) { return 1 - 1 / std::max(1.0, o.ema_horizon * steps); }

}  // namespace ingot
