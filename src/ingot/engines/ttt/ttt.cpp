#include "ingot/engines/ttt/ttt.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ingot/core/clock.h"
#include "ingot/engines/ttt/adaptation.h"
#include "ingot/engines/ttt/score_sums.h"
#include "ingot/gpu/device.h"

namespace ingot {
namespace {

using namespace adaptation;

// The smallest n of all ranks.
int64_t agreed(int64_t n, Communicator* ranks) {
  if (ranks == nullptr) return n;
  std::vector<int64_t> all(size_t(ranks->world()));
  ranks->gather_bytes(&n, sizeof n, all.data());
  return *std::min_element(all.begin(), all.end());
}
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
