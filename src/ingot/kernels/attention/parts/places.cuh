#pragma once
// The tile of a work item, from cu_seqlens alone (tiles.h). F: kRows queries or kKeys keys in a tile, kKeys keys or
// kQueries queries in a step.
#include "ingot/kernels/attention/parts/tiles.h"
#include "ingot/kernels/attention/parts/walk.h"

namespace ingot::cuda::attention_parts {

// A tile of queries of one head. steps < 0: there is no further tile.
struct Tile {
  int head, first;       // of the segment's queries
  int q_begin, k_begin;  // the segment's first row of q and of k
  int queries, keys;     // of the segment; 0 queries mark an empty place
  int begin, steps;      // steps of keys: from begin + steps - 1 down to begin
};

// The tile at `place` of the list of all heads. Heads come in sets whose keys and values stay in L2; within a set, the
// tiles with the most visible keys come first.
template <class F> __device__ inline Tile find_tile(const Walk& p, int64_t place) {
  const int64_t in_set = p.places * p.heads_in_set;
  const int64_t set = place / in_set, heads = min(int64_t(p.heads_in_set), p.heads - set * p.heads_in_set);
  const int64_t rest = place - set * in_set;
  const detail::TilePlace at = detail::tile_place(p.cu_q, p.segments, F::kRows, p.places - 1 - rest / heads);
  Tile t{};
  t.head = int(set * p.heads_in_set + rest % heads);
  t.first = int(at.first);
  t.q_begin = p.cu_q[at.segment];
  const int queries = p.cu_q[at.segment + 1] - t.q_begin;
  if (at.first >= queries) return t;
  t.queries = queries;
  t.k_begin = p.cu_k[at.segment];
  t.keys = p.cu_k[at.segment + 1] - t.k_begin;
  const detail::KeyRange seen =
      detail::keys_seen(t.first, min(t.first + F::kRows, queries), queries, t.keys, p.causal, p.window);
  t.begin = int(seen.begin / F::kKeys);
  t.steps = seen.end > seen.begin ? int((seen.end + F::kKeys - 1) / F::kKeys) - t.begin : 0;
  return t;
}

// A tile of keys of one key head. steps < 0: there is no further tile.
struct KeyTile {
  int kv_head, first;
  int q_begin, k_begin;
  int queries, keys;
  int begin, steps;  // steps of queries, for each head of the group
  int segment;
};

// Tiles visible to the most queries come first: with a causal mask these are a segment's first keys.
template <class F> __device__ inline KeyTile find_key_tile(const Walk& w, int64_t place) {
  const int64_t in_set = w.places * w.heads_in_set;
  const int64_t set = place / in_set, heads = min(int64_t(w.heads_in_set), w.heads - set * w.heads_in_set);
  const int64_t rest = place - set * in_set;
  const detail::TilePlace at = detail::tile_place(w.cu_k, w.segments, F::kKeys, rest / heads);
  KeyTile t{};
  t.kv_head = int(set * w.heads_in_set + rest % heads);
  t.first = int(at.first);
  t.segment = at.segment;
  t.k_begin = w.cu_k[at.segment];
  const int keys = w.cu_k[at.segment + 1] - t.k_begin;
  if (at.first >= keys) return t;
  t.keys = keys;
  t.q_begin = w.cu_q[at.segment];
  t.queries = w.cu_q[at.segment + 1] - t.q_begin;
  const detail::KeyRange seeing =
      detail::queries_seeing(t.first, min(t.first + F::kKeys, keys), t.queries, keys, w.causal, w.window);
  t.begin = int(seeing.begin / F::kQueries);
  t.steps = seeing.end > seeing.begin ? int((seeing.end + F::kQueries - 1) / F::kQueries) - t.begin : 0;
  return t;
}

}  // namespace ingot::cuda::attention_parts
