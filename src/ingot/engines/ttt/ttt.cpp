#include "ingot/engines/ttt/ttt.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "ingot/core/memory.h"
#include "ingot/engines/train/device_batch.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/copy/host_copy.h"

namespace ingot {
namespace {

// Tokens [begin, begin + targets] of the source, of which all but the first are targets.
struct Work {
  int64_t document, begin, targets;
};

// Documents in the order in which they are adapted: the longest first, so that those side by side end together and
// those that go on are the first of them.
std::vector<Work> documents_of(const TokenSource& source) {
  const std::vector<int64_t> begins = source.document_begins();
  const int64_t last = source.size() - 1;
  std::vector<Work> all;
  for (size_t d = 0; d < begins.size(); ++d) {
    const int64_t end = std::min(last, d + 1 < begins.size() ? begins[d + 1] : last);
    if (end > begins[d]) all.push_back({int64_t(d), begins[d], end - begins[d]});
  }
  std::stable_sort(all.begin(), all.end(), [](const Work& a, const Work& b) { return a.targets > b.targets; });
  return all;
}

// Products of fewer rows add up in another order (kernels/linear), and a document alone would not get the bits that it
// gets beside others: then tokens of no document follow.
constexpr int64_t kFewestTokens = 9;

// A model, and as many documents' adapters as are adapted side by side.
class Adaptation {
 public:
  Adaptation(const GptConfig& config, const GptWeights& weights, const AdaptationOptions& options, int64_t documents,
             int64_t longest)
      : weights_(weights),
        o_(options),
        types_(types_of(weights)),
        model_(config, types_,
               {.capacity = std::max(kFewestTokens, documents * std::min(options.window, longest)),
                .looping = options.looping,
                .training = true,
                .products = options.products,
                .max_adapter_rank = options.adapters.rank,
                .most_scored = documents * options.chunk,
                .max_positions = std::max(options.window, config.context),
                .device = weights.master.device,
                .stream = options.stream}),
        on_device_(weights.master.device, options.stream, model_.options().capacity),
        memory_(2 * Arena::aligned(types_.sums(), {model_.options().most_scored}), gpu::memory_of(device())) {
    loss_ = memory_.take(types_.sums(), {model_.options().most_scored});
    dloss_ = memory_.take(types_.sums(), {model_.options().most_scored});
  }
  Device device() const { return weights_.master.device; }
  const LayerProgram& program() const { return model_.program(); }
  GptTypes types() const { return types_; }
  int64_t window_tokens() const { return window_tokens_; }

  // Runs chunk `ci` of the given documents, whose adapters are those from `first` on (one more is there), and returns
  // the losses of its targets, one document after the other. With `learn` their gradients are added up too.
  std::vector<double> chunk(int64_t ci, std::span<const Work> works, const TokenSource& source,
                            DocumentAdapters& adapters, int64_t first, bool learn) {
    fill_batch(ci, works, source);
    const TokenBatch batch = on_device_.put(batch_);
    const int64_t scored = int64_t(batch_.targets.size());
    const Tensor loss = loss_.slice(0, 0, scored), dloss = dloss_.slice(0, 0, scored);
    const int64_t count = int64_t(works.size()), segments = batch_.segments();
    const GptAdapters values = adapters.values(first, segments);
    if (!learn) {
      model_.losses(weights_, batch, loss, &values);
    } else {
      GptAdapters gradients = adapters.gradients(segments);
      adapters.zero_gradients(count);
      ingot::fill({.to = dloss, .value = 1 / double(batch_.last.front())}, o_.stream);
      model_.losses_and_gradients(weights_, batch, dloss, loss, {}, &values, &gradients);
    }
    window_tokens_ += batch_.size();
    const HostCopy here(loss, o_.stream);
    std::vector<double> losses(static_cast<size_t>(scored));
    for (int64_t t = 0; t < scored; ++t)
      losses[size_t(t)] =
          types_.sums() == DType::f64 ? here.tensor().ptr<double>()[t] : double(here.tensor().ptr<float>()[t]);
    return losses;
  }

 private:
  // The windows that end with the chunk; positions begin at 0 in each.
  void fill_batch(int64_t ci, std::span<const Work> works, const TokenSource& source) {
    for (auto* v : {&batch_.tokens, &batch_.targets, &batch_.positions, &batch_.last}) v->clear();
    batch_.cu_seqlens.assign(1, 0);
    for (const Work& w : works) {
      const int64_t end = std::min(w.targets, (ci + 1) * o_.chunk), begin = std::max<int64_t>(0, end - o_.window);
      row_.resize(size_t(end - begin + 1));
      source.read(w.begin + begin, row_);
      batch_.tokens.insert(batch_.tokens.end(), row_.begin(), row_.end() - 1);
      for (int64_t t = begin; t < end; ++t) batch_.positions.push_back(int32_t(t - begin));
      batch_.cu_seqlens.push_back(int32_t(batch_.tokens.size()));
      batch_.last.push_back(int32_t(end - ci * o_.chunk));
      batch_.targets.insert(batch_.targets.end(), row_.end() - batch_.last.back(), row_.end());
    }
    if (batch_.size() >= kFewestTokens) return;
    while (batch_.size() < kFewestTokens) {
      batch_.tokens.push_back(0);
      batch_.positions.push_back(0);
    }
    batch_.cu_seqlens.push_back(int32_t(batch_.size()));
    batch_.last.push_back(0);
  }

  const GptWeights& weights_;
  const AdaptationOptions& o_;
  GptTypes types_;
  Gpt model_;
  DeviceBatch on_device_;
  Arena memory_;
  Tensor loss_, dloss_;
  Batch batch_;
  std::vector<int32_t> row_;
  int64_t window_tokens_ = 0;
};

DocumentAdapters make_adapters(const Adaptation& a, const GptConfig& config, const AdaptationOptions& o,
                               int64_t documents) {
  ++documents;  // tokens of no document read some too
  require_memory(DocumentAdapters::bytes(config, a.program(), o.adapters, a.types(), documents),
                 detail::concat("adapting ", documents - 1, " documents at once"), gpu::memory_of(a.device()));
  DocumentAdapters adapters(config, a.program(), o.adapters, a.types(), documents, a.device(), o.stream);
  if (o.begin_from != nullptr) adapters.begin_from(*o.begin_from);
  return adapters;
}

void stop_if_asked(const AdaptationOptions& o) {
  if (o.cancelled && o.cancelled()) fail(ErrorCode::interrupted, "stopped by a signal");
}

}  // namespace

void check(const AdaptationOptions& o, const GptConfig& config) {
  check(o.adapters);
  if (o.chunk < 1) fail(ErrorCode::usage, "adaptation: found a chunk of ", o.chunk, ", expected at least 1");
  if (o.window < o.chunk)
    fail(ErrorCode::usage, "adaptation: found a window of ", o.window, ", expected at least the chunk of ", o.chunk);
  if (config.learned_positions && o.window > config.context)
    fail(ErrorCode::usage, "adaptation: found a window of ", o.window, ", expected at most ", config.context,
         ", the model's context");
  if (o.documents < 1) fail(ErrorCode::usage, "adaptation: found ", o.documents, " documents, expected at least 1");
  if (o.documents * o.window >= INT32_MAX)
    fail(ErrorCode::usage, "adaptation: found ", o.documents, " windows of ", o.window, ", expected fewer tokens than ",
         INT32_MAX);
}

AdaptedScore score_adapted(const GptConfig& config, const GptWeights& weights, const Tokenizer& tokenizer,
                           std::shared_ptr<const TokenSource> source, const AdaptationOptions& o,
                           std::vector<DocumentScore>* documents) {
  const auto start = std::chrono::steady_clock::now();
  check(o, config);
  if (source->size() < 2)
    fail(ErrorCode::bad_data, source->name(), ": found ", source->size(), " tokens, expected at least 2 to score");
  const std::vector<Work> works = documents_of(*source);
  const int64_t together = std::min(o.documents, int64_t(works.size()));
  Adaptation adaptation(config, weights, o, together, works.front().targets);
  DocumentAdapters adapters = make_adapters(adaptation, config, o, together);
  std::vector<DocumentScore> scores(source->document_begins().size());
  AdaptedScore total;
  int64_t done = 0;
  const auto chunks = [&](const Work& w) { return (w.targets + o.chunk - 1) / o.chunk; };
  // Adds what a chunk's targets lost.
  const auto take = [&](int64_t ci, std::span<const Work> some, const std::vector<double>& losses) {
    size_t next = 0;
    for (const Work& w : some) {
      const int64_t begin = ci * o.chunk, end = std::min(w.targets, begin + o.chunk);
      double sum = 0;
      for (int64_t t = begin; t < end; ++t) sum += losses[next++];
      if (!std::isfinite(sum))
        fail(ErrorCode::numeric, source->name(), ": found a loss of ", sum, " in chunk ", ci, " of document ",
             w.document, ", expected finite numbers");
      std::vector<int32_t> ids(size_t(end - begin + 1));
      source->read(w.begin + begin, ids);
      DocumentScore& of = scores[size_t(w.document)];
      for (size_t t = 1; t < ids.size(); ++t) of.bytes += tokenizer.bytes(ids[t - 1], ids[t]);
      of.loss_sum += sum, of.targets += end - begin, done += end - begin;
      if (o.listener)
        o.listener({.kind = AdaptationEvent::score,
                    .document = w.document,
                    .chunk = ci,
                    .first = w.begin + begin + 1,
                    .end = w.begin + end + 1,
                    .updates = adapters.updates(),
                    .loss_sum = sum});
    }
  };
  for (size_t first = 0; first < works.size(); first += size_t(together)) {
    const std::span<const Work> batch =
        std::span(works).subspan(first, std::min(size_t(together), works.size() - first));
    adapters.reset();
    for (int64_t ci = 0; ci < chunks(batch.front()); ++ci) {
      stop_if_asked(o);
      const auto more_than = [&](int64_t n) {
        return size_t(std::count_if(batch.begin(), batch.end(), [&](const Work& w) { return chunks(w) > n; }));
      };
      const std::span<const Work> learning = batch.first(more_than(ci + 1)),
                                  ending = batch.subspan(learning.size(), more_than(ci) - learning.size());
      if (!ending.empty())
        take(ci, ending, adaptation.chunk(ci, ending, *source, adapters, int64_t(learning.size()), false));
      if (!learning.empty()) {
        take(ci, learning, adaptation.chunk(ci, learning, *source, adapters, 0, true));
        adapters.step(int64_t(learning.size()));
        total.updates += int64_t(learning.size());
      }
      if (o.listener)
        for (const Work& w : learning)
          o.listener({.kind = AdaptationEvent::update,
                      .document = w.document,
                      .chunk = ci,
                      .first = w.begin + ci * o.chunk + 1,
                      .end = w.begin + (ci + 1) * o.chunk + 1,
                      .updates = adapters.updates()});
      if (o.progress) o.progress(done, source->size() - 1);
    }
  }
  double sum = 0;  // in the documents' order, whatever was batched with what
  for (const DocumentScore& d : scores) sum += d.loss_sum, total.targets += d.targets, total.bytes += d.bytes;
  total.loss = total.targets > 0 ? sum / double(total.targets) : 0;
  total.bits_per_byte = total.bytes > 0 ? bits_per_byte(sum, total.bytes) : 0;
  total.window_tokens = adaptation.window_tokens();
  total.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (documents != nullptr) *documents = std::move(scores);
  return total;
}

Adapted adapt(const GptConfig& config, const GptWeights& weights, std::span<const int32_t> tokens,
              const AdaptationOptions& o, int64_t passes) {
  check(o, config);
  if (tokens.size() < 2)
    fail(ErrorCode::bad_data, "found ", tokens.size(), " tokens, expected at least 2 to learn from");
  INGOT_CHECK_GE(passes, 1, "adapt: passes");
  const auto source = tokens_in_memory({tokens.begin(), tokens.end()}, {0}, -1, config.vocab);
  const Work work{0, 0, source->size() - 1};
  Adaptation adaptation(config, weights, o, 1, work.targets);
  Adapted done{.adapters = std::make_unique<DocumentAdapters>(make_adapters(adaptation, config, o, 1))};
  const int64_t chunks = (work.targets + o.chunk - 1) / o.chunk;
  double sum = 0;
  for (int64_t pass = 0; pass < passes; ++pass)
    for (int64_t ci = 0; ci < chunks; ++ci) {
      stop_if_asked(o);
      for (const double loss : adaptation.chunk(ci, {&work, 1}, *source, *done.adapters, 0, true)) {
        if (!std::isfinite(loss))
          fail(ErrorCode::numeric, "found a loss of ", loss, " in chunk ", ci, ", expected finite numbers");
        if (pass == 0) sum += loss;
      }
      done.adapters->step(1);
      if (o.progress)
        o.progress(pass * work.targets + std::min(work.targets, (ci + 1) * o.chunk), passes * work.targets);
    }
  done.loss = sum / double(work.targets);
  done.targets = work.targets, done.updates = done.adapters->updates();
  return done;
}

}  // namespace ingot
