#pragma once
// Checkpoints of a run directory:
//   <run>/step-00001000/{model.safetensors, optimizer.safetensors, state.json, manifest.json}
// The manifest (format version, sizes and SHA-256 of the others) is written last, under a temporary name for the
// directory, which is synced, renamed and its parent synced: a checkpoint is there whole or not at all.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ingot/io/safetensors.h"

namespace ingot {

struct CheckpointContent {
  std::vector<NamedTensor> model, optimizer;
  std::string state_json;
};

// Writes, verifies, then removes the oldest complete checkpoints beyond `keep`. Returns the new one's path. Throws
// Error{io}; the earlier checkpoints are intact then, and nothing temporary is left.
std::string save_checkpoint(const std::string& run_directory, int64_t step, const CheckpointContent& content, int keep);

class Checkpoint {
 public:
  const std::string& path() const { return path_; }
  const std::string& run_directory() const { return run_directory_; }
  int64_t step() const { return step_; }
  const std::string& state_json() const { return state_json_; }
  // Fill the given tensors; names, dtypes and shapes must match the file's exactly, none missing, none left over.
  void load_model(const std::vector<NamedTensor>& into) const;
  void load_optimizer(const std::vector<NamedTensor>& into) const;

 private:
  friend Checkpoint read_checkpoint(const std::string& path);
  std::string path_, run_directory_, state_json_;
  int64_t step_ = 0;
};

// Opens one checkpoint directory; every file is checked against the manifest (Error{bad_data} names the file, what was
// found and what was expected).
Checkpoint read_checkpoint(const std::string& path);
// The newest checkpoint of a run, or nothing when it has none. What an interrupted save left is removed. A damaged
// newest checkpoint is an error, never silently passed over.
std::optional<Checkpoint> latest_checkpoint(const std::string& run_directory);
// A run directory (its newest checkpoint) or a checkpoint directory. Removes nothing. Error{not_found} when there is
// none.
Checkpoint open_checkpoint(const std::string& directory);

}  // namespace ingot
