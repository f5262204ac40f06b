// The checkpoints and scores of a run.
#include "ingot/core/log.h"
#include "ingot/engines/train/trainer_impl.h"
#include "ingot/kernels/adamw/adamw.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/copy/host_copy.h"

namespace ingot {

bool Trainer::Impl::save() {
  if (!ranks) return write_checkpoint();
  state.optimizer.gather_state();
  ranks.wait(state.stream);
  compare_weights();
  const bool saved = write_checkpoint();
  ranks.communicator()->barrier(kLoadSeconds);
  return ranks.as_rank_0(saved);
}

bool Trainer::Impl::save_step() {
  const bool saved = save();
  if (saved) saved_step = at.step;
  return saved;
}

bool Trainer::Impl::write_checkpoint() {
  if (!directory) return true;
  const auto begun = Clock::now();
  try {
    const HostState here(state);
    if (!all_finite(here.weights.tensor())) {
      log_warn("not saving step ", at.step, ": the weights are not finite");
      return false;
    }
    const CheckpointContent content = checkpoint_content(state, here, at, data);
    last_checkpoint = directory.save(at.step, content);
    const double seconds = seconds_since(begun);
    if (const std::string note = note_of_slow_save(at.step, content, seconds); !note.empty()) log_info(note);
    log.write({{"event", "checkpoint"}, {"step", at.step}, {"path", last_checkpoint}, {"saving_seconds", seconds}});
    return true;
  } catch (const Error& e) {
    ++failed_saves;
    log_warn(e.what(), at.done() ? "" : "; training goes on");
    log.write({{"event", "checkpoint_failed"}, {"step", at.step}, {"error", e.what()}});
    return false;
  }
}

std::optional<Score> Trainer::Impl::score_or_warn(std::optional<Error>* failure) {
  try {
    return score_on_held_out();
  } catch (const LostRank&) { throw; } catch (const Error& e) {
    if (ranks && e.code != ErrorCode::numeric) throw;
    if (ranks.rank() == 0) log_warn("step ", at.step, " has no score: ", e.what());
    log.write({{"event", "score_failed"}, {"step", at.step}, {"error", e.what()}});
    if (failure != nullptr) failure->emplace(e);
    return std::nullopt;
  }
}

void Trainer::Impl::score_and_keep_best(const TrainStatus& s, const TrainHooks& hooks) {
  if (const std::optional<Score> x = score_or_warn()) {
    log.write(score_event(at, *x));
    if (hooks.on_score) hooks.on_score(s, *x);
    if (ranks.as_rank_0(directory.is_best(*x)) && save_step()) directory.note_best(s.step, *x);
  }
  note_time();
}

void Trainer::Impl::finish(TrainResult& result) {
  const bool nothing_done = at.step == 0 && result.end == TrainEnd::stopped;
  if (saved_step != at.step && !nothing_done) save_step();
  if (result.end == TrainEnd::finished) {
    if (const std::optional<Score> x = score_or_warn(&result.score_failure)) {
      result.score = *x;
      log.write(score_event(at, *x));
      if (saved_step == at.step && directory.is_best(*x)) directory.note_best(at.step, *x);
    }
  }
  if (saved_step == at.step) result.checkpoint = last_checkpoint;
  compare_weights();
  result.failed_saves = failed_saves;
  result.parameter_hash = parameter_hash(state.layout, HostCopy(state.result_weights(), state.stream).tensor());
  log.write({{"event", result.end == TrainEnd::finished ? "end" : "stopped"},
             {"step", at.step},
             {"seconds", at.trained_seconds},
             {"parameter_hash", result.parameter_hash}});
}

Score Trainer::Impl::score_on_held_out() const {
  const Products products = products_named(config.train.products);
  // The average has no separate copy in the products' type: the average borrows the weights' copy, which is renewed
  // afterwards.
  const Tensor result = state.result_weights();
  const bool other = state.compute && result.data != state.weights.data;
  if (other) copy({.from = result, .to = state.compute}, state.stream);
  const Score s = score(config.model, {result, state.compute}, *data.tokenizer, data.held_out,
                        {.batch_tokens = config.train.batch_tokens,
                         .looping = at.looping(),
                         .products = products,
                         .stream = state.stream,
                         .ranks = ranks.communicator()});
  if (other) state.renew_compute();
  return s;
}

}  // namespace ingot
