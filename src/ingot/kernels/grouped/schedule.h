#pragma once
// The order in which blocks compute the tiles of a grouped product: 256 rows of a matrix, or 64, by some rows of x,
// group after group; tiles of a group that share weights follow each other. Host code too, so that tests need no GPU.
#include <cstdint>

#include "ingot/core/hd.h"
#include "ingot/kernels/quant/quant.h"

namespace ingot::grouped {

constexpr uint32_t kBands = 16;         // row tiles of a tile: 256 rows
constexpr uint32_t kFewBands = 4;       // the same for one matrix and few rows of x: 64 rows
constexpr uint32_t kMostGroups = 2048;  // a block keeps the offsets of all groups in shared memory

struct Tile {
  uint32_t group = 0, row_tile = 0, row = 0, row_end = 0;  // rows of x; the end of the tile's rows
  INGOT_HD uint32_t rows() const { return row_end - row; }
};
struct Walk {
  const int32_t* offsets;
  uint32_t groups, tile_bands, band_tiles, tile_rows;
  uint32_t next_tile, step;
  uint32_t group = 0, before = 0;  // `before`: tiles of the groups before `group`
  // Most groups have one tile of rows of x, and divisions are slow.
  INGOT_HD uint32_t across(uint32_t g) const {
    const uint32_t rows = uint32_t(offsets[g + 1]) - uint32_t(offsets[g]);
    return rows <= tile_rows ? rows > 0 : (rows + tile_rows - 1) / tile_rows;
  }
  INGOT_HD uint32_t tiles_of(uint32_t g) const { return across(g) * band_tiles; }
  // Writes tile `next_tile` to t, then adds `step` to next_tile; false where no such tile exists. Where blocks claim
  // tiles, `step` is 0 and the caller sets next_tile between calls.
  INGOT_HD bool next(Tile& t) {
    for (; group < groups; ++group) {
      const uint32_t begin = uint32_t(offsets[group]), end = uint32_t(offsets[group + 1]), wide = across(group);
      const uint32_t here = wide * band_tiles;
      if (next_tile < before + here) {
        const uint32_t in = next_tile - before, down = wide == 1 ? in : in / wide;
        const uint32_t row = begin + (in - down * wide) * tile_rows;
        t = {group, down * tile_bands, row, row + tile_rows < end ? row + tile_rows : end};
        next_tile += step;
        return true;
      }
      before += here;
    }
    return false;
  }
};
// Tiles of unequal cost: block i begins with tile i and then claims tiles one by one. Every block that has a first tile
// claims until no tile is left, so there are as many claims as tiles, and a counter that wraps after this number is
// zero for the next launch.
INGOT_HD constexpr uint32_t claimed_tile(uint32_t claim, uint32_t blocks) { return blocks + claim; }

// The kernels of a format, by the rows of x of their tiles: 16, `middle` and `widest`. For tiles with fewer rows,
// narrow_of() gives a smaller number of rows that a kernel can multiply. MXFP4's widths leave registers for four
// warpgroups (grouped.cuh), which gains more time than a greater width.
struct Widths {
  int middle, widest;
};
constexpr Widths widths_of(WeightFormat f) { return f == WeightFormat::mxfp4 ? Widths{48, 72} : Widths{80, 128}; }
constexpr int narrow_of(WeightFormat f, int rows) {
  if (rows == 80) return 40;
  if (f != WeightFormat::mxfp4) return rows;
  return rows == 72 ? 40 : rows == 48 ? 24 : rows == 16 ? 8 : rows;
}
// Rows of x in a tile, and the width of the kernel that computes the tile.
struct TileShape {
  int rows, kernel;
  int row_tiles = kBands;
};
// With several groups: small tiles if memory bandwidth limits the time, otherwise tiles so wide that nearly every group
// is one tile, or with MXFP4 a few tiles. With one matrix: the tile shape whose waves of blocks end first; in this
// model, reading the weights of a tile takes as long as multiplying some rows of x. Tiles of 64 rows of weights give
// work to multiprocessors that a product of few rows of x would leave idle; of these, tiles of 16 rows of x have the
// most stages.
inline TileShape pick_tile(int64_t rows, int64_t groups, int64_t row_tiles, int64_t sms, WeightFormat f, bool gated,
                           int64_t parts = 1) {
  const auto [middle, widest] = widths_of(f);
  const bool mx = f == WeightFormat::mxfp4;
  if (groups > 1) {
    const double mean = double(rows) / double(groups);
    if (mean <= 11) return {16, 16};
    if (mean <= (mx ? 36 : 160)) return {middle, middle};
    return {widest, widest};
  }
  const TileShape tiles[] = {{widest, widest},      {middle, middle},    {mx ? middle : 40, middle},
                             {128, 128, kFewBands}, {80, 80, kFewBands}, {16, 16, kFewBands}};
  const auto time_of = [&](const TileShape& t) {
    const int64_t all = (row_tiles + t.row_tiles - 1) / t.row_tiles * ((rows + t.rows - 1) / t.rows) * parts;
    return (all + sms - 1) / sms * (t.row_tiles == int(kBands) ? 3 * (t.rows + 40) : t.rows + 85);
  };
  TileShape best = tiles[0];
  for (const TileShape& t : tiles)
    if (time_of(t) < time_of(best) && !(gated && t.row_tiles != int(kBands))) best = t;
  return best;
}
// The widths of the portable kernels in rows of x, and the greatest width for a format. A tile has 256 rows of weights;
// with 192 rows of x, its sums would leave too few registers.
constexpr int kPortableWidths[] = {16, 48, 96};
constexpr int portable_widest(WeightFormat f) { return f == WeightFormat::bf16 ? 128 : 176; }
// The choice: for several groups the width with which nearly every group is one tile, and for groups of many rows the
// widest one, with which a weight is decoded half as often. For one matrix the width whose waves of tiles end first (of
// equal ones the widest), where reading the weights of a tile counts as much as some rows of x.
inline int pick_portable_width(WeightFormat format, int64_t rows, int64_t groups, int64_t row_tiles, int64_t sms) {
  const auto [few, middle, wide] = kPortableWidths;
  const int widest = portable_widest(format);
  const double mean = double(rows) / double(groups);
  if (groups > 1) return mean <= 11 ? few : mean <= 36 ? middle : mean < 2 * widest ? wide : widest;
  if (rows <= few) return few;
  const int weights = format == WeightFormat::bf16 ? 48 : 24;
  const auto time_of = [&](int width) {
    const int64_t tiles = (rows + width - 1) / width * ((row_tiles + kBands - 1) / kBands);
    return (tiles + sms - 1) / sms * (width + weights);
  };
  int best = widest;
  for (const int width : {wide, middle})
    if (time_of(width) < time_of(best)) best = width;
  return best;
}
// Rows of x of one tensor copy.
constexpr int box_rows(int kernel) { return kernel == 80 ? 40 : kernel; }

}  // namespace ingot::grouped
