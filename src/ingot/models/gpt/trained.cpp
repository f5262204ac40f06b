#include "ingot/models/gpt/trained.h"

#include "ingot/io/checkpoint.h"
#include "ingot/io/codecs/sha256.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt/artifact/artifact.h"

namespace ingot {
namespace {

// The part of a run's configuration for generation; the trainer reads the rest (engines/train/run/run_config.h).
void read_config(const std::string& text, const std::string& where, TrainedModel& into) {
  const Json json = parse_json(text, where);
  Fields all(json, where, ErrorCode::usage);
  if (const Json* model = all.take("model")) into.config = gpt_config_from_json(model->dump(), where + ": model");
  std::string products = "fp32";
  if (all.has("train")) all.object("train").read("products", products);
  into.products = products_named(products);
}

std::string tokenizer_of(const std::string& run) {
  const std::string json = join_path(run, "tokenizer.json"), model = join_path(run, "tokenizer.model");
  return exists(model) && !exists(json) ? model : json;
}

void check_tokenizer(const TrainedModel& t, uint32_t hash) {
  if (hash != t.tokenizer->hash() || t.tokenizer->vocab_size() != t.config.vocab)
    fail(ErrorCode::bad_data, t.tokenizer_file, ": found a tokenizer of ", t.tokenizer->vocab_size(),
         " tokens with hash ", t.tokenizer->hash(), ", expected the model's, ", t.config.vocab, " tokens with hash ",
         hash);
}

TrainedModel load_artifact(const std::string& path) {
  const Artifact a = parse_artifact(read_file(path), path);
  TrainedModel t;
  t.run_config = a.run_config;
  read_config(a.run_config, path, t);
  t.looping = a.looping;
  t.step = a.step;
  t.checkpoint = path;
  t.tokenizer_file = artifact_tokenizer(path);
  t.tokenizer = load_tokenizer(t.tokenizer_file);
  check_tokenizer(t, a.tokenizer_hash);
  const ParameterLayout layout(t.config);
  t.memory = Arena(layout.padded_count() * 4);
  t.weights = t.memory.take(DType::f32, {layout.padded_count()});
  dequantize(a, layout, t.weights);
  t.parameter_hash = parameter_hash(layout, t.weights);
  return t;
}

}  // namespace

Products products_named(const std::string& name) {
  if (name != "fp32" && name != "bf16")
    fail(ErrorCode::usage, "train.products: found '", name, "', expected fp32 or bf16");
  return name == "bf16" ? Products::bf16 : Products::fp32;
}

void require_adapters_of(const TrainedModel& model, const SafetensorsFile& adapters) {
  const auto& metadata = adapters.header().metadata;
  const auto made = metadata.find("parameter_hash");
  if (made != metadata.end() && made->second != model.parameter_hash)
    fail(ErrorCode::bad_data, adapters.path(), ": found adapters of a model with parameter hash ",
         made->second.substr(0, 12), ", expected ", model.parameter_hash.substr(0, 12), ", that of ", model.checkpoint);
}

std::vector<NamedTensor> named_tensors(const ParameterLayout& layout, const Tensor& flat, const std::string& prefix) {
  std::vector<NamedTensor> all;
  for (const Parameter& p : layout.all()) all.push_back({prefix + p.name, layout.view(flat, p)});
  return all;
}

std::string parameter_hash(const ParameterLayout& layout, const Tensor& flat) {
  Sha256 hash;
  for (const Parameter& p : layout.all()) {
    const Tensor t = layout.view(flat, p);
    hash.update({static_cast<const char*>(t.data), size_t(t.bytes())});
  }
  return hash.hex();
}

bool is_trained(const std::string& directory) {
  return is_directory(directory) || is_artifact(directory) ||
         (base_name(directory) == "best" && is_directory(parent_path(directory)));
}

std::shared_ptr<const Tokenizer> trained_tokenizer(const std::string& directory) {
  if (is_artifact(directory)) return load_tokenizer(artifact_tokenizer(directory));
  const bool is_run = exists(join_path(directory, "config.json"));
  return load_tokenizer(tokenizer_of(is_run ? directory : parent_path(directory)));
}

TrainedModel load_trained(const std::string& directory) {
  if (is_artifact(directory)) return load_artifact(directory);
  TrainedModel t;
  const Checkpoint found = open_checkpoint(directory);
  const std::string run = found.run_directory(), config_file = join_path(run, "config.json");
  t.run_config = read_file(config_file);
  read_config(t.run_config, config_file, t);
  t.tokenizer_file = tokenizer_of(run);
  t.tokenizer = load_tokenizer(t.tokenizer_file);
  const std::string where = found.path() + "/state.json";
  const Json state = parse_json(found.state_json(), where);
  Fields fields(state, where);
  uint32_t hash = 0;
  fields.require("step", t.step);
  fields.require("looping", t.looping);
  fields.require("tokenizer_hash", hash);
  if (state.contains("data_fingerprint")) fields.require("data_fingerprint", t.data_fingerprint);
  check_tokenizer(t, hash);
  const ParameterLayout layout(t.config);
  t.memory = Arena(layout.padded_count() * 4);
  t.weights = t.memory.take(DType::f32, {layout.padded_count()});
  found.load_model(named_tensors(layout, t.weights));
  t.checkpoint = found.path();
  t.parameter_hash = parameter_hash(layout, t.weights);
  return t;
}

}  // namespace ingot
