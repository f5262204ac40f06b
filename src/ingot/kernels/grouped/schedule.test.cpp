#include "ingot/kernels/grouped/schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <tuple>
#include <vector>

namespace ingot::grouped {
namespace {

TEST(GroupedSchedule, EveryRowMeetsEveryBandOnceWhateverTheNumberOfBlocks) {
  const std::vector<int32_t> offsets = {0, 0, 5, 21, 21, 150, 151, 151};
  for (uint32_t blocks : {1u, 3u, 132u})
    for (uint32_t rows : {16u, 80u}) {
      std::map<std::tuple<uint32_t, uint32_t, uint32_t>, int> seen;  // group, band, row
      for (uint32_t b = 0; b < blocks; ++b) {
        Walk walk{offsets.data(), 7, 3, rows, b, blocks};
        for (Tile t; walk.next(t);)
          for (uint32_t r = t.row; r < t.row + rows && r < t.row_end; ++r) ++seen[{t.group, t.band, r}];
      }
      size_t expected = 0;
      for (uint32_t g = 0; g < 7; ++g)
        for (int32_t r = offsets[g]; r < offsets[g + 1]; ++r)
          for (uint32_t band : {0u, 16u, 32u}) {
            ++expected;
            EXPECT_EQ((seen[{g, band, uint32_t(r)}]), 1) << g << " " << band << " " << r;
          }
      EXPECT_EQ(seen.size(), expected);
    }
}

TEST(GroupedSchedule, TilesAreWideEnoughForTheUsualGroup) {
  EXPECT_EQ(pick_tile_rows(400, 128, 360, 132).rows, 16);
  EXPECT_EQ(pick_tile_rows(4096, 128, 360, 132).rows, 80);
  EXPECT_EQ(pick_tile_rows(8192, 128, 360, 132).rows, 80);
  EXPECT_EQ(pick_tile_rows(8192, 32, 360, 132).rows, 128);
}

TEST(GroupedSchedule, TilesOfOneMatrixAreThoseWhoseWavesEndFirst) {
  EXPECT_EQ(pick_tile_rows(2048, 1, 180, 132).rows, 128);  // two waves; of 80 rows three
  EXPECT_EQ(pick_tile_rows(1024, 1, 320, 132).rows, 80);   // 160 tiles of 128 rows are two waves
  EXPECT_EQ(pick_tile_rows(1024, 1, 180, 132).rows, 128);
  EXPECT_EQ(pick_tile_rows(300, 1, 320, 132).rows, 80);
  EXPECT_EQ(pick_tile_rows(100, 1, 320, 132).rows, 40);
  EXPECT_EQ(pick_tile_rows(2048, 1, 8, 132).rows, 40);
  EXPECT_EQ(pick_tile_rows(100, 1, 320, 132).kernel, 80);
}

}  // namespace
}  // namespace ingot::grouped
