// ingot info: what a model is made of.
#include "ingot/apps/cli/cli.h"
#include "ingot/apps/cli/runs.h"
#include "ingot/core/progress.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt/config.h"
#include "ingot/models/gpt/parameters.h"
#include "ingot/models/gpt/program.h"

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
  report["applications"] = layer_program(config, config.has_loop()).applications.size();
  report["config"] = OrderedJson::parse(to_json(config));
  return report;
}

void print(const std::string& what, const OrderedJson& r) {
  const auto row = [](const std::string& name, const std::string& value) {
    write_out("  " + name + std::string(name.size() < 16 ? 16 - name.size() : 1, ' ') + value + "\n");
  };
  write_out(what + "\n");
  row("parameters", with_commas(r["parameters"].get<int64_t>()));
  for (const auto& [kind, count] : r["parameters_by_kind"].items()) row("  " + kind, with_commas(count.get<int64_t>()));
  row("layers", std::to_string(r["config"]["layers"].get<int64_t>()) + ", applied " +
                    std::to_string(r["applications"].get<int64_t>()) + " times");
  row("size", format_bytes(r["weight_bytes"]["f32"].get<double>()) + " in fp32, " +
                  format_bytes(r["weight_bytes"]["bf16"].get<double>()) + " in bf16");
  if (r.contains("checkpoint")) {
    row("checkpoint", r["checkpoint"].get<std::string>() + ", step " + std::to_string(r["step"].get<int64_t>()));
    row("parameter hash", r["parameter_hash"].get<std::string>());
    row("tokenizer", r["tokenizer"]["kind"].get<std::string>() + ", " +
                         with_commas(r["tokenizer"]["vocab"].get<int64_t>()) + " tokens");
  }
  write_out("config\n");
  for (const auto& [key, value] : r["config"].items())
    row(key, value.is_string() ? value.get<std::string>() : value.dump());
}

}  // namespace

void add_info(Command& root) {
  struct InfoOptions {
    std::string preset = "demo", run, model;
    bool json = false;
  };
  Command& c = root.add("info", "Says what a model is made of: sizes, parameters, configuration");
  auto o = std::make_shared<InfoOptions>();
  c.text("RUN", o->run, "a run's directory or a checkpoint (default: the preset)");
  c.text("--preset NAME", o->preset, "a preset: golf, nano, demo (default: demo)");
  c.section("model", o->model);
  c.flag("--json", o->json, "print one JSON object");
  c.examples(R"(  ingot info --preset golf
  ingot info --preset golf --json
  ingot info --preset nano --set model.layers=12
  ingot info runs/a)");
  c.run([o] {
    OrderedJson report;
    if (o->run.empty()) {
      report = describe(resolve_config(o->preset, o->model, "{}").model);
    } else {
      const TrainedModel model = load_trained(o->run);
      report = describe(model.config.model);
      report["checkpoint"] = model.checkpoint;
      report["step"] = model.step;
      report["parameter_hash"] = model.parameter_hash;
      report["tokenizer"] = {{"kind", model.tokenizer->kind()}, {"vocab", model.tokenizer->vocab_size()}};
    }
    if (o->json)
      write_out(write_json(report) + "\n");
    else
      print(o->run.empty() ? "preset " + o->preset : o->run, report);
  });
}

}  // namespace ingot::cli
