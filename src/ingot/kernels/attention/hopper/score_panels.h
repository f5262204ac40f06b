#pragma once
// dS on its way from the kernel that walks over keys (key_gradient.cuh) to the kernel that computes dQ = dS K
// (query_product.cuh). Both take tiles of 128 keys.
//
// dS lies in panels of 8 queries by 128 keys, 2 KB each: for each key the 16 bytes of its 8 queries. This is an operand
// of wgmma without a swizzle, and a warp stores 128 adjacent bytes of it at a time from the accumulators of S^T.
//
// For each head, a tile of keys has the panels of all queries that see one of the tile's keys, widened to whole tiles
// of 128 queries. Panel n of a segment has the queries 8 n to 8 n + 7; its index among the panels of a head is n plus
// StoredScores::first of the tile's place.
#include <cstdint>

#include "ingot/kernels/attention/parts/tiles.h"

namespace ingot::cuda::attention_hopper {

constexpr int kScoreKeys = 128, kScoreRows = 128;  // of a tile of keys, and of a tile of queries
constexpr int kScoreStep = 64;                     // queries for which dS is computed at a time
constexpr int64_t kPanelBytes = kScoreKeys * 16;

struct PanelRange {
  int begin, end;
};
// The panels of the tile of keys from `first` on.
INGOT_HD inline PanelRange panels_of(int64_t first, int64_t queries, int64_t keys, bool causal, int64_t window) {
  if (first >= keys) return {0, 0};
  const int64_t last = first + kScoreKeys < keys ? first + kScoreKeys : keys;
  const detail::KeyRange seeing = detail::queries_seeing(first, last, queries, keys, causal, window);
  if (seeing.end <= seeing.begin) return {0, 0};
  constexpr int64_t kEach = kScoreRows / 8;
  return {int(seeing.begin / kScoreRows * kEach), int((seeing.end + kScoreRows - 1) / kScoreRows * kEach)};
}
// The panels of a head in a segment.
inline int64_t panels_of_segment(int64_t queries, int64_t keys, bool causal, int64_t window) {
  int64_t sum = 0;
  for (int64_t first = 0; first < keys; first += kScoreKeys) {
    const PanelRange r = panels_of(first, queries, keys, causal, window);
    sum += r.end - r.begin;
  }
  return sum;
}

// dS of all heads of a long batch would not fit into memory, so the backward pass takes a few key heads at a time.
// Fewer tiles of keys than kLeastTiles at a time would leave multiprocessors without work beside the longest tile.
constexpr int64_t kScoreBytes = int64_t(1) << 30;
constexpr int64_t kLeastTiles = 400;
struct ScorePlan {
  int64_t panels;     // of a query head
  int64_t key_heads;  // at a time; 0: dS is not stored
};
// For segments of equal lengths.
inline ScorePlan plan_scores(int64_t segments, int64_t queries, int64_t keys, int64_t key_heads, int64_t group,
                             bool causal, int64_t window) {
  const int64_t panels = segments * panels_of_segment(queries, keys, causal, window);
  if (panels == 0 || key_heads == 0) return {panels, 0};
  const int64_t fitting = kScoreBytes / (panels * group * kPanelBytes);
  if (fitting >= key_heads) return {panels, key_heads};
  if (fitting == 0) return {panels, 0};
  const int64_t times = (key_heads + fitting - 1) / fitting, at_once = (key_heads + times - 1) / times;
  const int64_t tiles = segments * ((keys + kScoreKeys - 1) / kScoreKeys) * at_once;
  return {panels, tiles >= kLeastTiles ? at_once : 0};
}

}  // namespace ingot::cuda::attention_hopper
