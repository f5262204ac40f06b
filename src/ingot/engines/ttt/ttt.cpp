#include "ingot/engines/ttt/ttt.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "ingot/core/clock.h"
#include "ingot/core/memory/memory.h"
#include "ingot/engines/train/device_batch.h"
#include "ingot/engines/train/pass_graphs.h"
#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/models/gpt/generate/device_weights.h"

namespace ingot {
namespace {

// Tokens [begin, begin + targets] of the source; all but the first are targets.
struct DocumentSpan {
  int64_t document, begin, targets;
};

// Documents in the order of adaptation, the longest first: concurrent documents end at about the same time, and
// continuing documents stand first.
std::vector<DocumentSpan> documents_of(const TokenSource& source) {
  const std::vector<int64_t> begins = source.document_begins();
  const int64_t last = source.size() - 1;
  std::vector<DocumentSpan> all;
  for (size_t d = 0; d < begins.size(); ++d) {
    // Without bos, the first token of the next document is no target.
    const int64_t end = d + 1 < begins.size() ? begins[d + 1] - (source.bos() < 0 ? 1 : 0) : last;
    if (end > begins[d]) all.push_back({int64_t(d), begins[d], end - begins[d]});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const DocumentSpan& a, const DocumentSpan& b) { return a.targets > b.targets; });
  return all;
}

// Products of fewer rows add in a different order (kernels/linear), so a document alone would get different bits than
// beside further documents. Shorter batches are therefore filled up with padding tokens.
constexpr int64_t kFewestTokens = 9;

// Windows of documents in the form for a model, and their sequences in a cache.
struct Windows {
  Batch batch;
  std::vector<int64_t> sequences;

  void clear() {
    for (auto* v : {&batch.tokens, &batch.targets, &batch.positions, &batch.last}) v->clear();
    batch.cu_seqlens.assign(1, 0);
    sequences.clear();
  }
  // Fills a document's last chunk up with padding tokens, which are never read or scored. Documents that end in the
  // same step then have windows of equal length, and share a product.
  void fill_up(int64_t tokens) {
    for (int64_t t = 0; t < tokens; ++t) {
      batch.positions.push_back(batch.positions.back() + 1);
      batch.tokens.push_back(0), batch.targets.push_back(-1);
    }
    batch.cu_seqlens.back() += int32_t(tokens), batch.last.back() += int32_t(tokens);
  }
  // Tokens [begin, end) of a document, at positions from `position` on; the targets of the last `scored` tokens are
  // scored.
  void add(const TokenSource& source, const DocumentSpan& w, int64_t begin, int64_t end, int64_t position,
           int64_t scored, int64_t sequence) {
    row_.resize(size_t(end - begin + 1));
    source.read(w.begin + begin, row_);
    batch.tokens.insert(batch.tokens.end(), row_.begin(), row_.end() - 1);
    for (int64_t t = begin; t < end; ++t) batch.positions.push_back(int32_t(position + t - begin));
    batch.cu_seqlens.push_back(int32_t(batch.tokens.size()));
    batch.last.push_back(int32_t(scored));
    batch.targets.insert(batch.targets.end(), row_.end() - scored, row_.end());
    sequences.push_back(sequence);
  }
  // Adds padding tokens, of a spare sequence, if the batch has too few tokens.
  void pad(int64_t spare) {
    if (batch.size() >= kFewestTokens) return;
    for (int32_t t = 0; batch.size() < kFewestTokens; ++t) {
      batch.tokens.push_back(0);
      batch.positions.push_back(t);
    }
    batch.cu_seqlens.push_back(int32_t(batch.size()));
    batch.last.push_back(0);
    sequences.push_back(spare);
  }

 private:
  std::vector<int32_t> row_;
};

// The memory of a model and its adapters, with the memory that must stay free.
int64_t bytes_of(const GptConfig& config, const AdaptationOptions& o, const GptTypes& types, const GptOptions& options,
                 int64_t documents) {
  constexpr int64_t kFree = int64_t(2) << 30;
  return Gpt::planned_bytes(config, types, options) + kFree +
         DocumentAdapters::bytes(config, layer_program(config, o.looping), o.adapters, types, documents + 1);
}

GptOptions model_options(const GptConfig& config, const AdaptationOptions& o, const GptTypes& types, Device device,
                         int64_t documents, int64_t tokens, int64_t longest) {
  const bool exact = o.inexact == Inexact::none;
  const int64_t window = std::min(o.window, longest);
  GptOptions options{
      .capacity = std::max(kFewestTokens, exact ? tokens : documents * std::min(o.chunk, longest)),
      .looping = o.looping,
      .training = true,
      .products = o.products,
      .max_adapter_rank = o.adapters.rank,
      .most_folded = device.kind == Device::cuda ? documents : 0,
      .most_scored = std::max(kFewestTokens, documents * o.chunk),
      .most_keys = exact ? 0 : std::max(kFewestTokens, window),
      .max_positions = std::max({o.inexact == Inexact::stale_keys ? longest : o.window, config.context, kFewestTokens}),
      .device = device,
      .stream = o.stream};
  if (device.kind == Device::cuda && o.any_order)  // padding tokens included
    options.any_order_segments = segment_bucket(documents + 1, options.capacity);
  if (device.kind == Device::cuda && exact) {  // rows are kept for the backward pass if memory suffices
    options.keep_rows = options.cut_last = true;
    options.keep_rows = bytes_of(config, o, types, options, documents) <= gpu::memory_of(device).available();
  }
  return options;
}

// The most documents side by side. `together` documents have whole windows; on a GPU there may be more shorter
// documents, with as many window tokens in all, if there is memory for their adapters.
int64_t most_documents(const GptConfig& config, const AdaptationOptions& o, const GptTypes& types, Device device,
                       int64_t together, int64_t tokens, int64_t longest) {
  if (device.kind == Device::cpu || o.inexact != Inexact::none) return together;
  int64_t most = kShorter * together;
  while (most > together && !model_options(config, o, types, device, most, tokens, longest).keep_rows)
    most = std::max(together, most / 2);
  return most;
}

// A model, and the adapters of the concurrent documents.
class Adaptation {
 public:
  // At most `documents` documents at once, with at most `tokens` window tokens in all.
  Adaptation(const GptConfig& config, const GptWeights& weights, const AdaptationOptions& options, int64_t documents,
             int64_t tokens, int64_t longest)
      : weights_(config, weights, options.stream),
        o_(options),
        types_(types_of(weights)),
        spare_(documents),
        model_(config, types_, model_options(config, options, types_, device(), documents, tokens, longest)),
        on_device_(device(), options.stream, model_.options().capacity),
        memory_(2 * Arena::aligned(types_.sums(), {model_.options().most_scored}), gpu::memory_of(device())),
        read_memory_(int64_t(kTurns) * Arena::aligned(types_.sums(), {model_.options().most_scored}),
                     device().kind == Device::cuda ? gpu::pinned_memory() : system_memory()) {
    loss_ = memory_.take(types_.sums(), {model_.options().most_scored});
    dloss_ = memory_.take(types_.sums(), {model_.options().most_scored});
    if (o_.inexact == Inexact::none) return;
    const int64_t capacity = std::max(kFewestTokens, o_.inexact == Inexact::stale_keys ? longest : window(longest));
    cache_ = std::make_unique<GptCache>(config, model_.program(), documents + 1, capacity, types_.activations,
                                        gpu::memory_of(device()));
    if (o_.inexact == Inexact::stale_keys) return;
    GptOptions prefix = model_.options();
    prefix.training = false;
    prefix.capacity = std::max(kFewestTokens, tokens);
    prefix_ = std::make_unique<Gpt>(config, types_, prefix);
    prefix_on_device_ = std::make_unique<DeviceBatch>(device(), options.stream, prefix.capacity);
  }
  Device device() const { return weights_.weights().master.device; }
  const LayerProgram& program() const { return model_.program(); }
  GptTypes types() const { return types_; }
  int64_t window_tokens() const { return window_tokens_; }

  // Runs chunk `ci` of the given documents, with adapters from `first` on (and a spare adapter after these). With
  // `learn` the gradients of the adapters are computed too. On a GPU the work is only put into the stream. The result
  // is the argument of losses_of(), which must be called within kTurns further calls.
  static constexpr size_t kTurns = 4;
  size_t chunk(int64_t ci, std::span<const DocumentSpan> spans, const TokenSource& source, DocumentAdapters& adapters,
               int64_t first, bool learn) {
    fill_windows(ci, spans, source, adapters, first, !learn && device().kind == Device::cuda);
    const TokenBatch batch = on_device_.put(windows_.batch);
    const int64_t scored = int64_t(windows_.batch.targets.size());
    const Tensor loss = loss_.slice(0, 0, scored), dloss = dloss_.slice(0, 0, scored);
    const int64_t segments = windows_.batch.segments();
    const GptAdapters values = adapters.values(first, segments);
    const std::optional<CachedSegments> cached =
        cache_ ? std::optional<CachedSegments>({*cache_, windows_.sequences, o_.window}) : std::nullopt;
    const CachedSegments* const in_cache = cached ? &*cached : nullptr;
    if (!learn) {
      model_.losses(weights_.weights(), batch, loss, &values, nullptr, in_cache);
    } else {
      GptAdapters gradients = adapters.gradients(segments);
      ingot::fill({.to = dloss, .value = 1 / double(windows_.batch.last.front())}, o_.stream);
      model_.losses_and_gradients(weights_.weights(), batch, dloss, loss, {}, &values, &gradients, in_cache);
    }
    for (const int32_t target : windows_.batch.targets) window_tokens_ -= target < 0;
    window_tokens_ += windows_.batch.cu_seqlens[spans.size()];
    turn_ = (turn_ + 1) % kTurns;
    Read& read = reads_[turn_];
    read.targets = windows_.batch.targets;
    read.losses = read_memory_.at(int64_t(turn_) * Arena::aligned(types_.sums(), loss_.shape), types_.sums(), {scored});
    ingot::copy({.from = loss, .to = read.losses}, o_.stream);
    if (device().kind == Device::cuda) {
      if (!read.done) read.done = std::make_unique<gpu::Event>();
      read.done->record(o_.stream);
    }
    return turn_;
  }
  // Waits for the losses of a chunk's targets and returns the losses, document by document.
  std::vector<double> losses_of(size_t turn) {
    Read& read = reads_[turn];
    if (read.done) read.done->synchronize();
    std::vector<double> losses;
    for (size_t t = 0; t < read.targets.size(); ++t)
      if (read.targets[t] >= 0)
        losses.push_back(types_.sums() == DType::f64 ? read.losses.ptr<double>()[t]
                                                     : double(read.losses.ptr<float>()[t]));
    return losses;
  }

 private:
  int64_t window(int64_t longest) const { return std::min(o_.window, longest); }

  // The windows that end with the chunk, with positions from 0 in each. With a cache, the chunk alone; the rest of the
  // window is run before the chunk if its keys must belong to the present adapters.
  void fill_windows(int64_t ci, std::span<const DocumentSpan> spans, const TokenSource& source,
                    const DocumentAdapters& adapters, int64_t first, bool fill_up) {
    const auto of_each = [&](Windows& windows, auto&& add) {
      windows.clear();
      int64_t sequence = first;
      for (const DocumentSpan& w : spans) {
        const int64_t end = std::min(w.targets, (ci + 1) * o_.chunk);
        add(w, std::max<int64_t>(0, end - o_.window), ci * o_.chunk, end, sequence++);
      }
      windows.pad(spare_);
    };
    const auto forget = [&](int64_t sequence) { cache_->truncate(sequence, 0); };
    if (o_.inexact == Inexact::none)
      return of_each(windows_, [&](const DocumentSpan& w, int64_t begin, int64_t chunk, int64_t end, int64_t sequence) {
        windows_.add(source, w, begin, end, 0, end - chunk, sequence);
        if (fill_up && chunk + o_.chunk <= o_.window) windows_.fill_up(chunk + o_.chunk - end);
      });
    forget(spare_);
    if (o_.inexact == Inexact::stale_keys)
      return of_each(windows_, [&](const DocumentSpan& w, int64_t, int64_t chunk, int64_t end, int64_t sequence) {
        if (ci == 0) forget(sequence);
        windows_.add(source, w, chunk, end, chunk, end - chunk, sequence);
      });
    of_each(prefixes_, [&](const DocumentSpan& w, int64_t begin, int64_t chunk, int64_t, int64_t sequence) {
      forget(sequence);
      prefixes_.add(source, w, begin, chunk, 0, 0, sequence);
    });
    if (ci > 0) {
      const GptAdapters values = adapters.values(first, prefixes_.batch.segments());
      prefix_->extend(weights_.weights(), prefix_on_device_->put(prefixes_.batch), prefixes_.sequences, *cache_,
                      Tensor(nullptr, DType::i32, {0}), {}, &values);
      window_tokens_ += prefixes_.batch.cu_seqlens[spans.size()];
      forget(spare_);
    }
    of_each(windows_, [&](const DocumentSpan& w, int64_t begin, int64_t chunk, int64_t end, int64_t sequence) {
      windows_.add(source, w, chunk, end, chunk - begin, end - chunk, sequence);
    });
  }

  FrozenWeights weights_;
  const AdaptationOptions& o_;
  GptTypes types_;
  int64_t spare_;  // sequence of the cache
  Gpt model_;
  DeviceBatch on_device_;
  Arena memory_, read_memory_;
  Tensor loss_, dloss_;
  struct Read {
    std::vector<int32_t> targets;
    Tensor losses;                     // in host memory
    std::unique_ptr<gpu::Event> done;  // on a GPU: when the losses have arrived
  };
  std::array<Read, kTurns> reads_;
  size_t turn_ = 0;
  Windows windows_, prefixes_;
  // Used by inexact adaptation only.
  std::unique_ptr<GptCache> cache_;
  std::unique_ptr<Gpt> prefix_;
  std::unique_ptr<DeviceBatch> prefix_on_device_;
  int64_t window_tokens_ = 0;
};

DocumentAdapters make_adapters(const Adaptation& a, const GptConfig& config, const AdaptationOptions& o,
                               int64_t documents) {
  ++documents;  // padding tokens read adapters too
  require_memory(DocumentAdapters::bytes(config, a.program(), o.adapters, a.types(), documents),
                 detail::concat("adapting ", documents - 1, " documents at once"), gpu::memory_of(a.device()));
  DocumentAdapters adapters(config, a.program(), o.adapters, a.types(), documents, a.device(), o.stream);
  if (o.begin_from != nullptr) adapters.begin_from(*o.begin_from);
  return adapters;
}

// The window of a document's last chunk, filled up to a whole chunk.
int64_t window_of(int64_t targets, const AdaptationOptions& o) {
  return std::min(o.window, (targets + o.chunk - 1) / o.chunk * o.chunk);
}
// The smallest n of all ranks.
int64_t agreed(int64_t n, Communicator* ranks) {
  if (ranks == nullptr) return n;
  std::vector<int64_t> all(size_t(ranks->world()));
  ranks->gather_bytes(&n, sizeof n, all.data());
  return *std::min_element(all.begin(), all.end());
}
// The most window tokens of a batch: the tokens of the `together` longest documents, or, if more shorter documents fit,
// of `together` whole windows.
int64_t most_tokens(std::span<const DocumentSpan> spans, int64_t together, const AdaptationOptions& o, Device device) {
  const int64_t longest = together * window_of(spans.front().targets, o);
  if (device.kind == Device::cpu || o.inexact != Inexact::none) return longest;
  int64_t all = 0;
  for (const DocumentSpan& w : spans) all += window_of(w.targets, o);
  return std::max(longest, std::min(all, together * o.window));
}
// Batches of consecutive documents in the order of adaptation: at most `most` documents and `tokens` window tokens
// each.
std::vector<std::span<const DocumentSpan>> batches_of(std::span<const DocumentSpan> spans, int64_t most, int64_t tokens,
                                                      const AdaptationOptions& o) {
  std::vector<std::span<const DocumentSpan>> all;
  for (size_t first = 0; first < spans.size(); first += all.back().size()) {
    const int64_t fit = std::max<int64_t>(1, tokens / window_of(spans[first].targets, o));
    all.push_back(spans.subspan(first, std::min(size_t(std::min(most, fit)), spans.size() - first)));
  }
  return all;
}

constexpr double kLongestWait = 1e6;  // seconds: slower ranks may still have a long document

// Adds the results of all ranks. A single rank scores each document, so adding the zeros of all further ranks keeps the
// bits.
void add_ranks(std::vector<DocumentScore>& scores, AdaptedScore& total, Communicator& ranks) {
  const size_t world = size_t(ranks.world());
  ranks.barrier(kLongestWait);
  std::vector<DocumentScore> all(scores.size() * world);
  ranks.gather_bytes(scores.data(), int64_t(scores.size() * sizeof(DocumentScore)), all.data());
  for (size_t i = 0; i < all.size(); ++i) {
    if (i / scores.size() == size_t(ranks.rank())) continue;
    DocumentScore& d = scores[i % scores.size()];
    d.loss_sum += all[i].loss_sum, d.targets += all[i].targets, d.bytes += all[i].bytes;
  }
  std::vector<AdaptedScore> totals(world);
  ranks.gather_bytes(&total, sizeof total, totals.data());
  total = {};
  for (const AdaptedScore& t : totals) {
    total.window_tokens += t.window_tokens, total.updates += t.updates;
    total.whole_tokens += t.whole_tokens, total.whole_seconds += t.whole_seconds;
  }
}

// A completed chunk and its optimizer step; both are reported while the next chunk runs.
struct SubmittedChunk {
  int64_t chunk, updates;  // updates: optimizer steps before this chunk
  std::span<const DocumentSpan> spans;
  bool learnt;
  size_t losses;
};

// The sums of the losses of all chunks, and the reports to listeners.
class ScoreSums {
 public:
  ScoreSums(Adaptation& adaptation, const Tokenizer& tokenizer, const TokenSource& source, const AdaptationOptions& o)
      : adaptation_(adaptation),
        tokenizer_(tokenizer),
        source_(source),
        options_(o),
        scores_(source.document_begins().size()) {
    for (const DocumentSpan& w : documents_of(source)) all_ += w.targets;
  }

  // Counts the targets before a batch as done, although other ranks may still adapt to some of them.
  void count_as_done(std::span<const DocumentSpan> before) {
    done_ = 0;
    for (const DocumentSpan& w : before) done_ += w.targets;
  }
  void updated(int64_t documents) { total_.updates += documents; }
  void report(const std::vector<SubmittedChunk>& runs) {
    for (const SubmittedChunk& run : runs) add(run);
    time(runs);
    for (const SubmittedChunk& run : runs)
      if (run.learnt) log_updates(run);
    if (!runs.empty() && options_.progress) options_.progress(done_, all_);
  }
  // The result over all ranks. Call after the last report.
  AdaptedScore total() {
    total_.window_tokens = adaptation_.window_tokens();
    if (options_.ranks != nullptr && options_.ranks->world() > 1) add_ranks(scores_, total_, *options_.ranks);
    AdaptedScore t = total_;
    double sum = 0;  // added in the order of the documents, whatever their batches were
    for (const DocumentScore& d : scores_) sum += d.loss_sum, t.targets += d.targets, t.bytes += d.bytes;
    t.loss = t.targets > 0 ? sum / double(t.targets) : 0;
    t.bits_per_byte = t.bytes > 0 ? bits_per_byte(sum, t.bytes) : 0;
    return t;
  }
  const std::vector<DocumentScore>& scores() const { return scores_; }

 private:
  // Adds the losses of a chunk's targets.
  void add(const SubmittedChunk& run) {
    const std::vector<double> losses = adaptation_.losses_of(run.losses);
    size_t next = 0;
    for (const DocumentSpan& w : run.spans) {
      const int64_t begin = run.chunk * options_.chunk, end = std::min(w.targets, begin + options_.chunk);
      double sum = 0;
      for (int64_t t = begin; t < end; ++t) sum += losses[next++];
      if (!std::isfinite(sum))
        fail(ErrorCode::numeric, source_.name(), ": found a loss of ", sum, " in chunk ", run.chunk, " of document ",
             w.document, ", expected finite numbers");
      const int64_t before = std::min(begin, Tokenizer::kContext);
      std::vector<int32_t> ids(size_t(before + end - begin + 1));
      source_.read(w.begin + begin - before, ids);
      DocumentScore& of = scores_[size_t(w.document)];
      for (size_t t = size_t(before) + 1; t < ids.size(); ++t)
        of.bytes += tokenizer_.bytes_after(std::span(ids).first(t), ids[t]);
      of.loss_sum += sum, of.targets += end - begin, done_ += end - begin;
      if (options_.listener)
        options_.listener({.kind = AdaptationEvent::score,
                           .document = w.document,
                           .chunk = run.chunk,
                           .first = w.begin + begin + 1,
                           .end = w.begin + end + 1,
                           .updates = run.updates,
                           .loss_sum = sum});
    }
  }
  // Computes AdaptedScore::whole_seconds.
  void time(const std::vector<SubmittedChunk>& runs) {
    const bool is_whole = options_.inexact == Inexact::none && runs.size() == 1 && runs[0].learnt &&
                          (runs[0].chunk + 1) * options_.chunk >= options_.window;
    const size_t whole = is_whole ? runs[0].spans.size() : 0;
    const Clock::time_point now = Clock::now();
    if (whole > 0 && whole == whole_before_) {
      total_.whole_tokens += int64_t(whole) * options_.window;
      total_.whole_seconds += std::chrono::duration<double>(now - last_).count();
    }
    last_ = now, whole_before_ = whole;
  }
  void log_updates(const SubmittedChunk& run) const {
    if (!options_.listener) return;
    for (const DocumentSpan& w : run.spans)
      options_.listener({.kind = AdaptationEvent::update,
                         .document = w.document,
                         .chunk = run.chunk,
                         .first = w.begin + run.chunk * options_.chunk + 1,
                         .end = w.begin + (run.chunk + 1) * options_.chunk + 1,
                         .updates = run.updates + 1});
  }

  Adaptation& adaptation_;
  const Tokenizer& tokenizer_;
  const TokenSource& source_;
  const AdaptationOptions& options_;
  std::vector<DocumentScore> scores_;
  AdaptedScore total_;          // without the sums in scores_
  int64_t done_ = 0, all_ = 0;  // targets
  Clock::time_point last_;
  size_t whole_before_ = 0;  // documents of the previous step if all its windows were whole, else 0
};

void stop_if_asked(const AdaptationOptions& o) {
  if (o.cancelled && o.cancelled()) fail(ErrorCode::interrupted, "stopped by a signal");
}

// Adapts documents side by side, chunk by chunk, the longest document first. Continuing documents learn from a chunk
// after its score.
void score_batch(std::span<const DocumentSpan> batch, const TokenSource& source, const AdaptationOptions& o,
                 Adaptation& adaptation, DocumentAdapters& adapters, ScoreSums& sums) {
  const auto chunks = [&](const DocumentSpan& w) { return (w.targets + o.chunk - 1) / o.chunk; };
  std::vector<SubmittedChunk> running;
  for (int64_t ci = 0; ci < chunks(batch.front()); ++ci) {
    stop_if_asked(o);
    const auto more_than = [&](int64_t n) {
      return size_t(std::count_if(batch.begin(), batch.end(), [&](const DocumentSpan& w) { return chunks(w) > n; }));
    };
    const std::span<const DocumentSpan> learning = batch.first(more_than(ci + 1)),
                                        ending = batch.subspan(learning.size(), more_than(ci) - learning.size());
    std::vector<SubmittedChunk> runs;
    const auto run = [&](std::span<const DocumentSpan> some, int64_t first, bool learn) {
      if (some.empty()) return;
      runs.push_back({ci, adapters.updates(), some, learn, adaptation.chunk(ci, some, source, adapters, first, learn)});
    };
    run(ending, int64_t(learning.size()), false);
    run(learning, 0, true);
    if (!learning.empty()) adapters.step(int64_t(learning.size()));
    sums.updated(int64_t(learning.size()));
    sums.report(running);
    running = std::move(runs);
  }
  sums.report(running);
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
  if (o.inexact != Inexact::none && config.learned_positions)
    fail(ErrorCode::unsupported, "adaptation: found learned positions, expected rotary ones for what is inexact");
  if (o.documents < 1) fail(ErrorCode::usage, "adaptation: found ", o.documents, " documents, expected at least 1");
  if (o.documents * o.window >= INT32_MAX)
    fail(ErrorCode::usage, "adaptation: found ", o.documents, " windows of ", o.window, ", expected fewer tokens than ",
         INT32_MAX);
}

AdaptedScore score_adapted(const GptConfig& config, const GptWeights& weights, const Tokenizer& tokenizer,
                           std::shared_ptr<const TokenSource> source, const AdaptationOptions& o,
                           std::vector<DocumentScore>* documents) {
  const auto start = Clock::now();
  check(o, config);
  if (source->size() < 2)
    fail(ErrorCode::bad_data, source->name(), ": number of tokens to score: found ", source->size(),
         ", expected at least 2");
  const std::vector<DocumentSpan> spans = documents_of(*source);
  if (spans.empty())
    fail(ErrorCode::bad_data, source->name(), ": found no document of two tokens, expected one to score");
  const int64_t world = o.ranks != nullptr ? o.ranks->world() : 1;
  const int64_t mine = (int64_t(spans.size()) + world - 1) / world, together = std::min(o.documents, mine);
  const int64_t longest = spans.front().targets, tokens = most_tokens(spans, together, o, weights.master.device);
  const int64_t most = std::min(
      mine,
      agreed(most_documents(config, o, types_of(weights), weights.master.device, together, tokens, longest), o.ranks));
  const std::vector<std::span<const DocumentSpan>> batches = batches_of(spans, most, tokens, o);
  Adaptation adaptation(config, weights, o, most, tokens, longest);
  DocumentAdapters adapters = make_adapters(adaptation, config, o, most);
  ScoreSums sums(adaptation, tokenizer, *source, o);
  int64_t turn = o.ranks != nullptr ? o.ranks->rank() : 0;
  const std::function<int64_t()> claim = o.claim ? o.claim : [&] { return std::exchange(turn, turn + world); };
  for (size_t next; (next = size_t(claim())) < batches.size();) {
    const std::span<const DocumentSpan> batch = batches[next];
    if (world > 1) sums.count_as_done(std::span(spans).first(size_t(batch.data() - spans.data())));
    adapters.reset(int64_t(batch.size()) + 1);  // documents + 1: padding tokens read adapters too
    score_batch(batch, *source, o, adaptation, adapters, sums);
  }
  AdaptedScore total = sums.total();
  total.seconds = seconds_since(start);
  if (documents != nullptr) *documents = sums.scores();
  return total;
}

Adapted adapt(const GptConfig& config, const GptWeights& weights, std::span<const int32_t> tokens,
              const AdaptationOptions& o, int64_t passes) {
  check(o, config);
  if (tokens.size() < 2)
    fail(ErrorCode::bad_data, "number of tokens to learn from: found ", tokens.size(), ", expected at least 2");
  INGOT_CHECK_GE(passes, 1, "adapt: passes");
  const auto source = tokens_in_memory({tokens.begin(), tokens.end()}, {0}, -1, config.vocab);
  const DocumentSpan work{0, 0, source->size() - 1};
  Adaptation adaptation(config, weights, o, 1, window_of(work.targets, o), work.targets);
  Adapted done{.adapters = std::make_unique<DocumentAdapters>(make_adapters(adaptation, config, o, 1))};
  const int64_t chunks = (work.targets + o.chunk - 1) / o.chunk;
  double sum = 0;
  for (int64_t pass = 0; pass < passes; ++pass)
    for (int64_t ci = 0; ci < chunks; ++ci) {
      stop_if_asked(o);
      for (const double loss :
           adaptation.losses_of(adaptation.chunk(ci, {&work, 1}, *source, *done.adapters, 0, true))) {
        if (!std::isfinite(loss))
          fail(ErrorCode::numeric, "found a loss of ", loss, " in chunk ", ci, ", expected finite numbers");
        if (pass == 0) sum += loss;
      }
      done.adapters->step(1);
      if (o.progress)
        o.progress(pass * work.targets + std::min(work.targets, (ci + 1) * o.chunk), passes * work.targets);
    }
  gpu::synchronize(adaptation.device(), o.stream);  // the reader of the adapters may use another stream
  done.loss = sum / double(work.targets);
  done.targets = work.targets, done.updates = done.adapters->updates();
  return done;
}

}  // namespace ingot
