#pragma once
// Which tokens of a sequence a draft head knows, and for how many of them it has a row (a key and a value of its
// layer). Row p combines token p + 1 with the features of token p, so the row of the last token needs the token that
// follows, which is a guess or the pending token until the target has computed it.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace ingot::draft {

struct HeadRows {
  std::vector<int32_t> ids;
  int64_t computed = 0;     // rows computed from the target's features; at most length()
  int32_t after_last = -1;  // the token of row length() - 1, where this row is computed

  int64_t length() const { return int64_t(ids.size()); }
  void append(std::span<const int32_t> more) {
    if (computed == length() && computed > 0 && after_last != more[0]) --computed;
    ids.insert(ids.end(), more.begin(), more.end());
  }
  void truncate(int64_t length) {
    if (length == this->length()) return;
    ids.resize(size_t(length));
    computed = std::min(computed, std::max<int64_t>(0, length - 1));  // the last token's row needs the token after it
  }
  void copy_from(const HeadRows& from, int64_t length) {
    ids.assign(from.ids.begin(), from.ids.begin() + length);
    computed = std::min(from.computed, std::max<int64_t>(0, length - 1));
  }
};

}  // namespace ingot::draft
