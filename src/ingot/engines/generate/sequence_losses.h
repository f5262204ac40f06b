#pragma once
// The losses of a model on a text.
#include <functional>
#include <span>
#include <vector>

#include "ingot/models/decoder.h"

namespace ingot {

// The loss (natural logarithm) of every token from ids[first] on. `first` is at least 1, because no token precedes
// ids[0]. Uses its own slot. The last token is not fed, so ids may exceed the context by a token.
std::vector<double> sequence_losses(Decoder& decoder, std::span<const int32_t> ids,
                                    const std::function<bool()>& cancelled = {}, int64_t first = 1);

// Tokens [begin, end) of a document; tokens from `first` on are scored.
struct Window {
  int64_t begin, end, first;
  bool operator==(const Window&) const = default;
};
// Splits a document of `tokens` tokens into windows of at most `context` input tokens, where every token but the
// document's first is scored exactly once. With stride 0 the windows are adjacent. Otherwise each window ends `stride`
// tokens after the one before, the last one with the document, and has `context` tokens where the document has as many
// before this end: every token is predicted from at least context - stride + 1 tokens, or from all tokens before it.
std::vector<Window> windows_of(int64_t tokens, int64_t context, int64_t stride);

}  // namespace ingot
