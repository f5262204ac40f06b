#pragma once
// Documents in the order of adaptation, their batches, and the windows of a batch in the form for a model.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "ingot/data/packer.h"
#include "ingot/engines/ttt/ttt.h"

namespace ingot::adaptation {

// Tokens [begin, begin + targets] of the source; all but the first are targets.
struct DocumentSpan {
  int64_t document, begin, targets;
};

// Documents in the order of adaptation, the longest first: concurrent documents end at about the same time, and
// continuing documents stand first.
std::vector<DocumentSpan> documents_of(const TokenSource& source);
// The window of a document's last chunk, filled up to a whole chunk.
inline int64_t window_of(int64_t targets, const AdaptationOptions& o) {
  return std::min(o.window, (targets + o.chunk - 1) / o.chunk * o.chunk);
}
// The most window tokens of a batch: the tokens of the `together` longest documents, or, if more shorter documents fit,
// of `together` whole windows.
int64_t most_tokens(std::span<const DocumentSpan> spans, int64_t together, const AdaptationOptions& o, Device device);
// Batches of consecutive documents in the order of adaptation: at most `most` documents and `tokens` window tokens
// each.
std::vector<std::span<const DocumentSpan>> batches_of(std::span<const DocumentSpan> spans, int64_t most, int64_t tokens,
                                                      const AdaptationOptions& o);

// Products of fewer rows add in a different order (kernels/linear), so the result of a document alone would differ in
// the last bits from its result in a larger batch. Shorter batches are therefore filled up with padding tokens.
constexpr int64_t kFewestTokens = 9;

// Windows of documents in the form for a model, and their sequences in a cache.
struct Windows {
  Batch batch;
  std::vector<int64_t> sequences;

  void clear();
  // Fills a document's last chunk up with padding tokens, which are never read or scored. Documents that end in the
  // same step then have windows of equal length, and share a product.
  void fill_up(int64_t tokens);
  // Tokens [begin, end) of a document, at positions from `position` on; the targets of the last `scored` tokens are
  // scored.
  void add(const TokenSource& source, const DocumentSpan& w, int64_t begin, int64_t end, int64_t position,
           int64_t scored, int64_t sequence);
  // Adds padding tokens, of a spare sequence, if the batch has too few tokens.
  void pad(int64_t spare);

 private:
  std::vector<int32_t> row_;
};

}  // namespace ingot::adaptation
