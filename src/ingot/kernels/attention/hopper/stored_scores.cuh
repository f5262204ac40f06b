#pragma once
// Device code of stored_scores.h.
#include "ingot/kernels/attention/hopper/backward.h"
#include "ingot/kernels/attention/hopper/stored_scores.h"
#include "ingot/kernels/attention/parts/places.cuh"

namespace ingot::cuda::attention_hopper {

// The address at which panel 0 of the tile's segment would lie for this tile of keys and head, so that panel n lies
// n * kPanelBytes behind the address. Only the panels of panels_of() belong to this tile.
__device__ inline char* panels_of_head(const StoredScores& s, const Walk& w, const KeyTile& t, int head) {
  const int place = t.k_begin / kScoreKeys + t.segment + t.first / kScoreKeys;
  return s.panels + (int64_t(head) * s.first[w.places] + s.first[place]) * kPanelBytes;
}

// Where a stage's dS goes.
template <class F, bool kStoresScores = F::kStoresScores> struct ScorePlaces { char *panels[F::kStages], *of_head; };
template <class F> struct ScorePlaces<F, false> {};

// Stores a step's dS^T, packed: each warp those of its 16 keys.
template <int kQueries>
__device__ __forceinline__ void store_scores(char* to, uint32_t group, uint32_t warp,
                                             const uint32_t (&ds)[kQueries / 16][4]) {
  to += (4 * group + warp) * 256 + threadIdx.x % 32 * 4;
#pragma unroll
  for (int i = 0; i < kQueries / 16; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r)
      __stcs(reinterpret_cast<unsigned*>(to + (2 * i + r / 2) * kPanelBytes + r % 2 * 128), ds[i][r]);
}

}  // namespace ingot::cuda::attention_hopper
