#pragma once
// How well a model foretells a text.
#include <functional>
#include <span>
#include <vector>

#include "ingot/models/decoder.h"

namespace ingot {

// The loss of every token from ids[first] on, 1 <= first, natural logarithm. Takes a slot of its own; the last token is
// not told, so ids may be one more than the context.
std::vector<double> sequence_losses(Decoder& decoder, std::span<const int32_t> ids,
                                    const std::function<bool()>& cancelled = {}, int64_t first = 1);

// Tokens [begin, end) of a document, of which those from `first` on are scored.
struct Window {
  int64_t begin, end, first;
  bool operator==(const Window&) const = default;
};
// A document of `tokens` tokens in windows that foretell from at most `context` tokens each, and score every token but
// the document's first exactly once. stride 0: side by side. Else each begins `stride` later, and the last one is as
// long as the others: every token is foretold from at least context - stride + 1 tokens, or all there are before it.
std::vector<Window> windows_of(int64_t tokens, int64_t context, int64_t stride);

}  // namespace ingot
