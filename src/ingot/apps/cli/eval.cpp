// ingot eval: scores text under a trained model.
#include "ingot/apps/cli/cli.h"
#include "ingot/apps/cli/runs.h"
#include "ingot/core/log.h"
#include "ingot/data/documents.h"
#include "ingot/io/json.h"

namespace ingot::cli {
namespace {

struct EvalCommand {
  std::string run, data, split = "held-out";
  int64_t stride = 0, context = 0, batch_tokens = 4096;
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
  if (o.split != "all") documents = split_documents(std::move(documents), split_options(model.config.train)).held_out;
  return tokenize_documents(*model.tokenizer, documents);
}

void eval(const EvalCommand& o) {
  const TrainedModel model = load_trained(o.run);
  const auto source = source_of(o, model);
  std::vector<DocumentScore> documents;
  const ScoreOptions options{.batch_tokens = o.batch_tokens,
                             .context = o.context,
                             .stride = o.stride,
                             .flat = o.flat,
                             .looping = model.looping,
                             .products = products_of(model.config.train)};
  const Score s = score(model.config.model, model.weights, *model.tokenizer, source, options, &documents);
  if (!o.json)
    return write_out(o.data + " (" + o.split + ", " + with_commas(int64_t(documents.size())) +
                     " documents): " + score_line(s) + "\n");
  const OrderedJson report = {{"run", o.run},
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
                              {"context", o.context != 0 ? o.context : model.config.model.context},
                              {"stride", o.stride},
                              {"seconds", s.seconds},
                              {"tokens_per_second", double(s.targets) / s.seconds}};
  write_out(write_json(report) + "\n");
}

}  // namespace

void add_eval(Command& root) {
  Command& c = root.add("eval", "Scores text under a trained model: loss and bits per byte");
  auto o = std::make_shared<EvalCommand>();
  c.text("RUN", o->run, "a run's directory, or one of its checkpoints").require();
  c.text("--data PATH", o->data, "text or shards").require();
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
  ingot eval runs/a/step-00002000 --data other.txt --split all)");
  c.run([o] { eval(*o); });
}

}  // namespace ingot::cli
