#include "ingot/engines/ttt/document_windows.h"

#include <algorithm>

namespace ingot::adaptation {

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

int64_t most_tokens(std::span<const DocumentSpan> spans, int64_t together, const AdaptationOptions& o, Device device) {
  const int64_t longest = together * window_of(spans.front().targets, o);
  if (device.kind == Device::cpu || o.inexact != Inexact::none) return longest;
  int64_t all = 0;
  for (const DocumentSpan& w : spans) all += window_of(w.targets, o);
  return std::max(longest, std::min(all, together * o.window));
}
std::vector<std::span<const DocumentSpan>> batches_of(std::span<const DocumentSpan> spans, int64_t most, int64_t tokens,
                                                      const AdaptationOptions& o) {
  std::vector<std::span<const DocumentSpan>> all;
  for (size_t first = 0; first < spans.size(); first += all.back().size()) {
    const int64_t fit = std::max<int64_t>(1, tokens / window_of(spans[first].targets, o));
    all.push_back(spans.subspan(first, std::min(size_t(std::min(most, fit)), spans.size() - first)));
  }
  return all;
}

void Windows::clear() {
  for (auto* v : {&batch.tokens, &batch.targets, &batch.positions, &batch.last}) v->clear();
  batch.cu_seqlens.assign(1, 0);
  sequences.clear();
}

void Windows::fill_up(int64_t tokens) {
  for (int64_t t = 0; t < tokens; ++t) {
    batch.positions.push_back(batch.positions.back() + 1);
    batch.tokens.push_back(0), batch.targets.push_back(-1);
  }
  batch.cu_seqlens.back() += int32_t(tokens), batch.last.back() += int32_t(tokens);
}

void Windows::add(const TokenSource& source, const DocumentSpan& w, int64_t begin, int64_t end, int64_t position,
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

void Windows::pad(int64_t spare) {
  if (batch.size() >= kFewestTokens) return;
  for (int32_t t = 0; batch.size() < kFewestTokens; ++t) {
    batch.tokens.push_back(0);
    batch.positions.push_back(t);
  }
  batch.cu_seqlens.push_back(int32_t(batch.size()));
  batch.last.push_back(0);
  sequences.push_back(spare);
}

}  // namespace ingot::adaptation
