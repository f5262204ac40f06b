#include "ingot/data/own_output.h"

#include "ingot/data/token_source.h"
#include "ingot/io/file.h"

namespace ingot {
namespace {

bool holds_checkpoint(const std::string& directory) {
  const auto has = [&](const char* name) { return exists(join_path(directory, name)); };
  return has("manifest.json") && has("model.safetensors");
}

bool is_run(const std::string& directory) {
  const auto has = [&](const char* name) { return exists(join_path(directory, name)); };
  return has("config.json") && (has("log.jsonl") || has(".lock"));
}

// The beginnings of tokenizer.json in the form of text/byte_bpe_json.cpp and of Hugging Face's tokenizers, and of a
// character vocabulary.
constexpr const char* kTokenizers[] = {"{\n  \"version\": \"1.0\",\n  \"truncation\":",
                                       "{\n  \"format\": \"ingot-char\""};

std::string file_kind(const std::string& path) {
  const std::string name = base_name(path);
  if (name.find(".tfevents.") != std::string::npos) return "TensorBoard's";
  if (name.ends_with(".safetensors")) return "weights";
  if (begins_with(path, "INGOTGPT") || begins_with(path, "INGOTARC")) return "a model";
  if (name.ends_with(".tokenizer") && exists(path.substr(0, path.rfind('.')))) return "a model's tokenizer";
  for (const char* beginning : kTokenizers)
    if (begins_with(path, beginning)) return "a tokenizer";
  if (begins_like_shard(path)) return "token shards";
  // `ingot demo` writes these two files beside its run.
  const bool of_demo = name == "report.html" || name == "loss.svg";
  if (of_demo && is_run(join_path(parent_path(path), "run"))) return "of a demo";
  return "";
}

}  // namespace

std::string own_output(const std::string& path) {
  if (!is_directory(path)) return file_kind(path);
  if (is_run(path)) return "a run";
  return holds_checkpoint(path) ? "a checkpoint" : "";
}

}  // namespace ingot
