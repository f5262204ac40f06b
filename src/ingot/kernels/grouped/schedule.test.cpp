#include "ingot/kernels/grouped/schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace ingot::grouped {
namespace {

TEST(GroupedSchedule, EveryRowIsMultipliedWithEveryBandOnceForAnyNumberOfBlocks) {
  const std::vector<int32_t> offsets = {0, 0, 5, 21, 21, 150, 151, 151};
  for (uint32_t blocks : {1u, 3u, 132u})
    for (auto [rows, tile_bands] : {std::pair{16u, kBands}, {80u, kBands}, {80u, kFewBands}}) {
      const uint32_t tiles = 48 / tile_bands;
      std::map<std::tuple<uint32_t, uint32_t, uint32_t>, int> seen;  // group, row tile, row
      for (uint32_t b = 0; b < blocks; ++b) {
        Walk walk{offsets.data(), 7, tile_bands, tiles, rows, b, blocks};
        for (Tile t; walk.next(t);)
          for (uint32_t r = t.row; r < t.row + rows && r < t.row_end; ++r) ++seen[{t.group, t.row_tile, r}];
      }
      size_t expected = 0;
      for (uint32_t g = 0; g < 7; ++g)
        for (int32_t r = offsets[g]; r < offsets[g + 1]; ++r)
          for (uint32_t i = 0; i < tiles; ++i) {
            ++expected;
            EXPECT_EQ((seen[{g, i * tile_bands, uint32_t(r)}]), 1) << g << " " << i << " " << r;
          }
      EXPECT_EQ(seen.size(), expected);
    }
}

// The blocks of a launch run in any order: block i begins with tile i, then claims tiles one after another.
TEST(GroupedSchedule, EveryTileIsClaimedOnceAndTheCounterReturnsToZero) {
  const std::vector<int32_t> offsets = {0, 0, 5, 21, 21, 150, 151, 151};
  uint32_t random = 1;
  for (uint32_t blocks : {1u, 3u, 40u, 132u})
    for (uint32_t rows : {16u, 72u}) {
      const auto walk_of = [&](uint32_t b) { return Walk{offsets.data(), 7, kBands, 3, rows, b, 0}; };
      uint32_t tiles = 0, claims = 0, made = 0;
      for (uint32_t g = 0; g < 7; ++g) tiles += walk_of(0).tiles_of(g);
      std::vector<Walk> walks;
      for (uint32_t b = 0; b < blocks; ++b) walks.push_back(walk_of(b));
      std::map<std::tuple<uint32_t, uint32_t, uint32_t>, int> seen;
      while (!walks.empty()) {
        random = random * 1664525 + 1013904223;
        Walk& walk = walks[random / 65536 % walks.size()];
        Tile t;
        if (walk.next(t)) {
          ++seen[{t.group, t.row_tile, t.row}];
          walk.next_tile = claimed_tile(claims, blocks);
          claims = claims >= tiles - 1 ? 0 : claims + 1;  // atomicInc
          ++made;
        } else {
          std::swap(walk, walks.back());
          walks.pop_back();
        }
      }
      EXPECT_EQ(seen.size(), tiles);
      for (const auto& [tile, times] : seen) EXPECT_EQ(times, 1);
      EXPECT_EQ(made, tiles);
      EXPECT_EQ(claims, 0u);
    }
}

constexpr WeightFormat kMx = WeightFormat::mxfp4, kBf16 = WeightFormat::bf16;
TileShape pick(WeightFormat f, int64_t rows, int64_t groups, int64_t row_tiles, bool gated = false) {
  return pick_tile(rows, groups, row_tiles, 132, f, gated);
}

TEST(GroupedSchedule, TilesAreWideEnoughForAnAverageGroup) {
  EXPECT_EQ(pick(kMx, 400, 128, 360).rows, 16);
  EXPECT_EQ(pick(kMx, 4096, 128, 360).rows, 48);
  EXPECT_EQ(pick(kBf16, 4096, 128, 360).rows, 80);
  EXPECT_EQ(pick(kMx, 8192, 128, 360).rows, 72);
  EXPECT_EQ(pick(kMx, 16384, 128, 360).rows, 72);
  EXPECT_EQ(pick(kBf16, 16384, 128, 360).rows, 80);
  EXPECT_EQ(pick(kBf16, 8192, 32, 360).rows, 128);
}

TEST(GroupedSchedule, OneMatrixTakesTheTilesWhoseWavesEndFirst) {
  const auto is = [](const TileShape& t, int rows, int kernel, uint32_t row_tiles) {
    EXPECT_EQ(t.rows, rows);
    EXPECT_EQ(t.kernel, kernel);
    EXPECT_EQ(t.row_tiles, int(row_tiles));
  };
  is(pick(kBf16, 2048, 1, 180), 128, 128, kBands);  // two waves; of 80 rows three
  is(pick(kBf16, 1024, 1, 320), 80, 80, kBands);    // 160 tiles of 128 rows are two waves
  is(pick(kBf16, 1024, 1, 180), 128, 128, kBands);
  is(pick(kBf16, 100, 1, 320), 128, 128, kFewBands);  // of 256 rows of weights there would be 20 tiles
  is(pick(kBf16, 100, 1, 180), 80, 80, kFewBands);
  is(pick(kBf16, 16, 1, 320), 16, 16, kFewBands);
  is(pick(kBf16, 17, 1, 320), 80, 80, kFewBands);
  is(pick(kMx, 16, 1, 12568), 48, 48, kBands);         // of 64 rows of weights there would be 24 waves
  is(pick(kBf16, 100, 1, 320, true), 40, 80, kBands);  // gated products have no such tiles
  is(pick(kMx, 100, 1, 320, true), 48, 48, kBands);
}

}  // namespace
}  // namespace ingot::grouped
