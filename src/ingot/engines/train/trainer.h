#pragma once
// The training loop: batches ahead in a thread, forward and backward, optimizer, average, held-out score, checkpoints,
// a log.
//
// A run directory holds config.json, the tokenizer, log.jsonl and one directory per checkpoint. A run by steps that is
// resumed continues bit for bit (same binary and CPU level, any number of threads).
#include <functional>
#include <memory>
#include <string>

#include "ingot/core/arena.h"
#include "ingot/core/communicator.h"
#include "ingot/engines/train/evaluate.h"
#include "ingot/engines/train/run_config.h"
#include "ingot/io/file.h"
#include "ingot/models/gpt/trained.h"

namespace ingot {

// What a run reads: made from a path and the run's options (tokenizer, split).
struct RunData {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::shared_ptr<const TokenSource> train, held_out;
  std::vector<std::string> held_out_texts;  // where the data is text
  std::string tokenizer_file;               // the tokenizer as a file's content
  std::string tokenizer_name;               // tokenizer.json or tokenizer.model
  int64_t train_bytes = 0, held_out_bytes = 0;
};
// Reads text (tokenizing it) or shards. Sets config.model.vocab from the tokenizer. `tokenizer_path` wins over the
// config.
RunData load_run_data(const std::string& path, RunConfig& config, const std::string& tokenizer_path = {});

struct TrainStatus {
  int64_t step = 0, steps = 0;  // done, and in all (expected, when the run goes by time)
  double progress = 0, loss = 0, grad_norm = 0, lr_factor = 1;
  double seconds = 0, tokens_per_second = 0, seconds_left = 0;
  double step_seconds = 0;      // of the last one; tokens_per_second is smoothed over some ten
  double flops_per_second = 0;  // of a rank: what the model's definition asks for (models/gpt/flops.h), smoothed too
  double utilisation = 0;    // of that in what the device's data sheet promises for bf16; 0: not known of this device
  int64_t memory_bytes = 0;  // in use: of the GPU as a whole, or by this process
  bool looping = false;
};
struct TrainHooks {
  std::function<void(const TrainStatus&)> on_step;  // after every step
  std::function<void(const TrainStatus&, const Score&)> on_score;
  std::function<bool()> should_stop;  // asked before every step: save and return
};
enum class TrainEnd { finished, stopped };
struct TrainResult {
  TrainEnd end = TrainEnd::finished;
  TrainStatus status;
  Score score;             // of the final weights on all held-out tokens; only when finished
  std::string checkpoint;  // of the last step; empty when saving it failed
  std::string parameter_hash;
  int failed_saves = 0;
};

// Where a run that is resumed goes on: at its newest checkpoint, at the newest one that is whole, or at the one named.
// Checkpoints after that are set aside.
struct ResumeFrom {
  bool last_good = false;
  std::string name;
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
