#include "ingot/engines/ttt/adaptation.h"

#include <algorithm>
#include <optional>

#include "ingot/core/memory/memory.h"
#include "ingot/engines/train/pass_graphs.h"
#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/copy/copy.h"

namespace ingot::adaptation {

namespace {

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
  if (device.kind == Device::cuda && o.any_order)  // one segment more, for the padding tokens
    options.any_order_segments = segment_bucket(documents + 1, options.capacity);
  if (device.kind == Device::cuda && exact) {  // rows are kept for the backward pass if memory suffices
    options.keep_rows = options.cut_last = true;
    options.keep_rows = bytes_of(config, o, types, options, documents) <= gpu::memory_of(device).available();
  }
  return options;
}

}  // namespace

int64_t most_documents(const GptConfig& config, const AdaptationOptions& o, const GptTypes& types, Device device,
                       int64_t together, int64_t tokens, int64_t longest) {
  if (device.kind == Device::cpu || o.inexact != Inexact::none) return together;
  int64_t most = kShorter * together;
  while (most > together && !model_options(config, o, types, device, most, tokens, longest).keep_rows)
    most = std::max(together, most / 2);
  return most;
}

Adaptation::Adaptation(const GptConfig& config, const GptWeights& weights, const AdaptationOptions& options,
                       int64_t documents, int64_t tokens, int64_t longest)
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

size_t Adaptation::chunk(int64_t ci, std::span<const DocumentSpan> spans, const TokenSource& source,
                         DocumentAdapters& adapters, int64_t first, bool learn) {
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

std::vector<double> Adaptation::losses_of(size_t turn) {
  Read& read = reads_[turn];
  if (read.done) read.done->synchronize();
  std::vector<double> losses;
  for (size_t t = 0; t < read.targets.size(); ++t)
    if (read.targets[t] >= 0)
      losses.push_back(types_.sums() == DType::f64 ? read.losses.ptr<double>()[t]
                                                   : double(read.losses.ptr<float>()[t]));
  return losses;
}

void Adaptation::fill_windows(int64_t ci, std::span<const DocumentSpan> spans, const TokenSource& source,
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

DocumentAdapters make_adapters(const Adaptation& a, const GptConfig& config, const AdaptationOptions& o,
                               int64_t documents) {
  ++documents;  // padding tokens read the adapters of one more document
  require_memory(DocumentAdapters::bytes(config, a.program(), o.adapters, a.types(), documents),
                 detail::concat("adapting ", documents - 1, " documents at once"), gpu::memory_of(a.device()));
  DocumentAdapters adapters(config, a.program(), o.adapters, a.types(), documents, a.device(), o.stream);
  if (o.begin_from != nullptr) adapters.begin_from(*o.begin_from);
  return adapters;
}

}  // namespace ingot::adaptation
