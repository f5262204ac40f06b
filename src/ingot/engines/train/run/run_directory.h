#pragma once
// The directory of a run: config.json, the tokenizer, log.jsonl and a directory per checkpoint.
#include <optional>
#include <string>

#include "ingot/engines/train/evaluate.h"
#include "ingot/engines/train/run/run_data.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/file.h"

namespace ingot {

// The first checkpoint of a resumed run: the newest, the newest complete, or the named checkpoint. Later checkpoints
// are set aside.
struct ResumeFrom {
  bool last_good = false;
  std::string name;
};

class RunDirectory {
 public:
  // With an empty `directory` the run is kept in memory; then only is_best and note_best may be called. `config` and
  // `data` must outlive this object.
  RunDirectory(std::string directory, const RunConfig& config, const RunData& data)
      : directory_(std::move(directory)), config_(config), data_(data) {}

  explicit operator bool() const { return !directory_.empty(); }
  const std::string& name() const { return directory_; }
  std::string path(const char* name) const { return join_path(directory_, name); }

  // Takes the lock and finds the checkpoint to continue from. Only the lock is written, so a run refused later leaves
  // nothing behind.
  std::optional<Checkpoint> find(const ResumeFrom& from);
  void write_new() const;     // writes config.json and the tokenizer of a new run
  void write_config() const;  // rewrites config.json if different
  std::string save(int64_t step, const CheckpointContent& content) const;  // the checkpoint's path

  bool is_best(const Score& score) const;
  // Records the checkpoint of this step, which must exist, as the best. An error is reported and does not stop
  // training.
  void note_best(int64_t step, const Score& score) const;

 private:
  void check_same_run() const;

  std::string directory_;
  const RunConfig& config_;
  const RunData& data_;
  Lock lock_;
};

}  // namespace ingot
