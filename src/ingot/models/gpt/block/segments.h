#pragma once
// Joins segments of a packed batch for a single product or copy.
#include <cstdint>
#include <span>

#include "ingot/core/tensor.h"

namespace ingot::detail {

// Neighbouring segments of equal length and with equally many scored tokens at their ends.
struct SegmentRun {
  int64_t first = 0, count = 0;    // segments
  int64_t begin = 0, length = 0;   // first token; tokens of each
  int64_t packed = 0, scored = 0;  // first scored token; scored tokens of each segment

  // Tokens of a (T, C) tensor as (count, length, C).
  Tensor of(const Tensor& t) const { return each(t, begin, length); }
  // The scored tokens of a (T, C) tensor as (count, scored, C); the second function takes a tensor of scored tokens
  // alone.
  Tensor last_of(const Tensor& t) const { return each(t, begin, length).slice(1, length - scored, length); }
  Tensor packed_of(const Tensor& t) const { return each(t, packed, scored); }
  // The part of a tensor (S, ...) that belongs to each segment.
  Tensor each_of(const Tensor& t) const { return t.slice(0, first, first + count); }

 private:
  Tensor each(const Tensor& t, int64_t at, int64_t tokens) const {
    Tensor view = t.slice(0, at, at + count * tokens);
    view.shape = {count, tokens, t.cols()};
    view.stride[2] = 1, view.stride[1] = t.row_stride(), view.stride[0] = tokens * t.row_stride();
    return view;
  }
};

// Calls use(run) for all segments with tokens, in their order.
template <class Use> void for_each_run(std::span<const int32_t> cu, std::span<const int32_t> scored_cu, Use&& use) {
  const auto length = [](std::span<const int32_t> of, size_t s) { return int64_t(of[s + 1]) - of[s]; };
  for (size_t s = 0, end; s + 1 < cu.size(); s = end) {
    for (end = s + 1;
         end + 1 < cu.size() && length(cu, end) == length(cu, s) && length(scored_cu, end) == length(scored_cu, s);)
      ++end;
    if (length(cu, s) > 0)
      use(SegmentRun{int64_t(s), int64_t(end - s), cu[s], length(cu, s), scored_cu[s], length(scored_cu, s)});
  }
}

}  // namespace ingot::detail
