// A step of training: the passes of all ranks, the optimizer, and the two numbers that the host waits for.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ingot/core/log.h"
#include "ingot/engines/train/optimizer/shards.h"
#include "ingot/engines/train/trainer_impl.h"
#include "ingot/kernels/adamw/adamw.h"
#include "ingot/kernels/copy/host_copy.h"

namespace ingot {
namespace {
constexpr int64_t kCompareEvery = 100;  // steps between comparisons of the ranks' weights
}  // namespace

Prefetch Trainer::Impl::batches_ahead() const {
  const int64_t here = state.passes, all = config.train.accumulation, first = ranks.rank() * here;
  return Prefetch(
      [p = packer, here, all, first](int64_t i, Batch& into) { p->fill(i / here * all + first + i % here, into); },
      at.step * here);
}

Products Trainer::Impl::optimizer_products() const {
  return state.compute ? Products::bf16 : products_named(config.train.products);
}

int64_t Trainer::Impl::step_targets() const {
  int64_t sum = 0;
  for (int64_t pass = 0; pass < config.train.accumulation; ++pass)
    sum += packer->targets(at.step * config.train.accumulation + pass);
  return sum;
}

double Trainer::Impl::mean_loss(int64_t targets) const {
  const HostCopy mine(state.pass_losses, state.stream);
  std::vector<double> all(size_t(config.train.accumulation));
  if (ranks)
    ranks.communicator()->gather_bytes(mine.tensor().data, mine.tensor().bytes(), all.data());
  else
    std::copy_n(mine.tensor().ptr<double>(), all.size(), all.data());
  double sum = 0;
  for (const double x : all) sum += x;
  return targets > 0 ? sum / double(targets) : 0;
}

TrainStatus Trainer::Impl::train_step(Prefetch& batches) {
  const auto start = Clock::now();
  TrainStatus s;
  const double p = at.progress();
  s.looping = at.looping();
  s.lr_factor = learning_rate_factor(config.train.schedule, p, at.step, at.expected_steps());
  const int64_t targets = step_targets();
  passes.run(batches, s.looping, targets);
  OptimizerStep step{.step = at.step + 1,
                     .lr_factor = s.lr_factor,
                     .momentum = muon_momentum(config.train.schedule, p),
                     .products = optimizer_products()};
  if (state.optimizer.average()) step.ema = ema_decay(config.train.schedule, double(at.expected_steps()));
  state.optimizer.step(state.all_weights(), state.step_grads(), step);
  ranks.wait(state.stream);
  s.loss = mean_loss(targets);  // the step's only wait
  s.grad_norm = read_number(state.optimizer.gradient_norm(), state.stream);
  note_bad_step(s);
  ++at.step;
  s.step_seconds = std::max(1e-9, seconds_since(start));
  note_time();
  if (at.step % kCompareEvery == 0) compare_weights();
  s.step = at.step;
  s.steps = at.expected_steps();
  s.progress = at.progress();
  s.seconds = at.trained_seconds;
  return s;
}

void Trainer::Impl::note_bad_step(const TrainStatus& s) {
  if (std::isfinite(s.grad_norm)) {
    bad_steps = 0;
    return;
  }
  const int64_t step = at.step + 1;  // as in the log: at.step counts the steps before this one
  const std::string where = std::isfinite(s.loss) ? "the gradient of " + state.broken_tensor(ranks) : "the loss";
  if (ranks.rank() == 0)
    log_warn("step ", step, ": the gradient's norm is ", s.grad_norm, ", found first in ", where,
             "; the step is skipped");
  if (++bad_steps >= config.train.max_bad_steps)
    fail(ErrorCode::numeric, "training stopped at step ", step, ": found ", bad_steps,
         " steps in a row whose gradient is not finite, the last time in ", where,
         "; expected finite numbers. The last checkpoint is ", last_checkpoint.empty() ? "none" : last_checkpoint);
}

void Trainer::Impl::compare_weights() const {
  if (!ranks) return;
  ranks.check_same(hash_of_bits(HostCopy(state.weights, state.stream).tensor()), [&](int64_t r) {
    fail(ErrorCode::numeric, "rank ", r, ": found weights that are not rank 0's after step ", at.step,
         ", expected the same bits on every rank. The last checkpoint is ",
         last_checkpoint.empty() ? "rank 0's" : last_checkpoint);
  });
}

}  // namespace ingot
