#include "ingot/engines/train/run/run_directory.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/check.h"
#include "ingot/core/log.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt/trained.h"

namespace ingot {
namespace {

std::string text_of(const RunConfig& config) { return to_json(config) + "\n"; }

}  // namespace

std::optional<Checkpoint> RunDirectory::find(const ResumeFrom& from) {
  create_directories(directory_);
  lock_ = Lock(directory_);
  if (exists(path("config.json"))) check_same_run();
  if (!from.name.empty()) return named_checkpoint(directory_, from.name);
  return from.last_good ? last_good_checkpoint(directory_) : latest_checkpoint(directory_);
}

// A resumed run may have a different length, and its initial model may have moved. All options with an effect on the
// run's numbers must be the same.
void RunDirectory::check_same_run() const {
  const std::string where = path("config.json");
  // Parsed and written again, so options unknown to an earlier version get their defaults.
  Json before = parse_json(to_json(run_config_from_json(read_file(where), where)), where);
  Json now = parse_json(text_of(config_), "the new configuration");
  for (Json* j : {&before, &now})
    for (const char* key : {"steps", "seconds", "reserve_seconds", "eval_every", "checkpoint_every", "log_every",
                            "keep_checkpoints", "keep_best", "keep_activations", "cuda_graphs", "init_from"})
      (*j)["train"].erase(key);
  // The file of a tokenizer may have been renamed or moved: the tokenizers themselves are compared below.
  const auto is_file = [](const Json& j) {
    return j["train"]["tokenizer"] != "bpe" && j["train"]["tokenizer"] != "char";
  };
  if (is_file(before) && is_file(now)) before["train"]["tokenizer"] = now["train"]["tokenizer"];
  const Json patch = Json::diff(before, now);
  if (!patch.empty()) {
    std::string name = patch[0]["path"].get<std::string>();
    const Json::json_pointer at(name);
    const auto value = [&](const Json& j) { return j.contains(at) ? j.at(at).dump() : std::string("none"); };
    name.erase(0, 1);
    std::replace(name.begin(), name.end(), '/', '.');
    fail(ErrorCode::usage, where, ": found ", name, " = ", value(before), ", expected ", value(now),
         ", which the preset and the options give; a run continues with its own configuration, and another run needs "
         "another directory");
  }
  const std::string file = path(data_.tokenizer_name.c_str());
  if (load_tokenizer(file)->hash() != data_.tokenizer->hash())
    fail(ErrorCode::bad_data, file,
         ": found a tokenizer that is not the one of this data, expected the same one to resume");
}

void RunDirectory::write_new() const {
  if (exists(path("config.json"))) return;
  write_file(path(data_.tokenizer_name.c_str()), data_.tokenizer_file);
  write_file(path("config.json"), text_of(config_));  // written last, because its presence marks the directory as a run
}

void RunDirectory::write_config() const {
  if (read_file(path("config.json")) != text_of(config_)) write_file(path("config.json"), text_of(config_));
}

std::string RunDirectory::save(int64_t step, const CheckpointContent& content) const {
  return save_checkpoint(directory_, step, content, int(config_.train.keep_checkpoints));
}

bool RunDirectory::is_best(const Score& score) const {
  if (directory_.empty() || !config_.train.keep_best || !std::isfinite(score.loss)) return false;
  try {
    const auto best = best_checkpoint(directory_);
    return !best || score.loss < best->loss;
  } catch (const Error& e) {
    log_warn("starting over with the best checkpoint: ", e.what());
    return true;
  }
}

void RunDirectory::note_best(int64_t step, const Score& score) const {
  if (directory_.empty() || !config_.train.keep_best) return;
  try {
    set_best_checkpoint(directory_, {.step = step, .loss = score.loss, .bits_per_byte = score.bits_per_byte},
                        int(config_.train.keep_checkpoints));
  } catch (const Error& e) { log_warn("the best checkpoint is not noted: ", e.what()); }
}

}  // namespace ingot
