#pragma once
// The state of a training run, and its parts: the start of a run (trainer.cpp), a step (trainer_step.cpp), and its
// checkpoints and scores (trainer_records.cpp).
#include <memory>
#include <optional>
#include <string>

#include "ingot/core/clock.h"
#include "ingot/data/prefetch.h"
#include "ingot/engines/train/run/run_log.h"
#include "ingot/engines/train/run/run_progress.h"
#include "ingot/engines/train/run/run_ranks.h"
#include "ingot/engines/train/run/train_checkpoint.h"
#include "ingot/engines/train/run/train_state.h"
#include "ingot/engines/train/step_passes.h"
#include "ingot/engines/train/trainer.h"

namespace ingot {

struct Trainer::Impl {
  RunConfig config;
  RunData data;
  std::string command;
  RunRanks ranks;
  RunDirectory directory;
  TrainState state;
  StepPasses passes;
  RunProgress at;
  std::shared_ptr<const Packer> packer;
  RunLog log;
  int failed_saves = 0, bad_steps = 0;
  std::string last_checkpoint;
  bool resumed = false;
  int64_t saved_step = -1;  // the step of the newest checkpoint
  std::string init_hash;    // the hash of the initial parameters if these come from an earlier run

  Impl(const RunConfig& c, RunData d, const std::string& dir, const std::string& cmd, const ResumeFrom& from,
       Device where, Communicator* others);

  // trainer.cpp: where a run begins
  // Checks before the first step, so that no error appears only at the first score: too few tokens, and ids outside the
  // vocabulary.
  void check_held_out() const;
  void take_weights_of(const std::string& path);
  void enter_directory(const std::optional<Checkpoint>& found);
  // Rank 0 has read a checkpoint or an earlier run; all ranks receive its state.
  void share_state();

  // trainer_step.cpp
  // The batches of this rank's passes, from the next step on.
  Prefetch batches_ahead() const;
  // On a GPU, Muon's iterations have operands of 16 bits, as its authors' do.
  Products optimizer_products() const;
  // The number of scored targets in the next step, over the passes of all ranks.
  int64_t step_targets() const;
  TrainStatus train_step(Prefetch& batches);
  // The mean loss over `targets` targets. The passes of all ranks are added in their order.
  double mean_loss(int64_t targets) const;
  void note_bad_step(const TrainStatus& s);
  void compare_weights() const;

  // trainer_records.cpp: checkpoints and scores
  // A failed save is reported and never stops training.
  bool save();
  bool save_step();
  bool write_checkpoint();
  // Scores the step, and saves the step if its score is the best so far.
  void score_and_keep_best(const TrainStatus& s, const TrainHooks& hooks);
  // A failed score is reported and does not stop training. With several ranks only an infinite or NaN score, visible to
  // all ranks, is treated this way.
  std::optional<Score> score_or_warn(std::optional<Error>* failure = nullptr);
  Score score_on_held_out() const;
  // The end of a run: the last checkpoint and, unless the run was stopped, the last score.
  void finish(TrainResult& result);

  // Whether the step just done is one of every n, and not the last, which finish() scores and saves.
  bool due(int64_t every) const { return every > 0 && at.step % every == 0 && !at.done(); }

  // The clock of a run with a time budget. Scores and saves count; train.reserve_seconds are kept for the last score
  // and save.
  Clock::time_point clock_begun;
  double seconds_before = 0;  // seconds of the run before this process
  void begin_clock() { clock_begun = Clock::now(), seconds_before = at.trained_seconds; }
  void note_time() { at.trained_seconds = ranks.as_rank_0(seconds_before + seconds_since(clock_begun)); }
};

}  // namespace ingot
