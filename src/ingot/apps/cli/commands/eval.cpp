// ingot eval: scores text or token ids under a model.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "ingot/apps/cli/framework/bar.h"
#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/adaptation.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/apps/cli/shared/ranks.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/clock.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/log.h"
#include "ingot/data/documents.h"
#include "ingot/engines/generate/sequence_losses.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt/generate/device_weights.h"

namespace ingot::cli {
namespace {

struct EvalCommand {
  std::string run, model, data, ids, tokenizer, split;
  int64_t stride = 0, context = 0, batch_tokens = 4096;
  DecoderOptions on;
  AdaptationCommand ttt;
  bool json = false, flat = false;
};

// The part of the data that is scored.
struct Part {
  std::shared_ptr<const TokenSource> tokens;
  std::string split;       // held-out or all
  int64_t text_bytes = 0;  // bytes of the documents; 0 for shards
};

// Whether the run was trained on these tokens; true if this is not known.
bool trained_on(const TrainedModel& model, const TokenSource& train) {
  return model.data_fingerprint.empty() || train.fingerprint() == model.data_fingerprint;
}

Part part_of_shards(const EvalCommand& o, const TrainedModel& model) {
  const ShardPaths shards = find_shards(o.data);
  std::vector<std::string> paths = shards.held_out;
  const auto open = [&](const std::vector<std::string>& p) { return open_shards(p, *model.tokenizer); };
  std::string split = o.split;
  if (split.empty())
    split = !paths.empty() && (shards.train.empty() || trained_on(model, *open(shards.train))) ? "held-out" : "all";
  if (split == "all") paths.insert(paths.end(), shards.train.begin(), shards.train.end());
  if (paths.empty())
    fail(ErrorCode::not_found, o.data,
         ": found no held-out shards (val_*.bin), expected some; --split all scores every shard");
  return {open(paths), split};
}

Part part_of_text(const EvalCommand& o, const TrainedModel& model) {
  std::vector<Document> documents = documents_of(o.data);
  const auto part = [&](const std::vector<Document>& scored, const char* split) {
    return Part{tokenize_documents(*model.tokenizer, scored), split, total_bytes(scored)};
  };
  if (o.split == "all") return part(documents, "all");
  const SplitOptions options = split_options(run_config_from_json(model.run_config, model.checkpoint).train);
  DocumentSplit split;
  try {
    split = split_documents(documents, options);
  } catch (const Error&) {
    if (o.split == "held-out") throw;
    return part(documents, "all");  // too short to be a run's data
  }
  const bool own = o.split == "held-out" || trained_on(model, *tokenize_documents(*model.tokenizer, split.train));
  return own ? part(split.held_out, "held-out") : part(documents, "all");
}

// The held-out part of the data that the run was trained on, or all of other data.
Part part_of(const EvalCommand& o, const TrainedModel& model) {
  const Part part = holds_shards(o.data) ? part_of_shards(o, model) : part_of_text(o, model);
  if (o.split.empty() && part.split == "all" && o.ttt.is_first())
    log_info(o.data == kStandardInput ? "standard input" : o.data,
             " is not the data of the run: the whole text is scored");
  return part;
}

// The last id of a list is predicted only, so a list may be one id longer than the context.
void check_lengths(const std::vector<std::vector<int32_t>>& lists, int64_t context, const std::string& path) {
  for (size_t i = 0; i < lists.size(); ++i)
    if (int64_t(lists[i].size()) > context + 1)
      fail(ErrorCode::usage, path, ": found ", lists[i].size(), " ids in list ", i + 1, ", expected at most ",
           context + 1, ", one more than the context");
}

// The tokens of a score that a signal may stop: a batch begins with reading its tokens, and fails when a signal asked
// to stop. The scores of the documents so far stay.
class StoppableTokens : public TokenSource {
 public:
  StoppableTokens(std::shared_ptr<const TokenSource> tokens, const Interrupt& interrupt)
      : TokenSource(tokens->bos(), tokens->vocab_size()), tokens_(std::move(tokens)), interrupt_(interrupt) {}
  int64_t size() const override { return tokens_->size(); }
  void read(int64_t begin, std::span<int32_t> into) const override {
    if (interrupt_.asked()) fail(ErrorCode::interrupted, "stopped by a signal");
    tokens_->read(begin, into);
  }
  std::vector<int64_t> document_begins() const override { return tokens_->document_begins(); }
  std::vector<int64_t> part_bounds() const override { return tokens_->part_bounds(); }
  std::string fingerprint() const override { return tokens_->fingerprint(); }
  std::string name() const override { return tokens_->name(); }

 private:
  std::shared_ptr<const TokenSource> tokens_;
  const Interrupt& interrupt_;
};

// The score of a run or an artifact without adapters.
Score score_run(const TrainedModel& model, DeviceChoice device, const std::shared_ptr<const TokenSource>& source,
                const ScoreOptions& options, std::vector<DocumentScore>& documents) {
  const DeviceWeights there(model.weights, training_device(model.config, device), options.stream);
  const Interrupt interrupt(kScoreStops);
  const auto tokens = std::make_shared<StoppableTokens>(source, interrupt);
  try {
    return score(model.config, there.weights(), *model.tokenizer, tokens, options, &documents);
  } catch (const Error& e) {
    if (e.code != ErrorCode::interrupted) throw;
    DocumentScore sum;
    for (const DocumentScore& d : documents) sum.loss_sum += d.loss_sum, sum.targets += d.targets, sum.bytes += d.bytes;
    // Without a start token, the first token of each document is no target.
    const int64_t no_targets = source->bos() >= 0 ? 1 : int64_t(documents.size());
    fail_stopped(sum, source->size() - no_targets);
  }
}

// Scores every token after the first of each list, so that the losses can be compared with another engine's.
void eval_ids(const EvalCommand& o) {
  const std::string path = chosen_model(o.run, o.model);
  if (!o.data.empty()) fail(ErrorCode::usage, "found --ids and --data, expected one of them");
  const std::vector<std::vector<int32_t>> lists = read_ids(o.ids);
  size_t longest = 0;
  for (const auto& ids : lists) longest = std::max(longest, ids.size());
  if (longest < 2) fail(ErrorCode::bad_data, o.ids, ": found lists of one id, expected one of at least two");
  const OpenedModel model = open_model(path, int64_t(longest) - 1, o.ids, o.on);
  check_ids(lists, model.decoder->vocab(), o.ids);
  check_lengths(lists, model.decoder->context(), o.ids);
  Interrupt interrupt(kScoreStops);
  const auto start = Clock::now();
  OrderedJson sequences = OrderedJson::array();
  double sum = 0;
  int64_t targets = 0, all = 0;
  for (const auto& ids : lists) all += int64_t(ids.size()) - 1;
  const auto losses_of = [&](const std::vector<int32_t>& ids) {
    try {
      return sequence_losses(*model.decoder, ids, [&] { return interrupt.asked(); });
    } catch (const Error& e) {
      if (e.code != ErrorCode::interrupted) throw;
      fail_stopped({.loss_sum = sum, .targets = targets}, all);
    }
  };
  for (size_t i = 0; i < lists.size(); ++i) {
    const std::vector<double> losses = losses_of(lists[i]);
    for (size_t t = 0; t < losses.size(); ++t)
      if (!std::isfinite(losses[t]))
        fail(ErrorCode::numeric, path, ": found a loss of ", losses[t], " at position ", t + 1, " of list ", i + 1,
             ", expected finite numbers");
    sum += std::accumulate(losses.begin(), losses.end(), 0.0);
    targets += int64_t(losses.size());
    sequences.push_back({{"tokens", lists[i].size()}, {"losses", losses}});
  }
  const double seconds = seconds_since(start);
  const double loss = sum / double(targets);
  if (!o.json)
    return write_out(o.ids + " (" + counted(int64_t(lists.size()), "list") + "): loss " + fixed(loss, 4) +
                     ", perplexity " + fixed(std::exp(loss), 3) + " over " + with_commas(targets) + " tokens\n");
  const OrderedJson report = {{"model", path},      {"layers", o.on.layers}, {"lists", lists.size()},
                              {"targets", targets}, {"loss", loss},          {"perplexity", perplexity_json(loss)},
                              {"seconds", seconds}, {"sequences", sequences}};
  write_out(show_json(report) + "\n");
}

void check_windows(const EvalCommand& o, int64_t context, int64_t most) {
  if (context > most)
    fail(ErrorCode::usage, "--context: found ", context, ", expected at most ", most, ", the model's");
  if (o.stride > context)
    fail(ErrorCode::usage, "--stride: found ", o.stride, ", expected at most the context of ", context);
}

// --- text under a published checkpoint

struct Scored : DocumentScore {  // of all documents
  int64_t windows = 0;
};

std::vector<std::vector<int32_t>> encoded(const std::vector<Document>& documents, const Tokenizer& tokenizer) {
  std::vector<std::vector<int32_t>> ids(documents.size());
  parallel_tasks(int64_t(documents.size()), [&](int64_t i) {
    const Document& d = documents[size_t(i)];
    ids[size_t(i)] = about(d.name, [&] { return tokenizer.encode(d.text); });
  });
  return ids;
}

// Adds the losses of a document's tokens after the first one, which has no context.
void score_document(const std::vector<int32_t>& ids, const EvalCommand& o, int64_t context, Decoder& decoder,
                    const Tokenizer& tokenizer, Scored& s, const std::function<bool()>& cancelled,
                    const std::function<void()>& after_window) {
  for (const Window& w : windows_of(int64_t(ids.size()), context, o.stride)) {
    const auto tokens = std::span(ids).subspan(size_t(w.begin), size_t(w.end - w.begin));
    for (const double loss : sequence_losses(decoder, tokens, cancelled, w.first - w.begin)) s.loss_sum += loss;
    if (!std::isfinite(s.loss_sum))
      fail(ErrorCode::numeric, "found a loss of ", s.loss_sum, " in tokens ", w.first, " to ", w.end,
           ", expected finite numbers");
    s.targets += w.end - w.first;
    for (int64_t t = w.first; t < w.end; ++t) s.bytes += tokenizer.bytes(ids[size_t(t - 1)], ids[size_t(t)]);
    ++s.windows;
    after_window();
  }
}

void eval_text_of_checkpoint(const EvalCommand& o, const std::string& path) {
  constexpr int64_t kContext = 2048;
  const int64_t most = model_kind_of(path).context(path),
                context = o.context > 0 ? o.context : std::min(kContext, most);
  check_windows(o, context, most);
  if (holds_shards(o.data))
    fail(ErrorCode::unsupported, o.data, ": found shards, expected text, which the model's own tokenizer encodes");
  const Vocabulary v = load_vocabulary(path, {.tokenizer = o.tokenizer});
  const std::vector<Document> documents = documents_of(o.data);
  auto ids = encoded(documents, *v.tokenizer);
  if (v.start >= 0)
    for (auto& document : ids) document.insert(document.begin(), v.start);
  int64_t longest = 0, targets = 0;
  for (const auto& document : ids) {
    longest = std::max(longest, int64_t(document.size()) - 1);
    targets += std::max<int64_t>(0, int64_t(document.size()) - 1);
  }
  if (targets == 0) fail(ErrorCode::bad_data, o.data, ": found no document of two tokens, expected some to score");
  const OpenedModel model = open_model(path, std::min(longest, context), "--context", o.on);
  Bar bar("scoring", [](double n) { return format_count(n); });
  const Interrupt interrupt(kScoreStops);
  Scored s;
  try {
    for (size_t d = 0; d < ids.size(); ++d)
      about(documents[d].name, [&] {
        score_document(
            ids[d], o, context, *model.decoder, *v.tokenizer, s, [&] { return interrupt.asked(); },
            [&] { bar.at(s.targets, targets); });
      });
  } catch (const Error& e) {
    if (e.code != ErrorCode::interrupted) throw;
    fail_stopped(s, targets);
  }
  const Score score = mean_score(s);
  const double seconds = bar.seconds();
  if (!o.json)
    return write_out(o.data + " (" + counted(int64_t(ids.size()), "document") + ", " + counted(s.windows, "window") +
                     "): perplexity " + fixed(std::exp(score.loss), 3) + ", " + score_line(score) + "\n");
  const OrderedJson report = {{"model", path},
                              {"data", o.data},
                              {"layers", o.on.layers},
                              {"documents", ids.size()},
                              {"windows", s.windows},
                              {"targets", s.targets},
                              {"bytes", s.bytes},
                              {"loss", score.loss},
                              {"perplexity", perplexity_json(score.loss)},
                              {"bits_per_byte", score.bits_per_byte},
                              {"context", context},
                              {"stride", o.stride},
                              {"seconds", seconds},
                              {"tokens_per_second", double(s.targets) / seconds}};
  write_out(show_json(report) + "\n");
}

void eval(const EvalCommand& o) {
  if (!o.ids.empty()) return eval_ids(o);
  const std::string path = chosen_model(o.run, o.model);
  if (o.data.empty()) fail(ErrorCode::usage, "found neither --data nor --ids, expected one of them");
  if (chats(path)) return eval_text_of_checkpoint(o, path);
  if (o.on.layers > 0)
    fail(ErrorCode::usage, "--layers: found ", o.on.layers, ", expected none with a model of `ingot train`");
  if (!o.ttt.log.empty()) {
    refuse_to_replace(o.ttt.log, {o.data, o.ttt.adapters});
    refuse_among_texts(o.ttt.log, o.data);
    refuse_to_replace_run(o.ttt.log, path);
  }
  if (o.flat && o.stride > 0) fail(ErrorCode::usage, "found --flat and --stride, expected one of them");
  model_kind_of(path);  // refuses a path that holds no model of any kind
  const TrainedModel model = load_trained(path);
  check_windows(o, o.context > 0 ? o.context : model.config.context,
                model.config.learned_positions ? model.config.context : INT64_MAX);
  const Part part = part_of(o, model);
  const auto& source = part.tokens;
  std::vector<DocumentScore> documents;
  const ScoreOptions options{.batch_tokens = o.batch_tokens,
                             .context = o.context,
                             .stride = o.stride,
                             .flat = o.flat,
                             .looping = model.looping,
                             .products = model.products};
  AdaptedScore s;
  if (o.ttt.on) {
    s = score_adapted(o.ttt, model, o.on.device, source, &documents);
  } else {
    static_cast<Score&>(s) = score_run(model, o.on.device, source, options, documents);
  }
  if (!o.ttt.is_first()) return;
  if (part.text_bytes > 0) warn_of_other_bytes(s.bytes, expected_bytes(part.text_bytes, *model.tokenizer, *source));
  if (!o.json)
    return write_out(o.data + " (" + part.split + ", " + counted(int64_t(documents.size()), "document") +
                     "): perplexity " + fixed(std::exp(s.loss), 3) + ", " + score_line(s) + "\n");
  OrderedJson report = {{"run", path},
                        {"checkpoint", model.checkpoint},
                        {"step", model.step},
                        {"parameter_hash", model.parameter_hash},
                        {"data", o.data},
                        {"split", part.split},
                        {"documents", documents.size()},
                        {"targets", s.targets},
                        {"bytes", s.bytes},
                        {"loss", s.loss},
                        {"perplexity", perplexity_json(s.loss)},
                        {"bits_per_byte", s.bits_per_byte},
                        {"context", o.context != 0 ? o.context : model.config.context},
                        {"stride", o.stride},
                        {"seconds", s.seconds},
                        {"tokens_per_second", double(s.targets) / s.seconds}};
  if (o.ttt.on) {
    report.erase("context"), report.erase("stride");
    report["ttt"] = {{"chunk", o.ttt.options.chunk},
                     {"window", options_for(o.ttt, model).window},
                     {"rank", o.ttt.options.adapters.rank},
                     {"lr", o.ttt.options.adapters.lr},
                     {"beta2", o.ttt.options.adapters.beta2},
                     {"eps", o.ttt.options.adapters.eps},
                     {"decay", o.ttt.options.adapters.weight_decay},
                     {"inexact", o.ttt.inexact},
                     {"any_order", o.ttt.options.any_order},
                     {"updates", s.updates},
                     {"window_tokens", s.window_tokens},
                     {"window_tokens_per_second", double(s.window_tokens) / s.seconds}};
    if (s.whole_tokens > 0)
      report["ttt"]["whole_windows"] = {{"window_tokens", s.whole_tokens},
                                        {"seconds", s.whole_seconds},
                                        {"window_tokens_per_second", double(s.whole_tokens) / s.whole_seconds}};
  }
  write_out(show_json(report) + "\n");
}

// Scores alone, or as one of several processes started by --ranks or a launcher such as torchrun.
void eval_with_ranks(EvalCommand o) {
  const RankPlace place = o.ttt.on ? rank_place_from_environment() : RankPlace();
  if (place.world == 1) {
    if (o.ttt.ranks == 1) return eval(o);
    refuse_standard_input(o.data, "--ranks");
    return start_ranks(int(o.ttt.ranks), {});
  }
  if (o.ttt.ranks > 1 && o.ttt.ranks != place.world)
    fail(ErrorCode::usage, "found --ranks ", o.ttt.ranks, " and WORLD_SIZE=", place.world,
         ", expected one of them, or the same");
  constexpr double kDeadline = 120;
  refuse_standard_input(o.data, "several ranks");
  o.ttt.place = place;
  o.ttt.place.listener = inherited_listener();
  try {
    o.ttt.others = std::make_shared<SocketCommunicator>(o.ttt.place, kDeadline);
    eval(o);
  } catch (const LostRank& e) {
    hand_over(e, true);
    throw;
  } catch (const Error& e) {
    hand_over(e, false);
    throw;
  }
}

}  // namespace

void add_eval(Command& root) {
  Command& c = root.add("eval", "Scores text or token ids under a model: loss and bits per byte");
  auto o = std::make_shared<EvalCommand>();
  add_model(c, o->run, o->model);
  c.text("--data PATH", o->data, "text, JSON lines or shards, - for standard input; with a published model: text");
  c.text("--ids FILE", o->ids,
         "in place of text: a file (-: standard input) with one JSON list of token ids per line; --json prints the "
         "loss at every position");
  add_options(c, o->on);
  add_dense(c, o->on.dense);
  c.text("--tokenizer FILE", o->tokenizer,
         "tokenizer of a published model, for --data (default: the file beside the model)");
  c.choice("--split PART", o->split, {"held-out", "all"},
           "the part to score: held-out, which is the part that the run would hold out of this data, or all (default: "
           "held-out of the data that the run was trained on, all of other data)");
  c.integer("--stride N", o->stride, 0, 1 << 30,
            "sliding windows that advance by N tokens (default 0: windows side by side)");
  c.integer("--context N", o->context, 0, 1 << 30,
            "longest window in tokens (default 0: the model's context; with published models at most 2,048)");
  c.integer("--batch-tokens N", o->batch_tokens, 1, 1 << 30, "tokens per forward pass (default: 4096)");
  c.flag("--flat", o->flat,
         "forward passes of exactly --batch-tokens tokens, which cut windows at their ends, so that the loss depends a "
         "little on this number (default: windows stay whole)");
  add_options(c, o->ttt);
  c.flag("--json", o->json, "print one JSON object");
  c.examples(R"(  ingot eval runs/a --data input.txt --json
  ingot eval runs/a --data corpus/ --context 2048 --stride 64
  ingot eval runs/a/step-00002000 --data other.txt
  ingot eval runs/a --data input.txt --ttt --ttt-log scores.jsonl
  ingot eval --model gpt-oss-20b --data wiki.test.txt --context 2048 --stride 1024
  ingot eval --model gpt-oss-20b --ids sequences.jsonl --json)");
  c.run([o, &c] {
    const std::string path = o->run.empty() ? o->model : o->run;
    if (!o->ids.empty())
      c.refuse_given({"split", "stride", "context", "batch-tokens", "flat", "tokenizer"}, "--ids");
    else if (chats(path))
      c.refuse_given({"split", "batch-tokens", "flat"}, "a published model, under which all of the text is scored");
    else if (exists(path))
      c.refuse_given({"tokenizer", "quant", "dense"}, "a run of `ingot train`, which has its own");
    if (!o->ttt.on)
      refuse_without_ttt(c);
    else if (!o->ids.empty() || chats(path))
      c.refuse_given({"ttt"}, o->ids.empty() ? "a published model" : "--ids");
    else
      c.refuse_given({"context", "stride", "batch-tokens", "flat"}, "--ttt, which has windows of its own");
    eval_with_ranks(*o);
  });
  add_accuracy(c);
}

}  // namespace ingot::cli
