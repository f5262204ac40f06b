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
    fail(ErrorCode::bad_data, source_->name(), ": found ", source_->size(), " tokens, expected at least 2 to score");
  const std::vector<int64_t> begins = source_->document_begins();
  documents_ = int64_t(begins.size());
  const int64_t inputs = source_->size() - 1;  // the last token is only a target
  if (options_.flat) {
    cut_flat(begins);
    return;
  }
  for (size_t d = 0; d < begins.size(); ++d)
    cut_document(begins[d], std::min(inputs, d + 1 < begins.size() ? begins[d + 1] : inputs), int32_t(d));
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

void EvaluationBatches::cut_document(int64_t begin, int64_t end, int32_t document) {
  const int64_t context = options_.context;
  if (options_.stride == 0) {
    for (int64_t at = begin; at < end; at += context)
      segments_.push_back({at, int32_t(std::min(context, end - at)), 0, document});
    return;
  }
  // Each segment scores what comes after `scored`; the last one is pushed back so that it is as long as the others.
  for (int64_t scored = begin; scored < end;) {
    const int64_t last = scored == begin ? std::min(end, begin + context) : std::min(end, scored + options_.stride);
    const int64_t first = std::max(begin, last - context);
    segments_.push_back({first, int32_t(last - first), int32_t(scored - first), document});
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
      const int64_t document_end = d + 1 < begins.size() ? begins[d + 1] : inputs;
      const int64_t length = std::min({options_.context, stop - at, document_end - at});
      segments_.push_back({at, int32_t(length), 0, int32_t(d)});
      at += length;
    }
  }
  firsts_.push_back(int64_t(segments_.size()));
}

void EvaluationBatches::fill(int64_t i, Batch& into) const {
  INGOT_CHECK(i >= 0 && i < count(), "evaluation: found batch ", i, ", expected less than ", count());
  into.tokens.clear();
  into.targets.clear();
  into.positions.clear();
  into.documents.clear();
  into.cu_seqlens.assign(1, 0);
  thread_local std::vector<int32_t> row;
  for (int64_t s = firsts_[size_t(i)]; s < firsts_[size_t(i) + 1]; ++s) {
    const Segment& segment = segments_[size_t(s)];
    row.resize(size_t(segment.length) + 1);
    source_->read(segment.begin, row);
    into.tokens.insert(into.tokens.end(), row.begin(), row.end() - 1);
    std::fill_n(row.begin() + 1, segment.unscored, -1);
    into.targets.insert(into.targets.end(), row.begin() + 1, row.end());
    for (int32_t t = 0; t < segment.length; ++t) into.positions.push_back(t);
    into.cu_seqlens.push_back(int32_t(into.tokens.size()));
    into.documents.push_back(segment.document);
  }
}

int64_t target_bytes(const Tokenizer& tokenizer, const Batch& batch) {
  int64_t sum = 0;
  for (size_t t = 0; t < batch.tokens.size(); ++t)
    if (batch.targets[t] >= 0) sum += tokenizer.bytes(batch.tokens[t], batch.targets[t]);
  return sum;
}

double bits_per_byte(double loss_sum, int64_t bytes) {
  return bytes > 0 ? loss_sum / std::log(2.0) / double(bytes) : NAN;
}

}  // namespace ingot
