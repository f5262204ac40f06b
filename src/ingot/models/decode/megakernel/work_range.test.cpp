#include "ingot/models/decode/megakernel/work_range.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace ingot::decode {
namespace {

WorkRange work_range(uint32_t weight_tiles, uint32_t row_tiles, uint32_t slots, bool by_row_tile, WeightTileRange range,
                     const int32_t* expert) {
  WorkRange s{.weight_tile_bytes = 16,
              .row_tile_bytes = 16 * int64_t(weight_tiles) + 64,
              .matrix_bytes = row_tiles * (16 * int64_t(weight_tiles) + 64),
              .expert = expert,
              .weight_tiles = weight_tiles,
              .row_tiles = row_tiles,
              .slots = slots,
              .by_row_tile = by_row_tile,
              .chunk_tiles = even_chunk_tiles(weight_tiles, 7),
              .range = range};
  s.begin();
  return s;
}

// All blocks together take every weight tile once, in chunks that fit and stay within a row tile. The sums of a row
// tile are in at most two blocks, and in one where blocks take whole row tiles.
TEST(DecodeWorkRange, EveryWeightTileIsTakenOnceForEveryGridSize) {
  const std::vector<int32_t> expert = {5, 0, 2};
  const std::vector<uint8_t> memory(1 << 20);
  const uint8_t* const base = memory.data();
  for (const auto& [weight_tiles, row_tiles, slots, by_row_tile] : {std::tuple{45u, 20u, 1u, false},
                                                                    {1u, 7u, 1u, false},
                                                                    {9u, 6u, 3u, false},
                                                                    {9u, 6u, 3u, true},
                                                                    {64u, 3u, 1u, false},
                                                                    {32u, 64u, 1u, false}})
    for (uint32_t blocks : {1u, 2u, 5u, 13u, 132u, 500u})
      for (bool whole_row_tiles : {false, true}) {
        if (whole_row_tiles && by_row_tile) continue;
        SCOPED_TRACE(::testing::Message() << weight_tiles << " weight tiles, " << row_tiles << " row tiles, " << slots
                                          << " slots, " << blocks << " blocks");
        uint32_t each = whole_row_tiles ? whole_row_tiles_per_block(uint64_t(row_tiles) * slots, weight_tiles, blocks)
                                        : weight_tiles_per_block(uint64_t(row_tiles) * slots, weight_tiles, blocks);
        if (by_row_tile && each < weight_tiles * slots) each = weight_tiles * slots;
        std::set<const uint8_t*> seen;
        std::vector<std::set<uint32_t>> blocks_of(row_tiles * slots);
        const uint32_t all = weight_tiles * row_tiles * slots;
        for (uint32_t block = 0; block < blocks; ++block) {
          const WorkRange s = work_range(weight_tiles, row_tiles, slots, by_row_tile, range_of_block(all, each, block),
                                         slots > 1 ? expert.data() : nullptr);
          uint32_t taken = 0;
          for (uint32_t number = s.first_chunk; number < s.end_chunk; ++number) {
            Chunk p = s.chunk(number, base);
            s.move_to_expert(p);
            ASSERT_GE(p.count, 1u);
            ASSERT_LE(p.count, s.chunk_tiles);
            ASSERT_LE(p.first + p.count, weight_tiles);
            ASSERT_EQ(p.data, base + (slots > 1 ? expert[p.slot] : 0) * s.matrix_bytes + p.row_tile * s.row_tile_bytes +
                                  p.first * s.weight_tile_bytes);
            for (uint32_t g = 0; g < p.count; ++g) ASSERT_TRUE(seen.insert(p.data + 16 * g).second);
            blocks_of[by_row_tile ? p.row_tile : p.slot * row_tiles + p.row_tile].insert(block);
            taken += p.count;
          }
          ASSERT_EQ(taken, s.range.end - s.range.begin);
          // Rounds of a few row tiles take the chunks in order, each round the chunks of its own sums.
          for (uint32_t most : {1u, 3u, 12u}) {
            uint32_t number = s.first_chunk, counted = s.first_sums;
            for (uint32_t sums = s.first_sums; sums < s.end_sums; sums += most) {
              for (const uint32_t end = number + s.chunks_in_round(sums, most); number < end; ++number) {
                const Chunk p = s.chunk(number, base);
                const uint32_t of = by_row_tile ? p.row_tile : p.slot * row_tiles + p.row_tile;
                ASSERT_GE(of, sums);
                ASSERT_LT(of, sums + s.groups_in_round(sums, most));
              }
              counted += s.groups_in_round(sums, most);
            }
            ASSERT_EQ(number, s.end_chunk);
            ASSERT_EQ(counted, s.end_sums);
          }
        }
        EXPECT_EQ(seen.size(), all);
        for (const auto& of_row_tile : blocks_of) EXPECT_LE(of_row_tile.size(), whole_row_tiles ? 1u : 2u);
      }
}

// All warps of all blocks together take every step once. Each warp takes neighbouring steps, one row tile after the
// other, whose sums belong to its round.
TEST(DecodeWorkRange, EveryStepIsTakenOnceByTheWarpsOfEveryRound) {
  for (const auto& [weight_tiles, row_tiles, slots, by_row_tile] : {std::tuple{45u, 20u, 1u, false},
                                                                    {1u, 7u, 1u, false},
                                                                    {9u, 6u, 3u, false},
                                                                    {9u, 6u, 3u, true},
                                                                    {64u, 3u, 1u, false}})
    for (const uint32_t tile_steps : {1u, 2u, 4u})
      for (const uint32_t blocks : {1u, 5u, 132u})
        for (const uint32_t groups : {1u, 14u}) {
          SCOPED_TRACE(::testing::Message()
                       << weight_tiles << " weight tiles of " << tile_steps << " steps, " << row_tiles << " row tiles, "
                       << slots << " slots, " << blocks << " blocks");
          const uint32_t all = weight_tiles * row_tiles * slots;
          uint32_t each = weight_tiles_per_block(uint64_t(row_tiles) * slots, weight_tiles, blocks);
          if (by_row_tile && each < weight_tiles * slots) each = weight_tiles * slots;
          uint32_t expected = 0;
          for (uint32_t block = 0; block < blocks; ++block) {
            const WorkRange s =
                work_range(weight_tiles, row_tiles, slots, by_row_tile, range_of_block(all, each, block), nullptr);
            const WarpSteps steps(s, tile_steps);
            for (uint32_t round = s.first_sums; round < s.end_sums; round += groups)
              for (uint32_t warp = 0; warp < 15; ++warp) {
                const WeightTileRange mine = WarpSteps::of_warp(s, tile_steps, round, groups, warp, 15);
                for (uint32_t step = mine.begin; step < mine.end;) {
                  const RowTileSteps of = steps.row_tile_of(s, step, mine.end);
                  ASSERT_EQ(step, expected);
                  const uint32_t v = by_row_tile ? of.row_tile * slots + of.slot : of.slot * row_tiles + of.row_tile;
                  ASSERT_EQ(v * weight_tiles * tile_steps + of.first, step);
                  ASSERT_LT(of.row_tile, row_tiles);
                  ASSERT_GE(of.count, 1u);
                  ASSERT_LE(of.first + of.count, weight_tiles * tile_steps);
                  ASSERT_EQ(of.group, by_row_tile ? of.row_tile : v);
                  ASSERT_GE(of.group, round);
                  ASSERT_LT(of.group, round + groups);
                  step += of.count, expected += of.count;
                }
              }
          }
          EXPECT_EQ(expected, all * tile_steps);
        }
}

TEST(DecodeWorkRange, ADivisorGivesTheQuotientsOfItsRange) {
  for (uint32_t d = 1; d < 1200; ++d) {
    const Divisor divisor(d);
    const uint64_t most = ((uint64_t(1) << 32) - 1) / d;  // dividend times divisor is less than 2^32
    for (uint64_t q : {uint64_t(0), uint64_t(1), uint64_t(2), most / d / 2, most / d})
      for (const int64_t off : {-1, 0, 1}) {
        const int64_t n = int64_t(q * d) + off;
        if (n >= 0 && uint64_t(n) <= most) ASSERT_EQ(divisor.quotient(uint32_t(n)), uint32_t(n) / d) << n << " / " << d;
      }
  }
}

TEST(DecodeWorkRange, FewRowTilesAreHalvedWhereBlocksWouldHaveNoWork) {
  EXPECT_EQ(weight_tiles_per_block(64, 32, 132), 16u);  // 128 blocks in place of 64
  EXPECT_EQ(weight_tiles_per_block(67, 32, 132), 32u);  // halves would need 134 blocks
  EXPECT_EQ(weight_tiles_per_block(36, 9, 132), 9u);    // no halves
  EXPECT_EQ(weight_tiles_per_block(180, 45, 132), 62u);
}

TEST(DecodeWorkRange, ChunksOfARowTileAreEven) {
  EXPECT_EQ(even_chunk_tiles(45, 30), 23u);
  EXPECT_EQ(even_chunk_tiles(45, 8), 8u);
  EXPECT_EQ(even_chunk_tiles(3, 30), 3u);
  EXPECT_EQ(even_chunk_tiles(64, 16), 16u);
}

}  // namespace
}  // namespace ingot::decode
