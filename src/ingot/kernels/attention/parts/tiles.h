#pragma once
// The division of the queries and keys of packed segments into tiles, from cu_seqlens alone: on the host for tests, on
// the device for kernels. Segment s owns the places [at(s), at(s + 1)) of a list of tiles with at(s) = cu[s] / rows +
// s. No segment has more tiles than places, so neither the total number of tiles nor the segments' lengths must be
// known in advance. Unused places are empty.
#include <cstdint>

#include "ingot/core/hd.h"

namespace ingot::detail {

// Places in the list for `tokens` tokens in `segments` segments.
INGOT_HD constexpr int64_t tile_places(int64_t tokens, int64_t segments, int rows) { return tokens / rows + segments; }

struct TilePlace {
  int segment;
  // the first of the segment's rows in this tile; the place is empty if it is not below the segment's length
  int64_t first;
};
// `cu` has (segments + 1) ascending numbers from 0 on.
INGOT_HD inline TilePlace tile_place(const int32_t* cu, int segments, int rows, int64_t place) {
  int low = 0, high = segments - 1;  // the last segment whose places begin at or before `place`
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (int64_t(cu[middle]) / rows + middle <= place)
      low = middle;
    else
      high = middle - 1;
  }
  return {low, (place - (int64_t(cu[low]) / rows + low)) * rows};
}

// The keys visible to at least one of the queries [begin, end) of a segment. Causal masks are aligned at the segment's
// end; window = 0: none.
struct KeyRange {
  int64_t begin, end;
};
INGOT_HD inline int64_t clamp_to(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
INGOT_HD inline KeyRange keys_seen(int64_t begin, int64_t end, int64_t queries, int64_t keys, bool causal,
                                   int64_t window) {
  if (!causal) return {0, keys};
  const int64_t offset = keys - queries + 1;
  const int64_t last = clamp_to(end - 1 + offset, 0, keys);
  return {window > 0 ? clamp_to(begin + offset - window, 0, keys) : 0, last};
}
// The queries with at least one visible key in [begin, end).
INGOT_HD inline KeyRange queries_seeing(int64_t begin, int64_t end, int64_t queries, int64_t keys, bool causal,
                                        int64_t window) {
  if (!causal) return {0, queries};
  const int64_t offset = keys - queries;  // query i sees key j where j - offset <= i < j - offset + window
  return {clamp_to(begin - offset, 0, queries), window > 0 ? clamp_to(end - 1 - offset + window, 0, queries) : queries};
}

// The steps, among the steps [begin, end) of `size` keys each, visible to at least one of the 64 queries from `first`
// on.
struct StepRange {
  int begin, end;
};
INGOT_HD inline StepRange within(const KeyRange& rows, bool any, int size, int begin, int end) {
  if (!any || rows.end <= rows.begin) return {begin, begin};
  const int64_t last = (rows.end + size - 1) / size;
  return {int(clamp_to(rows.begin / size, begin, end)), int(clamp_to(last, begin, end))};
}
INGOT_HD inline StepRange steps_seen(int64_t first, int64_t queries, int64_t keys, bool causal, int64_t window,
                                     int size, int begin, int end) {
  const int64_t last = first + 64 < queries ? first + 64 : queries;
  return within(keys_seen(first, last, queries, keys, causal, window), first < queries, size, begin, end);
}
// The steps of queries with at least one visible key among the 64 keys from `first` on.
INGOT_HD inline StepRange steps_seeing(int64_t first, int64_t queries, int64_t keys, bool causal, int64_t window,
                                       int size, int begin, int end) {
  const int64_t last = first + 64 < keys ? first + 64 : keys;
  return within(queries_seeing(first, last, queries, keys, causal, window), first < keys, size, begin, end);
}

}  // namespace ingot::detail
