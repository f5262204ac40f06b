#include "ingot/apps/cli/shared/adaptation.h"

#include <algorithm>
#include <optional>

#include "ingot/apps/cli/framework/bar.h"
#include "ingot/apps/cli/shared/ranks.h"
#include "ingot/core/cpu/shared_counter.h"
#include "ingot/gpu/device.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt/generate/device_weights.h"

namespace ingot::cli {
namespace {

std::string line_of(const AdaptationEvent& e) {
  OrderedJson line = {{"event", e.kind == AdaptationEvent::score ? "score" : "update"},
                      {"document", e.document},
                      {"chunk", e.chunk},
                      {"first", e.first},
                      {"end", e.end},
                      {"updates", e.updates}};
  if (e.kind == AdaptationEvent::score) line["loss_sum"] = e.loss_sum;
  return line.dump() + "\n";
}

// Gathers the values of all ranks, in the order of ranks, on every rank.
std::string of_all_ranks(const std::string& mine, Communicator& ranks) {
  const size_t world = size_t(ranks.world());
  const int64_t size = int64_t(mine.size());
  std::vector<int64_t> sizes(world);
  ranks.gather_bytes(&size, sizeof size, sizes.data());
  const size_t most = size_t(*std::max_element(sizes.begin(), sizes.end()));
  std::string padded = mine, all(most * world, 0), joined;
  padded.resize(most);
  ranks.gather_bytes(padded.data(), int64_t(most), all.data());
  for (size_t r = 0; r < world; ++r) joined.append(all, r * most, size_t(sizes[r]));
  return joined;
}

std::unique_ptr<SafetensorsFile> opened_adapters(const AdaptationCommand& o, const TrainedModel& model) {
  if (o.adapters.empty()) return nullptr;
  auto file = std::make_unique<SafetensorsFile>(o.adapters);
  require_adapters_of(model, *file);
  return file;
}

}  // namespace

void add_constants(Command& c, AdaptationCommand& o) {
  c.integer("--ttt-chunk N", o.options.chunk, 1, 1 << 20,
            "tokens that are scored, and then trained on, at a time (default: 32)");
  c.integer("--ttt-window N", o.window, 0, 1 << 20,
            "tokens of each forward pass (default 0: 2048, at most the context with learned positions)");
  c.integer("--ttt-rank N", o.options.adapters.rank, 1, 1 << 12, "rank of the adapters (default: 96)");
  c.number("--ttt-lr X", o.options.adapters.lr, 0, 1, "learning rate of the adapters (default: 1e-4)").more_than(0);
  c.number("--ttt-beta2 X", o.options.adapters.beta2, 0, 1, "AdamW's beta2, below 1 (default: 0.999)");
  c.number("--ttt-eps X", o.options.adapters.eps, 0, 1, "AdamW's epsilon (default: 1e-10)").more_than(0);
  c.number("--ttt-decay X", o.options.adapters.weight_decay, 0, 1e6, "weight decay of the adapters (default: 0.5)");
}
void add_options(Command& c, AdaptationCommand& o) {
  c.flag("--ttt", o.on,
         "test-time training: the adapters of each document are trained on the part that has been scored");
  add_constants(c, o);
  c.integer("--ttt-documents N", o.documents, 0, 1 << 16,
            "documents adapted side by side, on a GPU more if they are shorter than a window; no score depends on N "
            "(default 0: 64 on a GPU, 4 on a CPU)");
  c.integer("--ranks N", o.ranks, 1, 256,
            "adapt in N processes that share the documents; no score depends on N (default: 1)");
  c.choice("--ttt-inexact WAY", o.inexact, {"none", "stale-keys", "chunk-gradients"},
           "compute less for each chunk, with different scores: keep the keys and values of earlier chunks, or end "
           "gradients at the chunk (default: none)");
  c.flag(
      "--ttt-any-order", o.options.any_order,
      "on a GPU, add up attention's gradients in any order: faster, but the last bits of a score vary from run to run");
  c.text("--ttt-adapters FILE", o.adapters, "adapters from which every document starts");
  c.text("--ttt-log FILE", o.log, "write each score and each update, in order, as one JSON object per line");
}

void refuse_without_ttt(const Command& c) {
  c.refuse_given({"ttt-chunk", "ttt-window", "ttt-rank", "ttt-lr", "ttt-beta2", "ttt-eps", "ttt-decay", "ttt-documents",
                  "ttt-adapters", "ttt-log", "ttt-inexact", "ttt-any-order", "ranks"},
                 "a score without --ttt");
}

AdaptationOptions options_for(const AdaptationCommand& o, const TrainedModel& model) {
  AdaptationOptions options = o.options;
  if (o.window > 0)
    options.window = o.window;
  else if (model.config.learned_positions)
    options.window = std::min(options.window, model.config.context);
  options.inexact = o.inexact == "stale-keys"        ? Inexact::stale_keys
                    : o.inexact == "chunk-gradients" ? Inexact::chunk_gradients
                                                     : Inexact::none;
  options.looping = model.looping, options.products = model.products;
  check(options, model.config);
  return options;
}

Adapted adapt(const AdaptationCommand& o, const TrainedModel& model, Device device, const std::string& text,
              const std::string& from, int64_t passes) {
  AdaptationOptions options = options_for(o, model);
  Bar bar("learning", [](double n) { return format_count(n); });
  options.progress = [&](int64_t done, int64_t all) { bar.at(done, all); };
  Interrupt interrupt;
  options.cancelled = [&] { return interrupt.asked(); };
  const std::unique_ptr<SafetensorsFile> adapters = opened_adapters(o, model);
  options.begin_from = adapters.get();
  return about(from, [&] {
    std::vector<int32_t> tokens = model.tokenizer->encode(text);
    if (model.tokenizer->bos() >= 0) tokens.insert(tokens.begin(), model.tokenizer->bos());
    const DeviceWeights there(model.weights, device, options.stream);
    return ingot::adapt(model.config, there.weights(), tokens, options, passes);
  });
}

AdaptedScore score_adapted(const AdaptationCommand& o, const TrainedModel& model, DeviceChoice device,
                           std::shared_ptr<const TokenSource> source, std::vector<DocumentScore>* documents) {
  const Device on = device_of_rank(model.config, device, o.others ? &o.place : nullptr);
  std::optional<gpu::DeviceGuard> gpu;
  if (on.kind == Device::cuda) gpu.emplace(on.index);
  AdaptationOptions options = options_for(o, model);
  options.documents = o.documents > 0 ? o.documents : on.kind == Device::cpu ? 4 : 64;
  const std::unique_ptr<SafetensorsFile> adapters = opened_adapters(o, model);
  options.begin_from = adapters.get();
  std::unique_ptr<SharedCounter> counter;
  options.ranks = o.others.get();
  if (o.others && inherited_counter() >= 0) {
    counter = std::make_unique<SharedCounter>(inherited_counter());
    options.claim = [&] { return counter->next(); };
  }
  std::unique_ptr<AtomicFile> log;
  std::string own_log;  // the log of this rank, if there are several ranks
  if (!o.log.empty() && o.is_first()) log = std::make_unique<AtomicFile>(o.log);
  DocumentScore so_far;
  int64_t all_targets = 0;
  options.listener = [&](const AdaptationEvent& e) {
    if (e.kind == AdaptationEvent::score) so_far.loss_sum += e.loss_sum, so_far.targets += e.end - e.first;
    if (!o.log.empty() && o.others)
      own_log += line_of(e);
    else if (log)
      log->write(line_of(e));
  };
  Bar bar("scoring", [](double n) { return format_count(n); });
  options.progress = [&](int64_t done, int64_t all) { bar.at(done, all_targets = all); };
  Interrupt interrupt(o.is_first() ? kScoreStops : "");
  options.cancelled = [&] { return interrupt.asked(); };
  const DeviceWeights there(model.weights, on, options.stream);
  AdaptedScore score;
  try {
    score =
        ingot::score_adapted(model.config, there.weights(), *model.tokenizer, std::move(source), options, documents);
  } catch (const Error& e) {
    if (e.code != ErrorCode::interrupted || o.others) throw;  // a rank knows its own documents only
    fail_stopped(so_far, all_targets);
  }
  if (!o.log.empty() && o.others) {
    const std::string all = of_all_ranks(own_log, *o.others);
    if (log) log->write(all);
  }
  if (log) log->commit();
  return score;
}

}  // namespace ingot::cli
