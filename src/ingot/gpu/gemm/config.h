#pragma once
// Chooses the tile of a product: the tile with the shortest time by the model below. The numbers of whole tiles and
// whole waves determine the time, because a partly filled tile costs as much as a full tile, and a partly filled last
// wave as much as a full wave.
#include <algorithm>
#include <cstdint>
#include <span>

#include "ingot/gpu/gemm/shape.h"

namespace ingot::gemm {

// The modelled time of a product with a tile: whole waves of whole tiles. The unit is a multiprocessor's time for one
// column of 128 rows of C, which is proportional to K. A tile of more than 128 columns reads less for each result and
// is a little faster for its size.
inline double modelled_time(const Problem& p, const Tile& t, int64_t sms) {
  const int64_t clusters = std::max<int64_t>(sms / t.cluster, 1);
  const int64_t tiles = p.batch * ceil_div(p.m, int64_t(kTileM) * t.cluster) * ceil_div(p.n, t.n);
  return double(ceil_div(tiles, clusters)) * t.n * (t.n > 128 ? 0.985 : 1);
}
// The fraction of the GPU's time in use by the product: 1 where waves and tiles are full.
inline double efficiency(const Problem& p, const Tile& t, int64_t sms) {
  return double(p.batch * p.m * p.n) / (double(sms) * kTileM) / modelled_time(p, t, sms);
}
// The index of the best of `tiles`; of equally good tiles the first.
inline int pick_tile(const Problem& p, std::span<const Tile> tiles, int64_t sms) {
  int best = 0;
  for (int i = 1; i < int(tiles.size()); ++i)
    if (modelled_time(p, tiles[i], sms) < modelled_time(p, tiles[best], sms)) best = i;
  return best;
}

// Whether the core would wait for the GPU's memory, whose peak rate is `memory` bytes per second. On an H100 it waits
// if K is long and the operands are far larger than L2: M x N = 8,192 x 4,096 with K = 22,016, and 22,016 x 4,096 with
// K = 8,192, run at 520 TFLOP/s where cuBLASLt reaches 740; 98,304 x 512 with K = 2,048 runs at 624 against 671. An
// H200's memory is fast enough.
inline bool waits_for_memory(const Problem& p, double memory) {
  constexpr double kEnough = 4e12;
  constexpr int64_t kLong = 2048, kFarBeyondL2 = 300'000'000;
  return memory < kEnough && p.k >= kLong && 2 * p.batch * p.k * (p.m + p.n) >= kFarBeyondL2;
}

// The tiles for nearly all products (measured: docs/matrix-products.md). With ping_pong the epilogue, a fifth of the
// time at K = 512, is hidden behind the products of the other warpgroup.
constexpr Tile kPairs128{.n = 128, .team = Team::ping_pong, .cluster = 2};  // reads a quarter less from L2
constexpr Tile kTurns128{.n = 128, .team = Team::ping_pong, .cluster = 1};
constexpr Tile kTurns192{.n = 192, .team = Team::ping_pong, .cluster = 2};
// The tile of the portable core, which has no teams and no clusters.
constexpr Tile kPortableTile{.n = 128, .team = Team::cooperative, .cluster = 1};

}  // namespace ingot::gemm
