// ingot info: describes a model or a run.
#include <algorithm>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/progress.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/file.h"
#include "ingot/io/formats/archive.h"
#include "ingot/io/formats/gguf.h"
#include "ingot/io/formats/iris.h"
#include "ingot/io/formats/safetensors_set.h"
#include "ingot/io/json.h"
#include "ingot/models/checkpoint/stored_tensors.h"
#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/decode/weights/builder.h"
#include "ingot/models/each_weight.h"
#include "ingot/models/families/family.h"
#include "ingot/models/gpt/artifact/artifact.h"
#include "ingot/models/gpt/config/config.h"
#include "ingot/models/gpt/config/parameters.h"
#include "ingot/models/gpt/config/presets.h"
#include "ingot/models/gpt/config/program.h"
#include "ingot/models/gpt_oss/archive.h"
#include "ingot/models/gpt_oss/synthetic.h"
#include "ingot/models/gpt_oss/weights.h"

namespace ingot::cli {
namespace {

const char* name_of(ParameterKind kind) {
  switch (kind) {
    case ParameterKind::matrix: return "matrix";
    case ParameterKind::embedding: return "embedding";
    case ParameterKind::head: return "head";
    case ParameterKind::scalar: return "scalar";
  }
  return "?";
}

// A value of a configuration; a list of equal values, such as one per layer, as the value and its count.
std::string shown(const OrderedJson& value) {
  if (value.is_string()) return value.get<std::string>();
  const bool repeated = value.is_array() && value.size() > 1 &&
                        std::all_of(value.begin(), value.end(), [&](const OrderedJson& v) { return v == value[0]; });
  return repeated ? shown(value[0]) + ", " + std::to_string(value.size()) + " times" : value.dump();
}
void print_config(const OrderedJson& config) {
  size_t longest = 0;
  for (const auto& [key, value] : config.items()) longest = std::max(longest, key.size());
  write_out("config\n");
  for (const auto& [key, value] : config.items())
    write_out("  " + key + std::string(longest + 2 - key.size(), ' ') + shown(value) + "\n");
}

OrderedJson describe(const GptConfig& config) {
  const ParameterLayout layout(config);
  OrderedJson report;
  report["parameters"] = layout.count();
  for (ParameterKind kind :
       {ParameterKind::matrix, ParameterKind::embedding, ParameterKind::head, ParameterKind::scalar}) {
    int64_t count = 0;
    for (const Parameter& p : layout.all())
      if (p.kind == kind) count += p.shape.numel();
    report["parameters_by_kind"][name_of(kind)] = count;
  }
  report["tensors"] = layout.all().size();
  report["weight_bytes"] = {{"f32", layout.count() * 4}, {"bf16", layout.count() * 2}};
  report["applications"] = layer_program(config, config.has_loop()).layer_calls.size();
  report["config"] = OrderedJson::parse(to_json(config));
  return report;
}

void print(const std::string& what, const OrderedJson& r) {
  const auto row = [](const std::string& name, const std::string& value) {
    write_out("  " + name + std::string(name.size() < 23 ? 23 - name.size() : 1, ' ') + value + "\n");
  };
  write_out(what + "\n");
  row("parameters", with_commas(r["parameters"].get<int64_t>()));
  for (const auto& [kind, count] : r["parameters_by_kind"].items()) row("  " + kind, with_commas(count.get<int64_t>()));
  const int64_t layers = r["config"]["layers"].get<int64_t>(), calls = r["applications"].get<int64_t>();
  row("layers",
      std::to_string(layers) + (calls == layers ? "" : ", executed " + std::to_string(calls) + " times in all"));
  row("size", format_bytes(r["weight_bytes"]["f32"].get<double>()) + " in fp32, " +
                  format_bytes(r["weight_bytes"]["bf16"].get<double>()) + " in bf16");
  if (r.contains("checkpoint")) {
    row("checkpoint", r["checkpoint"].get<std::string>() + ", step " + std::to_string(r["step"].get<int64_t>()));
    if (r.contains("artifact"))
      row("artifact", "version " + std::to_string(r["artifact"]["version"].get<int>()) + ", coder " +
                          r["artifact"]["coder"].get<std::string>() + ", " +
                          with_commas(r["artifact"]["bytes"].get<int64_t>()) + " bytes");
    row("parameter hash", r["parameter_hash"].get<std::string>());
    if (r.contains("best"))
      row("best by held-out loss", "step " + std::to_string(r["best"]["step"].get<int64_t>()) + ", " +
                                       fixed(r["best"]["loss"].get<double>(), 4));
    row("tokenizer", r["tokenizer"]["kind"].get<std::string>() + ", " +
                         with_commas(r["tokenizer"]["vocab"].get<int64_t>()) + " tokens");
  }
  print_config(r["config"]);
}

// --- GPT-OSS: described from the headers alone, or from the name of random weights
int64_t parameters_of(const GptOssConfig& c) {
  const int64_t attention =
      c.hidden * (2 * c.q_width() + 2 * c.kv_width()) + c.heads + (c.attention_bias ? c.qkv_width() + c.hidden : 0);
  const int64_t expert = 3 * c.hidden * c.intermediate + 2 * c.intermediate + c.hidden;
  const int64_t layer = attention + c.experts * (expert + c.hidden + 1) + 2 * c.hidden;
  return c.layers * layer + (c.tied_embeddings ? 1 : 2) * c.vocab * c.hidden + c.hidden;
}
// For a GGUF file also reports the number of tensors of each type.
void describe_gguf(const std::string& path, OrderedJson& r) {
  const GgufSet set(path);
  int64_t tensors = 0, bytes = 0;
  std::map<std::string, int64_t> types;
  for (const auto& file : set.files()) {
    bytes += file->file().size();
    for (const SafetensorsEntry& e : file->entries()) ++types[e.dtype], ++tensors;
  }
  r["tensors"] = tensors;
  r["files"] = set.files().size();
  r["bytes"] = bytes;
  r["types"] = types;
}
// Reports the number of tensors and their bytes; for an archive also its version and the format of each kind of matrix.
void describe_files(const std::string& given, OrderedJson& r) {
  const std::string path = checkpoint_source(given);
  if (ArchiveFile::is_one(path)) {
    const ArchiveFile file(path);
    r["archive_version"] = kArchiveVersion;
    const Json about = Json::parse(file.about());
    for (const char* key : {"dense", "experts"})
      if (about.contains(key)) r[key] = about.at(key);
    r["tensors"] = file.entries().size();
    r["files"] = 1;
    r["bytes"] = file.file_bytes();
  } else if (GgufFile::is_one(path)) {
    describe_gguf(path, r);
  } else if (IrisFile::is_one(path)) {
    r["tensors"] = IrisFile(path).entries().size();
    r["files"] = 1;
    r["bytes"] = file_size(path);
  } else {
    const SafetensorsSet set(path);
    r["tensors"] = set.tensors().size();
    r["files"] = set.files();
    r["bytes"] = set.bytes();
  }
}
// `weights` are the bytes in memory; `describe_source` adds the keys of the place from which the weights come.
template <class DescribeSource>
OrderedJson describe_gpt_oss(const GptOssConfig& config, int64_t weights, DescribeSource&& describe_source) {
  const int64_t inactive = config.experts - config.experts_per_token;
  const int64_t expert = 3 * config.hidden * config.intermediate + 2 * config.intermediate + config.hidden;
  constexpr int64_t kContext = 4096;
  const int64_t context = std::min(kContext, config.context);
  OrderedJson r;
  r["parameters"] = parameters_of(config);
  r["parameters_per_token"] = parameters_of(config) - config.layers * inactive * expert;
  describe_source(r);
  r["memory_bytes"] = {{"weights", weights},
                       {"context", context},
                       {"with_context", weights + decoder_bytes(config, config.layers, {.context = context})}};
  r["config"] = OrderedJson::parse(to_json(config));
  return r;
}
OrderedJson describe_gpt_oss(const std::string& path) {
  const GptOssConfig config = read_gpt_oss_config(path);
  const int64_t weights = gpt_oss_weight_bytes(path, config);  // also checks every tensor's name, shape and type
  return describe_gpt_oss(config, weights, [&](OrderedJson& r) { describe_files(path, r); });
}
OrderedJson describe_synthetic(const SyntheticModel& model) {
  const GptOssConfig config = synthetic_gpt_oss(model.size);
  const DecoderWeights w = decode::shapes_of(config, model.dense, WeightFormat::mxfp4);
  return describe_gpt_oss(config, bytes_of_weights(w, false), [&](OrderedJson& r) {
    r["random_weights"] = true;
    r["dense"] = name_of(model.dense), r["experts"] = name_of(WeightFormat::mxfp4);
  });
}
// Describes a model of a family other than GPT-OSS; the number of parameters is the number of elements of its tensors.
OrderedJson describe_family(const std::string& path) {
  const ArchivedModel model = archived_family(path);
  const DecoderSpec& spec = model.spec;
  const DecoderWeights w = family_shapes(path, spec);
  const auto numbers = [](const WeightMatrix& m) { return m.rows() * m.cols() * (m.is_bank() ? m.data.size(0) : 1); };
  int64_t all = 0, inactive = 0;
  for_each_weight(
      w, spec.tied_embeddings, [&](const WeightMatrix& m) { all += numbers(m); },
      [&](const Tensor& t) { all += t.numel(); });
  for (const DecoderLayer& l : w.layers)
    if (l.router)
      inactive += (numbers(l.gate_up) + numbers(l.down)) / spec.experts * (spec.experts - spec.experts_per_token);
  const int64_t context = std::min<int64_t>(4096, spec.context), weights = family_weight_bytes(path, spec);
  OrderedJson r;
  r["parameters"] = all;
  r["parameters_per_token"] = all - inactive;
  describe_files(path, r);
  r["memory_bytes"] = {{"weights", weights},
                       {"context", context},
                       {"with_context", weights + decoder_bytes(spec, spec.layers, {.context = context})}};
  r["config"] = OrderedJson::parse(model.description);
  return r;
}
void print_gpt_oss(const std::string& what, const OrderedJson& r) {
  const auto row = [](const std::string& name, const std::string& value) {
    write_out("  " + name + std::string(name.size() < 24 ? 24 - name.size() : 1, ' ') + value + "\n");
  };
  const OrderedJson& memory = r["memory_bytes"];
  write_out(what + "\n");
  row("parameters", with_commas(r["parameters"].get<int64_t>()));
  row("  used for each token", with_commas(r["parameters_per_token"].get<int64_t>()));
  if (r.contains("random_weights"))
    row("weights", "random, dense " + r["dense"].get<std::string>() + ", experts " + r["experts"].get<std::string>());
  else
    row("tensors", with_commas(r["tensors"].get<int64_t>()) + " in " + counted(r["files"].get<int64_t>(), "file") +
                       ", " + format_bytes(r["bytes"].get<double>()));
  if (r.contains("archive_version"))
    row("archive", "version " + std::to_string(r["archive_version"].get<int>()) + ", dense " +
                       r["dense"].get<std::string>() +
                       (r["config"].value("experts", 1) > 0 ? ", experts " + r["experts"].get<std::string>() : ""));
  if (r.contains("types")) {
    std::string types;
    for (const auto& [type, count] : r["types"].items())
      types += (types.empty() ? "" : ", ") + with_commas(count.get<int64_t>()) + " of " + type;
    row("types", types);
  }
  row("memory", format_bytes(memory["weights"].get<double>()) + " for weights, " +
                    format_bytes(memory["with_context"].get<double>()) + " with a context of " +
                    with_commas(memory["context"].get<int64_t>()));
  print_config(r["config"]);
}

}  // namespace

void add_info(Command& root) {
  struct InfoOptions {
    std::string preset = "demo", run, model;
    bool json = false;
  };
  Command& c = root.add("info", "Describes a model: sizes, parameters, configuration");
  auto o = std::make_shared<InfoOptions>();
  c.text("RUN", o->run,
         "a run of `ingot train`, one of its checkpoints, an artifact of `ingot export`, a published model (a "
         "checkpoint's directory, an archive, a GGUF or an .iris file), or random weights such as synthetic:20b "
         "(default: the preset)");
  c.choice("--preset NAME", o->preset, preset_names(), "the preset to describe (default: demo)");
  c.section("model", o->model, to_json(GptConfig{}));
  c.flag("--json", o->json, "print one JSON object");
  c.examples(R"(  ingot info --preset golf
  ingot info --preset golf --json
  ingot info --preset nano --set model.layers=12
  ingot info runs/a
  ingot info gpt-oss-20b
  ingot info synthetic:120b:fp8)");
  c.run([o, &c] {
    if (!o->run.empty()) c.refuse_given({"preset"}, "RUN, which has a configuration");
    if (!o->run.empty() && o->model != "{}")
      fail(ErrorCode::usage, "found RUN and keys of a model, expected one of them: the run has a configuration");
    OrderedJson report;
    const auto synthetic = synthetic_model(o->run);
    if (synthetic || (!o->run.empty() && (is_family(o->run) || is_gpt_oss(o->run)))) {
      report = synthetic           ? describe_synthetic(*synthetic)
               : is_family(o->run) ? describe_family(o->run)
                                   : describe_gpt_oss(o->run);
      return o->json ? write_out(show_json(report) + "\n") : print_gpt_oss(o->run, report);
    }
    if (o->run.empty()) {
      report = describe(resolve_config(o->preset, o->model, "{}").model);
    } else {
      model_kind_of(o->run);  // refuses a path that holds no model of any kind
      const TrainedModel model = load_trained(o->run);
      report = describe(model.config);
      report["checkpoint"] = model.checkpoint;
      report["step"] = model.step;
      const std::string run = parent_path(model.checkpoint);
      if (is_artifact(o->run)) {
        const ArtifactForm form = artifact_form(read_file(o->run), o->run);
        report["artifact"] = {{"version", form.version}, {"coder", name_of(form.coder)}, {"bytes", file_size(o->run)}};
      } else if (const auto best = best_checkpoint(run)) {
        report["best"] = {{"step", best->step}, {"loss", best->loss}, {"bits_per_byte", best->bits_per_byte}};
      }
      report["parameter_hash"] = model.parameter_hash;
      report["tokenizer"] = {{"kind", model.tokenizer->kind()}, {"vocab", model.tokenizer->vocab_size()}};
    }
    if (o->json)
      write_out(show_json(report) + "\n");
    else
      print(o->run.empty() ? "preset " + o->preset : o->run, report);
  });
}

}  // namespace ingot::cli
