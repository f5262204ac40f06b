#pragma once
// Checkpoints of a run directory:
//   <run>/step-00001000/{model.safetensors, optimizer.safetensors, state.json, manifest.json}
// The manifest (format version, sizes and SHA-256 of all files) is written last, in a directory with a temporary name;
// the directory is synced, renamed and its parent synced: a checkpoint exists completely or not at all.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ingot/io/formats/safetensors.h"

namespace ingot {

struct CheckpointContent {
  std::vector<NamedTensor> model, optimizer;
  std::string state_json;
};

// Writes, verifies, then removes the oldest complete checkpoints beyond `keep`, but never the best. Returns the new
// one's path. Throws Error{io}; the earlier checkpoints are intact then, and nothing temporary is left.
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

// Opens a checkpoint directory; every file is checked against the manifest (Error{bad_data} names the file, the value
// found and the value expected).
Checkpoint read_checkpoint(const std::string& path);

// Thrown if the newest checkpoint is damaged and an earlier checkpoint is complete.
struct DamagedCheckpoint : Error {
  using Error::Error;
};
// The newest checkpoint of a run, or nothing if the run has none. The remains of an interrupted save are removed. A
// damaged newest checkpoint is an error; the message names the newest complete checkpoint.
std::optional<Checkpoint> latest_checkpoint(const std::string& run_directory);
// The newest complete checkpoint, or nothing. Errors in newer checkpoints are logged.
std::optional<Checkpoint> last_good_checkpoint(const std::string& run_directory);
// A checkpoint of a run by its name: "step-00001000", "step-1000" or "1000".
Checkpoint named_checkpoint(const std::string& run_directory, const std::string& name);
// A run directory (its newest checkpoint), RUN/best, or a checkpoint directory. Removes nothing. Error{not_found} when
// there is none.
Checkpoint open_checkpoint(const std::string& directory);
// Describes, for messages, a path that is neither a run nor a checkpoint: "a model of the architecture 'llama'".
std::string found_instead(const std::string& path);
// Renames checkpoints after `step` to "aside-step-...", so that no later checkpoint counts as the run's newest
// checkpoint. best.json is removed if its checkpoint is among these or no longer exists. Renamed checkpoints are never
// removed.
void set_aside_after(const std::string& run_directory, int64_t step);

// The checkpoint with the lowest held-out loss, named in best.json; this checkpoint is kept at any age.
struct BestCheckpoint {
  int64_t step = 0;
  double loss = 0, bits_per_byte = 0;
};
std::optional<BestCheckpoint> best_checkpoint(
    const std::string& run_directory);  // nothing if its checkpoint no longer exists
// `best.step` must be a checkpoint. The previous best checkpoint is removed if older than the newest `keep`
// checkpoints.
void set_best_checkpoint(const std::string& run_directory, const BestCheckpoint& best, int keep);

}  // namespace ingot
