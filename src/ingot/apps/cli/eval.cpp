// ingot eval: scores text or token ids under a model.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "ingot/apps/cli/cli.h"
#include "ingot/apps/cli/models.h"
#include "ingot/apps/cli/runs.h"
#include "ingot/core/log.h"
#include "ingot/data/documents.h"
#include "ingot/engines/generate/sequence_losses.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt_oss/config.h"

namespace ingot::cli {
namespace {

struct EvalCommand {
  std::string run, model, data, ids, split = "held-out";
  int64_t stride = 0, context = 0, batch_tokens = 4096;
  ModelOptions on;
  bool json = false, flat = false;
};

// The part of `path` that is to be scored, cut as the run cut its own data.
std::shared_ptr<const TokenSource> source_of(const EvalCommand& o, const TrainedModel& model) {
  if (holds_shards(o.data)) {
    ShardPaths shards = find_shards(o.data);
    if (o.split == "all") shards.held_out.insert(shards.held_out.end(), shards.train.begin(), shards.train.end());
    if (shards.held_out.empty())
      fail(ErrorCode::not_found, o.data,
           ": found no held-out shards (val_*.bin), expected some; --split all scores every shard");
    return open_shards(shards.held_out, *model.tokenizer);
  }
  std::vector<Document> documents = read_documents(o.data);
  if (o.split != "all")
    documents = split_documents(std::move(documents),
                                split_options(run_config_from_json(model.run_config, model.checkpoint).train))
                    .held_out;
  return tokenize_documents(*model.tokenizer, documents);
}

// The loss of every token after the first of each list, so that any other engine can be compared.
void eval_ids(const EvalCommand& o) {
  const std::string path = chosen_model(o.run, o.model);
  if (!o.data.empty()) fail(ErrorCode::usage, "found --ids and --data, expected one of them");
  const std::vector<std::vector<int32_t>> lists = read_ids(o.ids);
  size_t longest = 0;
  for (const auto& ids : lists) longest = std::max(longest, ids.size());
  if (longest < 2) fail(ErrorCode::bad_data, o.ids, ": found lists of one id, expected one of at least two");
  const OpenedModel model = open_model(path, int64_t(longest), o.on);
  check_ids(lists, model.decoder->vocab(), o.ids);
  Interrupt interrupt;
  const auto start = std::chrono::steady_clock::now();
  OrderedJson sequences = OrderedJson::array();
  double sum = 0;
  int64_t targets = 0;
  for (size_t i = 0; i < lists.size(); ++i) {
    const std::vector<double> losses = sequence_losses(*model.decoder, lists[i], [&] { return interrupt.asked(); });
    for (size_t t = 0; t < losses.size(); ++t)
      if (!std::isfinite(losses[t]))
        fail(ErrorCode::numeric, path, ": found a loss of ", losses[t], " at position ", t + 1, " of list ", i + 1,
             ", expected finite numbers");
    sum += std::accumulate(losses.begin(), losses.end(), 0.0);
    targets += int64_t(losses.size());
    sequences.push_back({{"tokens", lists[i].size()}, {"losses", losses}});
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double loss = sum / double(targets);
  if (!o.json)
    return write_out(o.ids + " (" + with_commas(int64_t(lists.size())) + " lists): loss " + fixed(loss, 4) +
                     ", perplexity " + fixed(std::exp(loss), 3) + " over " + with_commas(targets) + " tokens\n");
  const OrderedJson report = {{"model", path},      {"layers", o.on.layers}, {"lists", lists.size()},
                              {"targets", targets}, {"loss", loss},          {"perplexity", std::exp(loss)},
                              {"seconds", seconds}, {"sequences", sequences}};
  write_out(show_json(report) + "\n");
}

void eval(const EvalCommand& o) {
  if (!o.ids.empty()) return eval_ids(o);
  const std::string path = chosen_model(o.run, o.model);
  if (o.data.empty()) fail(ErrorCode::usage, "found neither --data nor --ids, expected one of them");
  if (o.on.layers > 0) fail(ErrorCode::usage, "found --layers without --ids, expected both");
  if (is_gpt_oss(path)) fail(ErrorCode::unsupported, path, ": found --data for a GPT-OSS model, expected --ids");
  if (o.on.device == "cuda")
    fail(ErrorCode::unsupported, "--device cuda: found --data, which is scored on the CPU, expected --ids");
  const TrainedModel model = load_trained(path);
  const auto source = source_of(o, model);
  std::vector<DocumentScore> documents;
  const ScoreOptions options{.batch_tokens = o.batch_tokens,
                             .context = o.context,
                             .stride = o.stride,
                             .flat = o.flat,
                             .looping = model.looping,
                             .products = model.products};
  const Score s = score(model.config, model.weights, *model.tokenizer, source, options, &documents);
  if (!o.json)
    return write_out(o.data + " (" + o.split + ", " + counted(int64_t(documents.size()), "document") +
                     "): " + score_line(s) + "\n");
  const OrderedJson report = {{"run", path},
                              {"checkpoint", model.checkpoint},
                              {"step", model.step},
                              {"parameter_hash", model.parameter_hash},
                              {"data", o.data},
                              {"split", o.split},
                              {"documents", documents.size()},
                              {"targets", s.targets},
                              {"bytes", s.bytes},
                              {"loss", s.loss},
                              {"bits_per_byte", s.bits_per_byte},
                              {"context", o.context != 0 ? o.context : model.config.context},
                              {"stride", o.stride},
                              {"seconds", s.seconds},
                              {"tokens_per_second", double(s.targets) / s.seconds}};
  write_out(show_json(report) + "\n");
}

}  // namespace

void add_eval(Command& root) {
  Command& c = root.add("eval", "Scores text or token ids under a model: loss and bits per byte");
  auto o = std::make_shared<EvalCommand>();
  c.text("RUN", o->run, "a run's directory, or one of its checkpoints");
  c.text("--model DIR", o->model, "instead of RUN: the same, or a GPT-OSS checkpoint or archive");
  c.text("--data PATH", o->data, "text or shards");
  c.text("--ids FILE", o->ids,
         "instead of text: one JSON list of token ids a line; --json gives the loss at every position");
  add_options(c, o->on);
  c.choice("--split PART", o->split, {"held-out", "all"},
           "held-out: the part the run would hold out of this data; all (default: held-out)");
  c.integer("--stride N", o->stride, 0, 1 << 30,
            "sliding windows that advance by N tokens (default 0: windows side by side)");
  c.integer("--context N", o->context, 0, 1 << 30, "longest window (default 0: the model's context)");
  c.integer("--batch-tokens N", o->batch_tokens, 1, 1 << 30, "tokens per forward pass (default: 4096)");
  c.flag("--flat", o->flat, "cut every batch-tokens tokens, also inside documents (the parameter-golf rule)");
  c.flag("--json", o->json, "print one JSON object");
  c.examples(R"(  ingot eval runs/a --data input.txt --json
  ingot eval runs/a --data corpus/ --context 2048 --stride 64
  ingot eval runs/a/step-00002000 --data other.txt --split all
  ingot eval --model gpt-oss-20b --ids sequences.jsonl --json)");
  c.run([o, &c] {
    if (!o->ids.empty()) c.refuse_given({"split", "stride", "context", "batch-tokens", "flat"}, "--ids");
    eval(*o);
  });
  add_accuracy(c);
}

}  // namespace ingot::cli
