#include "ingot/models/decode/megakernel/sections.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace ingot::decode {
namespace {

Section section_of(uint32_t weight_tiles, uint32_t bands, uint32_t entries, bool by_band, WeightTileRange range,
                   const int32_t* expert) {
  Section s{.weight_tile_bytes = 16,
            .band_bytes = 16 * int64_t(weight_tiles) + 64,
            .matrix_bytes = bands * (16 * int64_t(weight_tiles) + 64),
            .expert = expert,
            .weight_tiles = weight_tiles,
            .bands = bands,
            .entries = entries,
            .by_band = by_band,
            .piece = piece_of(weight_tiles, 7),
            .range = range};
  s.begin();
  return s;
}

// All blocks together take every weight tile once, in pieces that fit and stay within a band; no band's sums are in
// more than two blocks where shares are of weight tiles, in more than one where they are of bands.
TEST(DecodeSections, EveryWeightTileIsTakenOnceWhateverTheGrid) {
  const std::vector<int32_t> expert = {5, 0, 2};
  const std::vector<uint8_t> memory(1 << 20);
  const uint8_t* const base = memory.data();
  for (const auto& [weight_tiles, bands, entries, by_band] : {std::tuple{45u, 20u, 1u, false},
                                                              {1u, 7u, 1u, false},
                                                              {9u, 6u, 3u, false},
                                                              {9u, 6u, 3u, true},
                                                              {64u, 3u, 1u, false}})
    for (uint32_t blocks : {1u, 2u, 5u, 13u, 132u, 500u})
      for (bool whole_bands : {false, true}) {
        if (whole_bands && by_band) continue;
        SCOPED_TRACE(::testing::Message() << weight_tiles << " weight tiles, " << bands << " bands, " << entries
                                          << " entries, " << blocks << " blocks");
        uint32_t share = whole_bands ? share_of_bands(uint64_t(bands) * entries, weight_tiles, blocks)
                                     : share_of_weight_tiles(uint64_t(bands) * entries, weight_tiles, blocks);
        if (by_band && share < weight_tiles * entries) share = weight_tiles * entries;
        std::set<const uint8_t*> seen;
        std::vector<std::set<uint32_t>> blocks_of(bands * entries);
        const uint32_t all = weight_tiles * bands * entries;
        for (uint32_t block = 0; block < blocks; ++block) {
          const Section s = section_of(weight_tiles, bands, entries, by_band, range_of(all, share, block),
                                       entries > 1 ? expert.data() : nullptr);
          uint32_t taken = 0;
          for (uint32_t number = s.first_piece; number < s.end_piece; ++number) {
            Piece p = s.piece_at(number, base);
            s.add_expert(p);
            ASSERT_GE(p.count, 1u);
            ASSERT_LE(p.count, s.piece);
            ASSERT_LE(p.first + p.count, weight_tiles);
            ASSERT_EQ(p.data, base + (entries > 1 ? expert[p.entry] : 0) * s.matrix_bytes + p.band * s.band_bytes +
                                  p.first * s.weight_tile_bytes);
            for (uint32_t g = 0; g < p.count; ++g) ASSERT_TRUE(seen.insert(p.data + 16 * g).second);
            blocks_of[by_band ? p.band : p.entry * bands + p.band].insert(block);
            taken += p.count;
          }
          ASSERT_EQ(taken, s.range.end - s.range.begin);
          // Rounds of a few bands take the pieces in order, each those of its own sums.
          for (uint32_t most : {1u, 3u, 12u}) {
            uint32_t number = s.first_piece, sums = s.begin_sums;
            for (uint32_t band = s.begin_sums; band < s.end_sums; band += most) {
              for (const uint32_t end = number + s.pieces_of(band, most); number < end; ++number) {
                const Piece p = s.piece_at(number, base);
                const uint32_t of = by_band ? p.band : p.entry * bands + p.band;
                ASSERT_GE(of, band);
                ASSERT_LT(of, band + s.bands_of(band, most));
              }
              sums += s.bands_of(band, most);
            }
            ASSERT_EQ(number, s.end_piece);
            ASSERT_EQ(sums, s.end_sums);
          }
        }
        EXPECT_EQ(seen.size(), all);
        for (const auto& of_band : blocks_of) EXPECT_LE(of_band.size(), whole_bands ? 1u : 2u);
      }
}

TEST(DecodeSections, PiecesOfABandAreEven) {
  EXPECT_EQ(piece_of(45, 30), 23u);
  EXPECT_EQ(piece_of(45, 8), 8u);
  EXPECT_EQ(piece_of(3, 30), 3u);
  EXPECT_EQ(piece_of(64, 16), 16u);
}

}  // namespace
}  // namespace ingot::decode
