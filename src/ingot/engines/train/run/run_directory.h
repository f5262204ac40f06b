#pragma once
// The directory of a run: config.json, the tokenizer, log.jsonl and one directory per checkpoint.
#include <optional>
#include <string>

#include "ingot/engines/train/evaluate.h"
#include "ingot/engines/train/run/run_data.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/file.h"

namespace ingot {

// Where a run that is resumed goes on: at its newest checkpoint, at the newest one that is whole, or at the one named.
// Checkpoints after that are set aside.
struct ResumeFrom {
  bool last_good = false;
  std::string name;
};

class RunDirectory {
 public:
  // An empty `directory` keeps everything in memory: then nothing below is there to be called but is_best and
  // note_best. `config` and `data` must outlive this.
  RunDirectory(std::string directory, const RunConfig& config, const RunData& data)
      : directory_(std::move(directory)), config_(config), data_(data) {}

  explicit operator bool() const { return !directory_.empty(); }
  const std::string& name() const { return directory_; }
  std::string path(const char* name) const { return join_path(directory_, name); }

  // Takes the lock, and finds the checkpoint to go on from. Writes nothing but the lock: what is refused later must not
  // leave a run behind.
  std::optional<Checkpoint> find(const ResumeFrom& from);
  void write_new() const;     // of a run that is not there yet: config.json and the tokenizer
  void write_config() const;  // where it is not what stands there
  std::string save(int64_t step, const CheckpointContent& content) const;  // the checkpoint's path

  bool is_best(const Score& score) const;
  // The checkpoint of this step is there. Trouble is reported and never stops training.
  void note_best(int64_t step, const Score& score) const;

 private:
  void check_same_run() const;

  std::string directory_;
  const RunConfig& config_;
  const RunData& data_;
  Lock lock_;
};

}  // namespace ingot
