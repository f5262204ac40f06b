#include "ingot/io/checkpoint.h"

#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>

#include "ingot/core/log.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"

namespace ingot {
namespace {

constexpr int kFormatVersion = 1;
constexpr const char* kModel = "model.safetensors";
constexpr const char* kOptimizer = "optimizer.safetensors";
constexpr const char* kState = "state.json";
constexpr const char* kManifest = "manifest.json";
constexpr const char* kBest = "best.json";
// Directories with this prefix are unfinished saves or half-removed checkpoints, and free to delete.
constexpr const char* kTemporary = ".tmp-";

struct FileRecord {
  std::string name, sha256;
  int64_t bytes = 0;
};
struct Manifest {
  int64_t step = 0;
  std::vector<FileRecord> files;  // model, optimizer, state
};

std::string directory_name(int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  return name;
}

// The step of a checkpoint directory's name, or -1 for any further name.
int64_t step_of(const std::string& name) {
  if (name.compare(0, 5, "step-") != 0 || name.size() < 13 || name.size() > 22) return -1;
  int64_t step = 0;
  for (size_t i = 5; i < name.size(); ++i) {
    if (name[i] < '0' || name[i] > '9') return -1;
    step = step * 10 + (name[i] - '0');
  }
  return directory_name(step) == name ? step : -1;
}

std::vector<int64_t> steps_in(const std::string& run_directory) {
  std::vector<int64_t> steps;
  for (const std::string& name : list_directory(run_directory))
    if (const int64_t step = step_of(name); step >= 0) steps.push_back(step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

void remove_leftovers(const std::string& run_directory) {
  for (const std::string& name : list_directory(run_directory))
    if (name.compare(0, std::strlen(kTemporary), kTemporary) == 0) remove_tree(join_path(run_directory, name));
}

// The only valid text of a manifest with this content, so comparing texts finds every changed byte.
std::string render(const Manifest& manifest) {
  OrderedJson files = OrderedJson::object();
  for (const FileRecord& f : manifest.files) files[f.name] = {{"bytes", f.bytes}, {"sha256", f.sha256}};
  OrderedJson json = {
      {"format", "ingot checkpoint"}, {"version", kFormatVersion}, {"step", manifest.step}, {"files", files}};
  json["manifest_sha256"] = sha256(write_json(json));
  return write_json(json, 2) + "\n";
}

Manifest read_manifest(const std::string& directory) {
  const std::string path = join_path(directory, kManifest);
  const std::string text = read_file(path, 1 << 20);
  const Json json = parse_json(text, path);
  Fields fields(json, path);
  std::string format, self;
  int64_t version = 0;
  Manifest manifest;
  fields.require("format", format);
  fields.require("version", version);
  if (format != "ingot checkpoint")
    fail(ErrorCode::bad_data, path, ": found format \"", format, "\", expected \"ingot checkpoint\"");
  if (version != kFormatVersion)
    fail(ErrorCode::bad_data, path, ": found checkpoint version ", version, ", expected ", kFormatVersion);
  fields.require("step", manifest.step);
  fields.require("manifest_sha256", self);
  Fields files = fields.object("files");
  for (const char* name : {kModel, kOptimizer, kState}) {
    FileRecord record{name, "", 0};
    Fields entry = files.object(name);
    entry.require("bytes", record.bytes);
    entry.require("sha256", record.sha256);
    entry.finish();
    manifest.files.push_back(record);
  }
  files.finish();
  fields.finish();
  if (render(manifest) != text)
    fail(ErrorCode::bad_data, path, ": the text does not match its own checksum: the file was changed");
  return manifest;
}

void verify(const std::string& directory, const Manifest& manifest) {
  for (const FileRecord& f : manifest.files) {
    const std::string path = join_path(directory, f.name);
    if (!exists(path)) fail(ErrorCode::bad_data, path, ": the file is missing, expected ", f.bytes, " bytes");
    if (const int64_t found = file_size(path); found != f.bytes)
      fail(ErrorCode::bad_data, path, ": found ", found, " bytes, expected ", f.bytes);
    if (const std::string found = sha256_of_file(path); found != f.sha256)
      fail(ErrorCode::bad_data, path, ": found SHA-256 ", found, ", expected ", f.sha256, ": the file was changed");
  }
}

FileRecord write_one(const std::string& directory, const char* name, const std::function<std::string(File&)>& write) {
  File file = File::create(join_path(directory, name));
  FileRecord record{name, write(file), 0};
  file.sync();
  record.bytes = file.size();
  file.close();
  return record;
}

FileRecord write_text(const std::string& directory, const char* name, const std::string& text) {
  return write_one(directory, name, [&](File& file) {
    file.write(text);
    return sha256(text);
  });
}

std::string write_files(const std::string& directory, int64_t step, const CheckpointContent& content) {
  remove_tree(directory);
  create_directories(directory);
  Manifest manifest;
  manifest.step = step;
  manifest.files.push_back(write_one(directory, kModel, [&](File& f) {
    return write_safetensors(f, content.model, {{"format", "pt"}});
  }));
  manifest.files.push_back(
      write_one(directory, kOptimizer, [&](File& f) { return write_safetensors(f, content.optimizer); }));
  manifest.files.push_back(write_text(directory, kState, content.state_json));
  const std::string text = render(manifest);
  write_text(directory, kManifest, text);
  sync_directory(directory);
  return text;
}

// Renames the finished directory to its final name. If a checkpoint of the same step exists, the two directories
// exchange names in a single step, and the old checkpoint is removed later.
void put_in_place(const std::string& from, const std::string& to) {
  if (!exists(to)) return rename_path(from, to);
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return;
  const std::string aside = from + "-old";  // for file systems without an exchange of names
  remove_tree(aside);
  rename_path(to, aside);
  rename_path(from, to);
}

void remove_checkpoint(const std::string& run_directory, int64_t step) {
  // Under a temporary name first: an interrupted removal must not look like a damaged checkpoint.
  const std::string aside = join_path(run_directory, kTemporary + directory_name(step) + "-old");
  rename_path(join_path(run_directory, directory_name(step)), aside);
  remove_tree(aside);
}

void prune(const std::string& run_directory, int64_t saved, int keep) {
  const std::vector<int64_t> steps = steps_in(run_directory);
  const auto best = best_checkpoint(run_directory);
  for (size_t i = 0; i + size_t(keep) < steps.size(); ++i)
    if (steps[i] != saved && (!best || steps[i] != best->step)) remove_checkpoint(run_directory, steps[i]);
}

// The newest complete checkpoint before `step`, or nothing; with `log`, errors in damaged checkpoints are logged.
std::optional<Checkpoint> newest_whole_before(const std::string& run_directory, int64_t step, bool log) {
  const std::vector<int64_t> steps = steps_in(run_directory);
  for (auto s = steps.rbegin(); s != steps.rend(); ++s)
    if (*s < step) try {
        return read_checkpoint(join_path(run_directory, directory_name(*s)));
      } catch (const Error& e) {
        if (log) log_warn("passing over a damaged checkpoint: ", e.what());
      }
  return std::nullopt;
}

Checkpoint read_newest(const std::string& run_directory, int64_t step) {
  try {
    return read_checkpoint(join_path(run_directory, directory_name(step)));
  } catch (const Error& e) {
    const auto whole = newest_whole_before(run_directory, step, false);
    if (!whole) throw;
    throw DamagedCheckpoint(e.code, std::string(e.what()) + "; " + whole->path() + " before it is whole");
  }
}

}  // namespace

std::string save_checkpoint(const std::string& run_directory, int64_t step, const CheckpointContent& content,
                            int keep) {
  INGOT_CHECK_GE(step, 0, "checkpoint: step");
  INGOT_CHECK_GE(keep, 1, "checkpoint: how many to keep");
  const std::string target = join_path(run_directory, directory_name(step));
  const std::string temporary = join_path(run_directory, kTemporary + directory_name(step));
  bool placed = false, replaced = false;
  try {
    create_directories(run_directory);
    remove_leftovers(run_directory);
    const std::string manifest = write_files(temporary, step, content);
    replaced = exists(target);
    put_in_place(temporary, target);
    placed = true;
    sync_directory(run_directory);
    // The save counts as successful only when the written files can be read back.
    verify(target, read_manifest(target));
    if (read_file(join_path(target, kManifest)) != manifest)
      fail(ErrorCode::io, target, ": holds another checkpoint than the one just written");
  } catch (const Error& e) {
    try {
      remove_tree(temporary);
      if (placed && !replaced) remove_tree(target);  // an incomplete checkpoint would prevent a resume
    } catch (const Error& left) { log_warn("cannot clean up after a failed save: ", left.what()); }
    if (e.code == ErrorCode::invalid_argument) throw;
    throw Error(ErrorCode::io, "checkpoint of step " + std::to_string(step) + " not saved: " + e.what());
  }
  try {  // the checkpoint is safe, so an error with old checkpoints must not look like a failed save
    remove_leftovers(run_directory);
    prune(run_directory, step, keep);
  } catch (const Error& e) { log_warn("cannot remove old checkpoints: ", e.what()); }
  return target;
}

Checkpoint read_checkpoint(const std::string& path) {
  if (!is_directory(path)) fail(ErrorCode::not_found, path, ": found no such directory, expected a checkpoint");
  if (!exists(join_path(path, kManifest)))
    fail(ErrorCode::bad_data, join_path(path, kManifest), ": the file is missing: this is not a whole checkpoint");
  const Manifest manifest = read_manifest(path);
  if (const int64_t named = step_of(base_name(path)); named >= 0 && named != manifest.step)
    fail(ErrorCode::bad_data, path, ": found step ", manifest.step, " in ", kManifest, ", expected ", named,
         " by the directory's name");
  verify(path, manifest);
  Checkpoint checkpoint;
  checkpoint.path_ = path;
  checkpoint.run_directory_ = parent_path(path);
  checkpoint.step_ = manifest.step;
  checkpoint.state_json_ = read_file(join_path(path, kState));
  return checkpoint;
}

std::optional<Checkpoint> latest_checkpoint(const std::string& run_directory) {
  if (!is_directory(run_directory)) return std::nullopt;
  remove_leftovers(run_directory);
  const std::vector<int64_t> steps = steps_in(run_directory);
  if (steps.empty()) return std::nullopt;
  return read_newest(run_directory, steps.back());
}

std::optional<Checkpoint> last_good_checkpoint(const std::string& run_directory) {
  if (!is_directory(run_directory)) return std::nullopt;
  remove_leftovers(run_directory);
  return newest_whole_before(run_directory, INT64_MAX, true);
}

Checkpoint named_checkpoint(const std::string& run_directory, const std::string& name) {
  const std::string digits = name.starts_with("step-") ? name.substr(5) : name;
  std::string all;
  for (const int64_t step : is_directory(run_directory) ? steps_in(run_directory) : std::vector<int64_t>()) {
    all += (all.empty() ? "" : ", ") + directory_name(step);
    if (!digits.empty() && digits.find_first_not_of("0123456789") == std::string::npos && digits.size() < 18 &&
        std::stoll(digits) == step)
      return read_checkpoint(join_path(run_directory, directory_name(step)));
  }
  fail(ErrorCode::not_found, run_directory, ": found no checkpoint '", name, "', expected ",
       all.empty() ? "a run that has some" : "one of " + all);
}

Checkpoint open_checkpoint(const std::string& directory) {
  if (const std::string run = parent_path(directory); base_name(directory) == "best" && !exists(directory))
    if (const auto best = best_checkpoint(run)) return read_checkpoint(join_path(run, directory_name(best->step)));
  if (!exists(directory))
    fail(ErrorCode::not_found, directory,
         ": found no such file or directory, expected a run, a checkpoint or an artifact");
  if (!is_directory(directory))
    fail(ErrorCode::bad_data, directory, ": found ", found_instead(directory),
         ", expected a run, a checkpoint or an artifact");
  if (exists(join_path(directory, kManifest)) || step_of(base_name(directory)) >= 0) return read_checkpoint(directory);
  const std::vector<int64_t> steps = steps_in(directory);
  if (!steps.empty()) return read_newest(directory, steps.back());
  const std::string found = found_instead(directory);
  const bool other = found.starts_with("a model");
  fail(other ? ErrorCode::unsupported : ErrorCode::not_found, directory, ": found ", found, ", expected ",
       other ? "GPT-OSS, Llama, Mistral, Qwen, Gemma (docs/models.md) or a run of `ingot train`"
             : "directories like " + directory_name(1000),
       found == "no checkpoint" ? " of a run, or config.json and safetensors of a published model" : "");
}

std::string found_instead(const std::string& path) {
  if (!exists(path)) return "no such file or directory";
  if (!is_directory(path)) {
    const int64_t bytes = file_size(path);
    if (bytes == 0) return "an empty file";
    return detail::concat("a file of ", bytes, " bytes of an unknown format");
  }
  const std::string config = join_path(path, "config.json");
  Json json;
  try {
    if (exists(config)) json = read_json_file(config);
  } catch (const Error&) {}  // an unreadable file is no model
  if (!json.is_object()) return "no checkpoint";
  if (json.contains("model") && json.contains("train")) return "a run without a checkpoint";
  const Json type =
      json.contains("model_type") ? json["model_type"]
      : json.contains("architectures") && json["architectures"].is_array() && !json["architectures"].empty()
          ? json["architectures"][0]
          : Json();
  return type.is_string() ? "a model of the architecture '" + type.get<std::string>().substr(0, 60) + "'"
                          : "no checkpoint";
}

void set_aside_after(const std::string& run_directory, int64_t step) {
  const auto best = best_checkpoint(run_directory);
  for (const int64_t later : steps_in(run_directory)) {
    if (later <= step) continue;
    std::string aside = join_path(run_directory, "aside-" + directory_name(later));
    for (int again = 2; exists(aside); ++again)
      aside = join_path(run_directory, "aside-" + directory_name(later) + "-" + std::to_string(again));
    rename_path(join_path(run_directory, directory_name(later)), aside);
    log_info("set aside as ", aside);
  }
  if (!best || best->step > step) remove_file(join_path(run_directory, kBest));
  sync_directory(run_directory);
}

std::optional<BestCheckpoint> best_checkpoint(const std::string& run_directory) {
  const std::string path = join_path(run_directory, kBest);
  if (!exists(path)) return std::nullopt;
  const Json json = parse_json(read_file(path, 1 << 16), path);
  Fields fields(json, path);
  BestCheckpoint best;
  fields.require("step", best.step);
  fields.require("loss", best.loss);
  fields.require("bits_per_byte", best.bits_per_byte);
  fields.finish();
  if (!exists(join_path(run_directory, directory_name(best.step)))) return std::nullopt;
  return best;
}

void set_best_checkpoint(const std::string& run_directory, const BestCheckpoint& best, int keep) {
  const OrderedJson json = {{"step", best.step}, {"loss", best.loss}, {"bits_per_byte", best.bits_per_byte}};
  write_file(join_path(run_directory, kBest), write_json(json, 2) + "\n");
  prune(run_directory, best.step, keep);
}

void Checkpoint::load_model(const std::vector<NamedTensor>& into) const {
  SafetensorsFile(join_path(path_, kModel)).read_all(into);
}
void Checkpoint::load_optimizer(const std::vector<NamedTensor>& into) const {
  SafetensorsFile(join_path(path_, kOptimizer)).read_all(into);
}

}  // namespace ingot
