#pragma once
// Which tile a product gets: the one that by this model ends first. Sums are what costs; a tile that is only partly
// filled, or a last wave that does not occupy the GPU, costs as if it were whole.
#include <algorithm>
#include <cstdint>
#include <span>

#include "ingot/gpu/gemm/shape.h"

namespace ingot::gemm {

// How long a product takes with a tile, in the time a multiprocessor needs for one column of 128 rows (times K): whole
// waves of whole tiles. A wider tile reads less and is a little faster for its size.
inline double modelled_time(const Problem& p, const Tile& t, int64_t sms) {
  const int64_t clusters = std::max<int64_t>(sms / t.cluster, 1);
  const int64_t tiles = p.batch * ceil_div(p.m, int64_t(kTileM) * t.cluster) * ceil_div(p.n, t.n);
  return double(ceil_div(tiles, clusters)) * t.n * (t.n > 128 ? 0.985 : 1);
}
// The part of the GPU's time that such a product uses well: 1 where waves and tiles are full.
inline double efficiency(const Problem& p, const Tile& t, int64_t sms) {
  return double(p.batch * p.m * p.n) / (double(sms) * kTileM) / modelled_time(p, t, sms);
}
// The index of the best of `tiles`; of equal ones the first.
inline int pick_tile(const Problem& p, std::span<const Tile> tiles, int64_t sms) {
  int best = 0;
  for (int i = 1; i < int(tiles.size()); ++i)
    if (modelled_time(p, tiles[i], sms) < modelled_time(p, tiles[best], sms)) best = i;
  return best;
}

// Over a long K, of operands far beyond L2, the core waits for an H100's memory (`memory`: of its pins, bytes a
// second): 520 TFLOP/s where cuBLASLt makes 740, of 8,192 x 4,096 over 22,016 and 22,016 x 4,096 over 8,192; 624 for
// 671 of 98,304 x 512 over 2,048. An H200's is enough.
inline bool waits_for_memory(const Problem& p, double memory) {
  constexpr double kEnough = 4e12;
  constexpr int64_t kLong = 2048, kFarBeyondL2 = 300'000'000;
  return memory < kEnough && p.k >= kLong && 2 * p.batch * p.k * (p.m + p.n) >= kFarBeyondL2;
}

// The tiles that serve nearly everything (measured: docs/matrix-products.md). Turns hide the epilogue, and at K = 512
// that is a fifth of the time.
constexpr Tile kPairs128{.n = 128, .team = Team::ping_pong, .cluster = 2};  // reads a quarter less from L2
constexpr Tile kTurns128{.n = 128, .team = Team::ping_pong, .cluster = 1};
constexpr Tile kTurns192{.n = 192, .team = Team::ping_pong, .cluster = 2};

}  // namespace ingot::gemm
