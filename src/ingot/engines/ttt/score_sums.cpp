#include "ingot/engines/ttt/score_sums.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace ingot::adaptation {

namespace {

constexpr double kLongestWait = 1e6;  // seconds: slower ranks may still have a long document

// Adds the results of all ranks. Each document is scored by one rank. The other ranks contribute zeros, so the sum has
// the same bits as that rank's score.
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

}  // namespace

ScoreSums::ScoreSums(Adaptation& adaptation, const Tokenizer& tokenizer, const TokenSource& source,
                     const AdaptationOptions& o)
    : adaptation_(adaptation),
      tokenizer_(tokenizer),
      source_(source),
      options_(o),
      scores_(source.document_begins().size()) {
  for (const DocumentSpan& w : documents_of(source)) all_ += w.targets;
}

void ScoreSums::count_as_done(std::span<const DocumentSpan> before) {
  done_ = 0;
  for (const DocumentSpan& w : before) done_ += w.targets;
}

void ScoreSums::report(const std::vector<SubmittedChunk>& runs) {
  for (const SubmittedChunk& run : runs) add(run);
  time(runs);
  for (const SubmittedChunk& run : runs)
    if (run.learnt) log_updates(run);
  if (!runs.empty() && options_.progress) options_.progress(done_, all_);
}

AdaptedScore ScoreSums::total() {
  total_.window_tokens = adaptation_.window_tokens();
  if (options_.ranks != nullptr && options_.ranks->world() > 1) add_ranks(scores_, total_, *options_.ranks);
  AdaptedScore t = total_;
  double sum = 0;  // added in the order of the documents, whatever their batches were
  for (const DocumentScore& d : scores_) sum += d.loss_sum, t.targets += d.targets, t.bytes += d.bytes;
  t.loss = t.targets > 0 ? sum / double(t.targets) : 0;
  t.bits_per_byte = t.bytes > 0 ? bits_per_byte(sum, t.bytes) : 0;
  return t;
}

void ScoreSums::add(const SubmittedChunk& run) {
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

void ScoreSums::time(const std::vector<SubmittedChunk>& runs) {
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

void ScoreSums::log_updates(const SubmittedChunk& run) const {
  if (!options_.listener) return;
  for (const DocumentSpan& w : run.spans)
    options_.listener({.kind = AdaptationEvent::update,
                       .document = w.document,
                       .chunk = run.chunk,
                       .first = w.begin + run.chunk * options_.chunk + 1,
                       .end = w.begin + (run.chunk + 1) * options_.chunk + 1,
                       .updates = run.updates + 1});
}

}  // namespace ingot::adaptation
