// ingot eval accuracy: the loss of accuracy from storing weights in fewer bits, by format and by component.
#include "ingot/engines/generate/accuracy.h"

#include <algorithm>
#include <cmath>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/io/json.h"
#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/gpt_oss/forms.h"

namespace ingot::cli {
namespace {

constexpr int64_t kKept = 16 << 20;  // logits of the reference that are held at a time

struct AccuracyCommand {
  std::string model, ids;
  std::vector<std::string> archives;
  int64_t layers = 0;
  bool json = false;
};

struct Row {
  std::string form, component;
  GptOssComponents forms;
};
// Each component alone, then all together; then whole models in the formats that `ingot convert` produces.
std::vector<Row> rows_for(const GptOssWeights& w) {
  std::vector<Row> rows;
  for (const WeightFormat f : {WeightFormat::fp8, WeightFormat::mxfp4}) {
    const std::string form = std::string("dense ") + name_of(f);
    rows.push_back({form, "qkv", {.qkv = f}});
    rows.push_back({form, "o", {.o = f}});
    rows.push_back({form, "head", {.head = f}});
    rows.push_back({form, "qkv, o, head", {.qkv = f, .o = f, .head = f}});
  }
  const WeightFormat x = WeightFormat::mxfp4;
  const bool wide_experts = w.layers.empty() || w.layers[0].gate_up.format != x;
  if (wide_experts) {
    rows.push_back({"experts mxfp4", "gate_up", {.gate_up = x}});
    rows.push_back({"experts mxfp4", "down", {.down = x}});
    rows.push_back({"experts mxfp4", "gate_up, down", {.gate_up = x, .down = x}});
    for (const WeightFormat f : {WeightFormat::fp8, x})
      rows.push_back({std::string("dense ") + name_of(f) + ", experts mxfp4",
                      "all",
                      {.qkv = f, .o = f, .head = f, .gate_up = x, .down = x}});
  }
  return rows;
}

OrderedJson component_row(const std::string& form, const std::string& component, const Accuracy& a) {
  return {{"form", form},
          {"component", component},
          {"loss", a.loss},
          {"perplexity", perplexity_json(a.loss)},
          {"top1", a.top1},
          {"confident_top1", a.confident_top1},
          {"confident_tokens", a.confident},
          {"top5_overlap", a.top5},
          {"top10_overlap", a.top10},
          {"kl", a.kl},
          {"cosine", a.cosine},
          {"mean_rank", a.mean_rank}};
}

std::string cell(const std::string& text, size_t width, bool left = false) {
  const std::string pad(text.size() < width ? width - text.size() : 0, ' ');
  return left ? text + pad : pad + text;
}
void print_accuracy(const OrderedJson& report) {
  write_out(report["model"].get<std::string>() + ": loss " + fixed(report["loss"].get<double>(), 4) + ", perplexity " +
            fixed(std::exp(report["loss"].get<double>()), 3) + " over " + with_commas(report["tokens"].get<int64_t>()) +
            " tokens\n\n");
  const auto line = [](const std::vector<std::string>& cells) {
    std::string out;
    for (size_t i = 0; i < cells.size(); ++i) out += cell(cells[i], i == 0 ? 28 : i == 1 ? 14 : 11, i < 2);
    write_out(out + "\n");
  };
  line({"form", "component", "loss", "perplexity", "top-1", "confident", "top-5", "top-10", "KL", "cosine",
        "mean rank"});
  const auto percent = [](const OrderedJson& v) { return fixed(100 * v.get<double>(), 2) + " %"; };
  for (const OrderedJson& r : report["results"])
    line({r["form"].get<std::string>(), r["component"].get<std::string>(), fixed(r["loss"].get<double>(), 4),
          fixed(std::exp(r["loss"].get<double>()), 3), percent(r["top1"]), percent(r["confident_top1"]),
          percent(r["top5_overlap"]), percent(r["top10_overlap"]), fixed(r["kl"].get<double>(), 5),
          fixed(r["cosine"].get<double>(), 5), fixed(r["mean_rank"].get<double>(), 3)});
}

void accuracy(const AccuracyCommand& o) {
  require_gpt_oss(o.model);
  const std::vector<std::vector<int32_t>> lists = read_ids(o.ids);
  size_t longest = 0;
  for (const auto& ids : lists) longest = std::max(longest, ids.size());
  if (longest < 2) fail(ErrorCode::bad_data, o.ids, ": found lists of one id, expected one of at least two");
  const GptOssConfig config = read_gpt_oss_config(o.model);
  check_ids(lists, config.vocab, o.ids);
  const int64_t batch = std::min<int64_t>({512, int64_t(longest), std::max<int64_t>(1, kKept / config.vocab)});
  const DecoderOptions options{.context = int64_t(longest), .batch = batch};
  const int64_t layers = o.layers > 0 ? std::min(o.layers, config.layers) : config.layers;
  const GptOssLoad load{.layers = o.layers, .other_bytes = 2 * decoder_bytes(config, layers, options) + kKept * 4};
  const GptOssWeights weights = load_gpt_oss(o.model, config, load);
  const auto reference = make_decoder(config, weights, options);
  Interrupt interrupt;
  Progress progress;
  OrderedJson report = {{"model", o.model}, {"ids", o.ids}, {"lists", lists.size()}, {"confident", kConfident}};
  OrderedJson results = OrderedJson::array();
  const auto compare = [&](const std::string& form, const std::string& component, const GptOssWeights& other,
                           bool e4m3_inputs = false) {
    GptOssConfig with = config;
    with.e4m3_inputs = e4m3_inputs;
    progress.update(form + ": " + component);
    const auto decoder = make_decoder(with, other, options);
    const Accuracy a = compare_models(*reference, *decoder, lists, [&] { return interrupt.asked(); });
    if (!std::isfinite(a.loss) || !std::isfinite(a.reference_loss))
      fail(ErrorCode::numeric, o.model, ": ", form, ": found a loss of ", a.loss, ", the reference's ",
           a.reference_loss, ", expected finite numbers");
    report["tokens"] = a.tokens;
    report["loss"] = a.reference_loss;
    report["perplexity"] = perplexity_json(a.reference_loss);
    results.push_back(component_row(form, component, a));
  };
  for (const Row& row : rows_for(weights)) {
    GptOssWeights other;
    try {
      other = with_components(weights, row.forms);
    } catch (const Error& e) {  // a format's blocks do not divide the rows
      if (e.code != ErrorCode::unsupported) throw;
      log_info(row.form, ", ", row.component, ": left out: ", e.what());
      continue;
    }
    compare(row.form, row.component, other);
  }
  compare("inputs e4m3 (--quant)", "experts", weights, true);
  for (const std::string& path : o.archives) {
    if (const GptOssConfig c = read_gpt_oss_config(path); c.vocab != config.vocab || c.layers != config.layers)
      fail(ErrorCode::bad_data, path, ": found a model of ", c.layers, " layers and ", c.vocab, " tokens, expected ",
           config.layers, " and ", config.vocab, ", as ", o.model, " has");
    compare(path, "archive", load_gpt_oss(path, config, load));
  }
  report["results"] = results;
  if (o.json) return write_out(show_json(report, 1) + "\n");
  print_accuracy(report);
}

}  // namespace

void add_accuracy(Command& eval) {
  Command& c = eval.add("accuracy", "Compares a GPT-OSS model with the same model in fewer bits, token by token");
  auto o = std::make_shared<AccuracyCommand>();
  c.text("--model DIR", o->model, "the reference: a checkpoint or an archive").require();
  c.text("--ids FILE", o->ids, "the text: a file with one JSON list of token ids per line").require();
  c.list("--archive FILE", o->archives, "an archive to compare too; may be repeated");
  c.integer("--layers N", o->layers, 0, 1 << 20, "run the first N layers; 0: all (default: 0)");
  c.flag("--json", o->json, "print one JSON object");
  c.examples(R"(  ingot eval accuracy --model small-gpt-oss --ids held_out.jsonl
  ingot eval accuracy --model small-gpt-oss --ids held_out.jsonl --archive small.ingot --json)");
  c.run([o] { accuracy(*o); });
}

}  // namespace ingot::cli
