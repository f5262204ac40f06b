#pragma once
// The training loop: batches ahead in a thread, forward and backward, optimizer, average, held-out score, checkpoints,
// a log.
//
// A run directory holds config.json, the tokenizer, log.jsonl and a directory per checkpoint. A resumed run by steps
// continues bit for bit (same binary and CPU level, any number of threads).
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ingot/core/comm/communicator.h"
#include "ingot/core/memory/arena.h"
#include "ingot/engines/train/evaluate.h"
#include "ingot/engines/train/run/run_data.h"
#include "ingot/engines/train/run/run_directory.h"
#include "ingot/engines/train/run/run_events.h"
#include "ingot/io/file.h"
#include "ingot/models/gpt/trained.h"

namespace ingot {

struct TrainHooks {
  std::function<void(const TrainStatus&)> on_step;  // after every step
  std::function<void(const TrainStatus&, const Score&)> on_score;
  std::function<bool()> should_stop;  // asked before every step: save and return
};
enum class TrainEnd { finished, stopped };
struct TrainResult {
  TrainEnd end = TrainEnd::finished;
  TrainStatus status;
  Score score;                         // of the final weights on all held-out tokens; only when finished
  std::optional<Error> score_failure;  // why there is no score although the run finished
  std::string checkpoint;              // of the last step; empty after a failed save
  std::string parameter_hash;
  int failed_saves = 0;
};

class Trainer {
 public:
  // Takes the directory's lock; Error{busy} if a second process has the lock. An empty `directory` keeps everything in
  // memory. If the directory already holds a run, the run is resumed if its configuration, data and tokenizer are the
  // same, and refused otherwise; its length may differ. `command` is kept in the log as provenance. All numbers of a
  // step lie on `device`; a run may continue on a different device, but not bit for bit.
  //
  // With `ranks`, each rank makes its share of a step's passes, and all ranks hold the same weights, bit for bit. Rank
  // 0 has the directory; the `directory` of further ranks is ignored. A run may continue with a different number of
  // ranks: its steps are the same except for the order of additions of the passes' gradients.
  Trainer(const RunConfig& config, RunData data, const std::string& directory, const std::string& command = {},
          const ResumeFrom& from = {}, Device device = {}, Communicator* ranks = nullptr);
  ~Trainer();

  int64_t step() const;  // steps done; more than 0 after a resume
  const RunConfig& config() const;
  const RunData& data() const;
  bool looping() const;
  Device device() const;
  int64_t replayed_passes() const;  // passes replayed as CUDA graphs
  Tensor weights() const;           // as trained
  Tensor result_weights() const;    // the average, or the weights if there is none
  int64_t parameter_count() const;
  // Runs a few steps and restores the state. Returns the tokens per second of training with the present layer program.
  double measure_tokens_per_second(double seconds);
  void set_steps(int64_t steps);  // before the first step
  TrainResult run(const TrainHooks& hooks = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot
