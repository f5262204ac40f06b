#pragma once
// Which tiles of a grouped product a block computes: 256 rows of a matrix by so many rows of x, group after group; of a
// group those that share weights follow each other. Host code too, so that it is tested without a GPU.
#include <cstdint>

#include "ingot/core/hd.h"

namespace ingot::grouped {

constexpr uint32_t kBands = 16;         // of a tile: 256 rows
constexpr uint32_t kMostGroups = 2048;  // a block keeps where they begin in shared memory

struct Tile {
  uint32_t group = 0, band = 0, row = 0, row_end = 0;  // rows of x; the first that is no longer the tile's
  INGOT_HD uint32_t rows() const { return row_end - row; }
};
struct Walk {
  const int32_t* offsets;
  uint32_t groups, band_tiles, tile_rows;
  uint32_t next_tile, step;
  uint32_t group = 0, before = 0;  // `before`: tiles of the groups before `group`
  INGOT_HD bool next(Tile& t) {
    for (; group < groups; ++group) {
      const uint32_t begin = uint32_t(offsets[group]), end = uint32_t(offsets[group + 1]);
      const uint32_t across = (end - begin + tile_rows - 1) / tile_rows, here = across * band_tiles;
      if (next_tile < before + here) {
        const uint32_t in = next_tile - before, row = begin + in % across * tile_rows;
        t = {group, in / across * kBands, row, row + tile_rows < end ? row + tile_rows : end};
        next_tile += step;
        return true;
      }
      before += here;
    }
    return false;
  }
};

// Rows of x in a tile, and in the tile of the kernel that takes it: 16, 80, which also multiplies 40, or 128. Of
// groups: few where memory is what takes time, then so many that nearly every group of 64 rows, as 2,048 tokens give
// each of 128 experts, is one tile. Of one matrix: those whose waves of tiles end first, weights taking as long as some
// kWeightRows rows of x.
struct TileRows {
  int rows, kernel;
};
inline TileRows pick_tile_rows(int64_t rows, int64_t groups, int64_t bands, int64_t sms) {
  if (groups <= 1) {
    constexpr TileRows kTiles[] = {{128, 128}, {80, 80}, {40, 80}};
    constexpr int64_t kWeightRows = 40;
    const int64_t tiles_down = (bands + kBands - 1) / kBands;
    const auto time_of = [&](const TileRows& t) {
      const int64_t tiles = tiles_down * ((rows + t.rows - 1) / t.rows);
      return (tiles + sms - 1) / sms * (t.rows + kWeightRows);
    };
    TileRows best = kTiles[0];
    for (const TileRows& t : kTiles)
      if (time_of(t) < time_of(best)) best = t;
    return best;
  }
  const double mean = double(rows) / double(groups);
  const int tile = mean <= 8 ? 16 : mean <= 160 ? 80 : 128;
  return {tile, tile};
}
// Rows of x that one load brings (grouped.cuh: kNarrow).
inline int box_rows(TileRows t) { return t.kernel == 80 ? 40 : t.kernel; }

}  // namespace ingot::grouped
