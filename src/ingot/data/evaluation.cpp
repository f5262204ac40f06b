#include "ingot/data/evaluation.h"

#include <algorithm>
#include <cmath>

namespace ingot {

EvaluationBatches::EvaluationBatches(std::shared_ptr<const TokenSource> source, const EvaluationOptions& options)
    : source_(std::move(source)), options_(options) {
  INGOT_CHECK_GE(options.tokens, 1, "evaluation: tokens of a batch");
  INGOT_CHECK_LT(options.tokens, INT32_MAX, "evaluation: tokens of a batch");
  INGOT_CHECK_GE(options.context, 1, "evaluation: context");
  INGOT_CHECK(options.stride >= 0 && options.stride <= options.context, "evaluation: found stride ", options.stride,
              ", expected at most the context of ", options.context);
  INGOT_CHECK(!(options.flat && options.stride > 0), "evaluation: flat batches do not slide");
  options_.context = std::min(options.context, options.tokens);
  options_.stride = std::min(options.stride, options_.context);
  if (source_->size() < 2)
    fail(ErrorCode::bad_data, source_->name(), ": number of tokens to score: found ", source_->size(),
         ", expected at least 2");
  const std::vector<int64_t> begins = source_->document_begins();
  documents_ = int64_t(begins.size());
  if (options_.flat)
    cut_flat(begins);
  else
    for (size_t d = 0; d < begins.size(); ++d) cut_document(begins[d], inputs_end(begins, d), int32_t(d));
  if (segments_.empty())
    fail(ErrorCode::bad_data, source_->name(), ": found no document of two tokens, expected one to score");
  if (options_.flat) return;
  int64_t used = options_.tokens;
  for (size_t i = 0; i < segments_.size(); ++i) {
    if (used + segments_[i].length > options_.tokens) {
      firsts_.push_back(int64_t(i));
      used = 0;
    }
    used += segments_[i].length;
  }
  firsts_.push_back(int64_t(segments_.size()));
}

int64_t EvaluationBatches::targets() const {
  int64_t sum = 0;
  for (const Segment& s : segments_) sum += s.length - s.unscored;
  return sum;
}

// Where the inputs of document d end: the last token is no input if no target follows.
int64_t EvaluationBatches::inputs_end(const std::vector<int64_t>& begins, size_t d) const {
  if (d + 1 == begins.size()) return source_->size() - 1;
  return begins[d + 1] - (source_->bos() < 0 ? 1 : 0);
}

void EvaluationBatches::add_segment(int64_t begin, int64_t length, int64_t unscored, int64_t document_begin,
                                    int64_t document) {
  segments_.push_back({begin, int32_t(length), int32_t(unscored),
                       int32_t(std::min<int64_t>(Tokenizer::kContext, begin - document_begin)), int32_t(document)});
}

void EvaluationBatches::cut_document(int64_t begin, int64_t end, int32_t document) {
  const int64_t context = options_.context;
  if (options_.stride == 0) {
    for (int64_t at = begin; at < end; at += context) add_segment(at, std::min(context, end - at), 0, begin, document);
    return;
  }
  // Each segment scores the tokens after `scored`. The last segment begins earlier, and is as long as the previous
  // segments.
  for (int64_t scored = begin; scored < end;) {
    const int64_t last = scored == begin ? std::min(end, begin + context) : std::min(end, scored + options_.stride);
    const int64_t first = std::max(begin, last - context);
    add_segment(first, last - first, scored - first, begin, document);
    scored = last;
  }
}

void EvaluationBatches::cut_flat(const std::vector<int64_t>& begins) {
  const int64_t inputs = source_->size() - 1;
  size_t d = 0;
  for (int64_t batch = 0; batch < inputs; batch += options_.tokens) {
    firsts_.push_back(int64_t(segments_.size()));
    const int64_t stop = std::min(inputs, batch + options_.tokens);
    for (int64_t at = batch; at < stop;) {
      while (d + 1 < begins.size() && begins[d + 1] <= at) ++d;
      const int64_t end = inputs_end(begins, d);
      const int64_t length = std::min({options_.context, stop - at, end - at});
      if (length > 0) add_segment(at, length, 0, begins[d], int64_t(d));
      at += length;
      if (at >= end) at = std::max(at, d + 1 < begins.size() ? begins[d + 1] : end);
    }
    if (firsts_.back() == int64_t(segments_.size()))
      firsts_.pop_back();  // the batch holds only a document's last token
  }
  firsts_.push_back(int64_t(segments_.size()));
}

void EvaluationBatches::fill(int64_t i, Batch& into) const {
  INGOT_CHECK(i >= 0 && i < count(), "evaluation: found batch ", i, ", expected less than ", count());
  into.tokens.clear();
  into.targets.clear();
  into.positions.clear();
  into.documents.clear();
  into.before.clear();
  into.cu_seqlens.assign(1, 0);
  thread_local std::vector<int32_t> row;
  for (int64_t s = firsts_[size_t(i)]; s < firsts_[size_t(i) + 1]; ++s) {
    const Segment& segment = segments_[size_t(s)];
    row.resize(size_t(segment.before + segment.length) + 1);
    source_->read(segment.begin - segment.before, row);
    into.before.emplace_back(row.begin(), row.begin() + segment.before);
    row.erase(row.begin(), row.begin() + segment.before);
    into.tokens.insert(into.tokens.end(), row.begin(), row.end() - 1);
    std::fill_n(row.begin() + 1, segment.unscored, -1);
    into.targets.insert(into.targets.end(), row.begin() + 1, row.end());
    for (int32_t t = 0; t < segment.length; ++t) into.positions.push_back(t);
    into.cu_seqlens.push_back(int32_t(into.tokens.size()));
    into.documents.push_back(segment.document);
  }
}

int64_t target_bytes(const Tokenizer& tokenizer, const Batch& batch, int64_t s, int64_t t) {
  const int64_t begin = batch.cu_seqlens[size_t(s)];
  const int32_t id = batch.targets[size_t(t)];
  const auto in_segment = std::span(batch.tokens).subspan(size_t(begin), size_t(t - begin + 1));
  if (in_segment.size() >= size_t(Tokenizer::kContext) || batch.before.empty() || batch.before[size_t(s)].empty())
    return tokenizer.bytes_after(in_segment, id);
  std::vector<int32_t> context = batch.before[size_t(s)];
  context.insert(context.end(), in_segment.begin(), in_segment.end());
  return tokenizer.bytes_after(context, id);
}

int64_t target_bytes(const Tokenizer& tokenizer, const Batch& batch) {
  int64_t sum = 0;
  for (int64_t s = 0; s < batch.segments(); ++s)
    for (int64_t t = batch.cu_seqlens[size_t(s)]; t < batch.cu_seqlens[size_t(s) + 1]; ++t)
      if (batch.targets[size_t(t)] >= 0) sum += target_bytes(tokenizer, batch, s, t);
  return sum;
}

int64_t expected_bytes(int64_t document_bytes, const Tokenizer& tokenizer, const TokenSource& source) {
  if (tokenizer.bos() >= 0) return document_bytes;
  for (const int64_t begin : source.document_begins()) {
    int32_t first = 0;
    source.read(begin, std::span(&first, 1));
    document_bytes -= tokenizer.bytes(-1, first);
  }
  return document_bytes;
}

double bits_per_byte(double loss_sum, int64_t bytes) {
  return bytes > 0 ? loss_sum / std::log(2.0) / double(bytes) : NAN;
}

}  // namespace ingot
