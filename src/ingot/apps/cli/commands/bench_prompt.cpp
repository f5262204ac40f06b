// ingot bench prompt: the time to the first token of GPT-OSS on a GPU, with synthetic weights.
#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/measure/prompts.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/core/version.h"
#include "ingot/gpu/device.h"
#include "ingot/io/json.h"

namespace ingot::cli {
namespace {

struct PromptBench {
  std::string size = "120b", dense = "bf16";
  std::vector<std::string> lengths;
  PromptMeasurement measurement;
  bool json = false;
  std::string gpus;
};

int64_t length_of(const std::string& text) {
  size_t used = 0;
  int64_t n = 0;
  try {
    n = std::stoll(text, &used);
  } catch (const std::exception&) { used = 0; }
  if (used != text.size() || text.empty() || n < 1)
    fail(ErrorCode::usage, "LENGTH: found '", text, "', expected a number of tokens from 1 on");
  return n;
}

OrderedJson as_json(const PromptBench& o, const PromptMeasured& found) {
  OrderedJson prompts = OrderedJson::array();
  for (const PromptTimes& t : found.times) {
    prompts.push_back({{"gpus", t.gpus},
                       {"tokens", t.tokens},
                       {"p50_ms", t.p50_ms},
                       {"best_ms", t.best_ms},
                       {"flops", t.flops},
                       {"weight_bytes", t.bytes}});
    if (o.measurement.steps) prompts.back()["steps_ms"] = t.steps_ms;
    if (t.one_ms > 0) prompts.back()["one_gpu_ms"] = t.one_ms;
  }
  return {{"version", version()},
          {"commit", commit()},
          {"gpu", gpu::device_info().name},
          {"model", "gpt-oss-" + o.size},
          {"dense", o.dense},
          {"split", name_of(o.measurement.split)},
          {"chunk", found.chunk},
          {"weight_bytes", found.weight_bytes},
          {"prompts", prompts}};
}

}  // namespace

void add_bench_prompt(Command& bench) {
  Command& c = bench.add(
      "prompt", "Times prompts of GPT-OSS on a GPU to their first token, with random weights in the published shapes");
  auto o = std::make_shared<PromptBench>();
  c.list("LENGTH", o->lengths, "tokens of a prompt (default: 100 1024 4096)").of_integers();
  c.choice("--synthetic SIZE", o->size, {"20b", "120b"}, "the published model whose shapes are used (default: 120b)");
  c.choice("--dense FORM", o->dense, {"bf16", "fp8", "mxfp4"},
           "format of attention and head (default: bf16); experts are mxfp4");
  c.integer("--rounds N", o->measurement.rounds, 1, 1000, "number of times that each length is timed (default: 5)");
  c.flag("--steps", o->measurement.steps,
         "also time each prompt in steps of 16 tokens by the decode kernels, for comparison");
  add_gpu_counts(c, o->gpus, o->measurement.split);
  c.flag("--json", o->json, "print one JSON object");
  c.examples(R"(  ingot bench prompt
  ingot bench prompt --gpus 2,4
  ingot bench prompt --synthetic 20b 512 8192)");
  c.run([o, &c] {
    o->measurement.gpus = gpu_counts(o->gpus);
    refuse_split_of_one(c, o->measurement.gpus.empty() ? 1 : o->measurement.gpus[0]);
    o->measurement.size = o->size;
    o->measurement.dense = o->dense == "bf16"  ? WeightFormat::bf16
                           : o->dense == "fp8" ? WeightFormat::fp8
                                               : WeightFormat::mxfp4;
    if (!o->lengths.empty()) o->measurement.lengths.clear();
    for (const std::string& n : o->lengths) o->measurement.lengths.push_back(length_of(n));
    const PromptMeasured found = measure_prompts(o->measurement);
    if (o->json) return write_out(show_json(as_json(*o, found)) + "\n");
    write_out("GPT-OSS-" + o->size + " shapes, " + o->dense + " and mxfp4 experts, " +
              fixed(double(found.weight_bytes) * 1e-9, 1) + " GB of weights, " + with_commas(found.chunk) +
              " tokens at a time" +
              (o->measurement.gpus.empty() ? std::string() : std::string(", ") + name_of(o->measurement.split)) + "\n");
    for (const PromptTimes& t : found.times)
      write_out(
          with_commas(t.tokens) + " tokens" + (t.gpus > 1 ? ", " + std::to_string(t.gpus) + " GPUs" : "") +
          ": first token after " + fixed(t.p50_ms, 1) + " ms, best " + fixed(t.best_ms, 1) + "; " +
          fixed(1e3 * double(t.tokens) / t.p50_ms, 0) + " tokens/s" +
          (t.one_ms > 0 ? "; " + fixed(t.p50_ms / t.one_ms, 3) + " of one GPU's " + fixed(t.one_ms, 1) + " ms" : "") +
          (o->measurement.steps ? "; in steps of 16: " + fixed(t.steps_ms, 1) + " ms" : "") + "\n");
  });
}

}  // namespace ingot::cli
