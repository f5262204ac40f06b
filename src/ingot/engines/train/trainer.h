#pragma once
// The training loop: batches ahead in a thread, forward and backward, optimizer, average, held-out score, checkpoints,
// a log.
//
// A run directory holds config.json, the tokenizer, log.jsonl and one directory per checkpoint. A run by steps that is
// resumed continues bit for bit (same binary and CPU level, any number of threads).
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
  std::string checkpoint;              // of the last step; empty when saving it failed
  std::string parameter_hash;
  int failed_saves = 0;
};

class Trainer {
 public:
  // Takes the directory's lock; another process on it is Error{busy}. An empty `directory` keeps everything in memory.
  // A directory that already holds a run is resumed when its configuration, data and tokenizer are the same, and
  // refused otherwise; the length may be another one. `command` is kept in the log as provenance. All of a step's
  // numbers lie on `device`; a run may go on on another one, not bit for bit.
  //
  // With `ranks` each takes its share of a step's passes, and all hold the same weights, bit for bit. The first one has
  // the directory; `directory` of others is not looked at. A run may go on with another number of ranks: its steps are
  // the same, but for the order in which passes' gradients are added.
  Trainer(const RunConfig& config, RunData data, const std::string& directory, const std::string& command = {},
          const ResumeFrom& from = {}, Device device = {}, Communicator* ranks = nullptr);
  ~Trainer();

  int64_t step() const;  // steps done; more than 0 after a resume
  const RunConfig& config() const;
  const RunData& data() const;
  bool looping() const;
  Device device() const;
  int64_t replayed_passes() const;  // that ran as CUDA graphs
  Tensor weights() const;           // as trained
  Tensor result_weights() const;    // the average where there is one
  int64_t parameter_count() const;
  // Runs a few steps' worth of work without changing anything; tokens per second of training at the present layer
  // program.
  double measure_tokens_per_second(double seconds);
  void set_steps(int64_t steps);  // before the first step
  TrainResult run(const TrainHooks& hooks = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot
