#include "ingot/gpu/gemm/schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <tuple>
#include <vector>

#include "ingot/gpu/gemm/config.h"
#include "ingot/gpu/gemm/variant.h"

namespace ingot::gemm {
namespace {

constexpr Tile kTiles[] = {{.n = 256, .team = Team::cooperative, .cluster = 2},
                           {.n = 192, .team = Team::ping_pong, .cluster = 2},
                           {.n = 128, .team = Team::ping_pong, .cluster = 1}};

// The number of visits to each (batch, m, n) when `clusters` clusters share the walk.
using Visits = std::map<std::tuple<uint32_t, uint32_t, uint32_t>, int>;
template <class S> Visits visits(const S& schedule, uint32_t clusters) {
  Visits seen;
  for (uint32_t c = 0; c < clusters; ++c) {
    auto walk = schedule.walk(c, clusters);
    for (TileAt t; walk.next(t);) ++seen[{t.batch, t.m, t.n}];
  }
  return seen;
}

TEST(GemmSchedule, AGridVisitsEveryTileOnce) {
  for (const Tile& tile : kTiles)
    for (const Problem& s :
         {Problem{1, 1, 64}, Problem{128, 256, 64}, Problem{5000, 3000, 200}, Problem{4097, 8, 8, 3},
          Problem{8, 20000, 64, 2}, Problem{2048, 2048, 64}, Problem{0, 100, 64}, Problem{100, 0, 64}})
      for (uint32_t clusters : {1u, 7u, 66u}) {
        const Grid g = Grid::of(s, tile);
        const int64_t m_tiles = ceil_div(s.m, kTileM * tile.cluster), n_tiles = ceil_div(s.n, tile.n);
        const Visits seen = visits(g, clusters);
        ASSERT_EQ(int64_t(seen.size()), s.batch * m_tiles * n_tiles);
        for (const auto& [at, times] : seen) {
          const auto [batch, m, n] = at;
          EXPECT_TRUE(times == 1 && batch < s.batch && m < s.m && n < s.n && m % (kTileM * tile.cluster) == 0 &&
                      n % uint32_t(tile.n) == 0);
        }
      }
}

// A nearly square wave reads few rows of A and few columns of B.
TEST(GemmSchedule, AWaveOfTilesIsNearlySquare) {
  const Grid g = Grid::of({8192, 22016, 4096}, kTiles[0]);
  for (uint32_t first = 0; first + 66 <= g.tiles; first += 66) {
    std::map<uint32_t, int> rows, columns;
    for (uint32_t i = first; i < first + 66; ++i) ++rows[g.at(i).m], ++columns[g.at(i).n];
    EXPECT_LE(rows.size() + columns.size(), 26u) << first;
  }
}

TEST(GemmSchedule, ATriangleVisitsTilesOnTheDiagonalAndBelow) {
  for (const Tile& tile : {kTiles[0], kTiles[2]})
    for (const Problem& s : {Problem{1, 1, 64}, Problem{700, 700, 64, 3}, Problem{20000, 20000, 64}}) {
      ASSERT_TRUE(Triangle::fits(tile));
      const Visits seen = visits(Triangle::of(s, tile), 7);
      const int64_t rows = ceil_div(s.m, tile.n);
      ASSERT_EQ(int64_t(seen.size()), s.batch * rows * (rows + 1) / 2);
      for (const auto& [at, times] : seen) {
        const auto [batch, m, n] = at;
        EXPECT_TRUE(times == 1 && batch < s.batch && n <= m && m < s.m);
      }
    }
}

TEST(GemmSchedule, GroupsEndWithTheirRows) {
  const std::vector<int32_t> offsets = {0, 0, 1, 300, 300, 556, 557};
  for (const Tile& tile : kTiles)
    for (uint32_t clusters : {1u, 3u, 100u}) {
      std::vector<int> covered(560 * 3, 0);
      const Grouped g = Grouped::of({offsets.data(), 6, 560}, 2 * tile.n + 8, 64, tile);
      for (uint32_t c = 0; c < clusters; ++c) {
        auto walk = g.walk(c, clusters);
        for (TileAt t; walk.next(t);) {
          ASSERT_EQ(t.m_end, t.batch < 6 ? uint32_t(offsets[t.batch + 1]) : 560);  // batch 6: rows behind all groups
          ASSERT_EQ(t.k_steps, t.batch < 6 ? 1u : 0u);
          ASSERT_GE(t.m, uint32_t(offsets[t.batch]));
          for (uint32_t r = t.m; r < std::min(t.m + g.tile_m, t.m_end); ++r) ++covered[r * 3 + t.n / uint32_t(tile.n)];
        }
      }
      for (int times : covered) ASSERT_EQ(times, 1);
    }
}

TEST(GemmSchedule, GroupedTilesAreNoMoreThanPromised) {
  const std::vector<int32_t> offsets = {0, 129, 129, 400};
  for (const Tile& tile : kTiles) {
    const Grouped g = Grouped::of({offsets.data(), 3, 401}, 3 * tile.n, 64, tile);
    EXPECT_LE(int64_t(visits(g, 1).size()), g.most_tiles());
  }
}
// The tiles of a wave lie in eight tiles of rows, which share the columns of B.
TEST(GemmSchedule, AWaveOfAGroupReadsFewRowsAndColumns) {
  const std::vector<int32_t> offsets = {0, 4096};
  const Grouped g = Grouped::of({offsets.data(), 1, 4096}, 5760, 2880, kTiles[2]);
  auto walk = g.walk(0, 1);
  std::map<uint32_t, int> rows, columns;
  TileAt t;
  for (int i = 0; i < 132 && walk.next(t); ++i) ++rows[t.m], ++columns[t.n];
  EXPECT_EQ(rows.size(), 8u);
  EXPECT_EQ(columns.size(), 17u);
}
// Offsets that do not rise give wrong results, but no tile reads or writes a row outside the tensor.
TEST(GemmSchedule, WrongOffsetsStayWithinTheRows) {
  const std::vector<int32_t> offsets = {-5, 700, 3, 300};
  const Grouped g = Grouped::of({offsets.data(), 3, 200}, 128, 64, kTiles[2]);
  auto walk = g.walk(0, 1);
  for (TileAt t; walk.next(t);) EXPECT_TRUE(t.m < 200 && t.m_end <= 200) << t.m << " " << t.m_end;
  const GroupedSums s = GroupedSums::of({offsets.data(), 3, 200}, 8, 8, false, kTiles[2]);
  auto sums = s.walk(0, 1);
  for (TileAt t; sums.next(t);) EXPECT_LE(s.at.begin(t.batch) + s.at.size(t.batch), 200u);
}
TEST(GemmSchedule, SumsOverGroupsHaveTheStepsOfTheirRows) {
  const std::vector<int32_t> offsets = {0, 0, 1, 65, 200};
  for (bool adds : {false, true}) {
    const GroupedSums s = GroupedSums::of({offsets.data(), 4, 230}, 200, 140, adds, kTiles[2]);
    const Visits seen = visits(s, 5);
    EXPECT_EQ(seen.size(), (adds ? 3u : 4u) * 2 * 2);  // groups without rows: the sums become zero, or nothing is added
    auto walk = s.walk(0, 1);
    for (TileAt t; walk.next(t);) {
      const uint32_t rows = uint32_t(offsets[t.batch + 1] - offsets[t.batch]);
      uint32_t all = 0;
      for (uint32_t step = 0; step < t.k_steps; ++step) all += s.rows_of_stage(t, step);
      EXPECT_EQ(all, rows);
      EXPECT_EQ(t.k_steps, (rows + 63) / 64);
    }
  }
}

TEST(GemmConfig, PicksTheTileWhoseLastWaveIsFullest) {
  const std::vector<Tile> tiles = {kTurns128, kTurns192};
  EXPECT_EQ(pick_tile({8192, 8192, 8192}, tiles, 132), 1);   // 21 waves of 192, 31.03 of 128
  EXPECT_EQ(pick_tile({4096, 4096, 4096}, tiles, 132), 0);   // 5.3 waves of 192
  EXPECT_EQ(pick_tile({1024, 28672, 4096}, tiles, 132), 0);  // 9.1 waves of 192
  EXPECT_EQ(pick_tile({1, 1, 1}, tiles, 132), 0);
}
TEST(GemmConfig, EfficiencyIsOneOnlyWhereNothingIsWasted) {
  EXPECT_DOUBLE_EQ(efficiency({128 * 132, 128, 64}, kTurns128, 132), 1);
  EXPECT_DOUBLE_EQ(efficiency({64 * 132, 128, 64}, kTurns128, 132), 0.5);
  EXPECT_DOUBLE_EQ(efficiency({128, 128, 64}, kTurns128, 132), 1.0 / 132);
  EXPECT_LT(efficiency({1, 1, 64}, kTurns192, 1), 0.01);
}

// tools/same_kernels.py relies on this property: reports of a Hopper GPU do not depend on the portable kernels.
TEST(GemmVariant, OnlyHopperHasItsVariantAndNoOther) {
  EXPECT_EQ(variant_of(gpu::limits_of("9.0")), Variant::hopper);
  EXPECT_EQ(variant_of(gpu::Limits{}), Variant::hopper);
  for (const char* other : {"8.0", "8.6", "8.9", "10.0", "12.0"}) {
    EXPECT_EQ(variant_of(gpu::limits_of(other)), Variant::portable) << other;
    EXPECT_EQ(variant_of(gpu::imitate(gpu::Limits{}, gpu::limits_of(other))), Variant::portable) << other;
  }
  gpu::Limits limits = gpu::limits_of("9.0");
  limits.hopper = false;  // as where the driver compiles the PTX
  EXPECT_EQ(variant_of(limits), Variant::portable);
  limits.capability = 75;
  EXPECT_EQ(variant_of(limits), Variant::none);
}

}  // namespace
}  // namespace ingot::gemm
