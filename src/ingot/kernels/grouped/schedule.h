#pragma once
// Which tiles of a grouped product a block computes: 256 rows of a matrix, or 64, by so many rows of x, group after
// group; of a group those that share weights follow each other. Host code too, so that it is tested without a GPU.
#include <cstdint>

#include "ingot/core/hd.h"
#include "ingot/kernels/quant/quant.h"

namespace ingot::grouped {

constexpr uint32_t kBands = 16;         // of a tile: 256 rows
constexpr uint32_t kFewBands = 4;       // of those of one matrix and few rows of x: 64
constexpr uint32_t kMostGroups = 2048;  // a block keeps where they begin in shared memory

struct Tile {
  uint32_t group = 0, band = 0, row = 0, row_end = 0;  // rows of x; the first that is no longer the tile's
  INGOT_HD uint32_t rows() const { return row_end - row; }
};
struct Walk {
  const int32_t* offsets;
  uint32_t groups, tile_bands, band_tiles, tile_rows;
  uint32_t next_tile, step;
  uint32_t group = 0, before = 0;  // `before`: tiles of the groups before `group`
  INGOT_HD bool next(Tile& t) {
    for (; group < groups; ++group) {
      const uint32_t begin = uint32_t(offsets[group]), end = uint32_t(offsets[group + 1]);
      // Most groups are one tile across, and divisions are slow.
      const uint32_t across = end - begin <= tile_rows ? end > begin : (end - begin + tile_rows - 1) / tile_rows;
      const uint32_t here = across * band_tiles;
      if (next_tile < before + here) {
        const uint32_t in = next_tile - before, down = across == 1 ? in : in / across;
        const uint32_t row = begin + (in - down * across) * tile_rows;
        t = {group, down * tile_bands, row, row + tile_rows < end ? row + tile_rows : end};
        next_tile += step;
        return true;
      }
      before += here;
    }
    return false;
  }
};

// Which kernels there are of a format: of 16 rows of x, of 80, which also multiplies 40, of `widest`, and of 40 alone.
struct Widths {
  int widest;
  bool forty;
};
// The more rows of x a tile has, the less of a granule's decoding each of them pays.
constexpr Widths widths_of(WeightFormat f) { return f == WeightFormat::mxfp4 ? Widths{160, true} : Widths{128, false}; }
// Rows of x in a tile, and in the tile of the kernel that takes it.
struct TileShape {
  int rows, kernel;
  int bands = kBands;
};
// Of groups: few where memory is what takes time, then so many that nearly every group of 32 or 64 rows, as 1,024 and
// 2,048 tokens give each of 128 experts, is one tile, and of 128, as 4,096 give them, where 160 is the widest. Of one
// matrix: those whose waves of tiles end first. Weights take as long as some rows of x, and a quarter of them makes
// more tiles of few rows than there would be multiprocessors without work.
inline TileShape pick_tile(int64_t rows, int64_t groups, int64_t bands, int64_t sms, const Widths& w, bool gated) {
  if (groups > 1) {
    const double mean = double(rows) / double(groups);
    if (mean <= 11) return {16, 16};
    if (mean <= 33 && w.forty) return {40, 40};
    if (mean <= (w.widest == 160 ? 72 : 160)) return {80, 80};
    return {w.widest, w.widest};
  }
  const TileShape tiles[] = {
      {w.widest, w.widest}, {80, 80}, {40, w.forty ? 40 : 80}, {128, 128, kFewBands}, {80, 80, kFewBands}};
  const auto time_of = [&](const TileShape& t) {
    const int64_t all = (bands + t.bands - 1) / t.bands * ((rows + t.rows - 1) / t.rows);
    return (all + sms - 1) / sms * (t.bands == int(kBands) ? 3 * (t.rows + 40) : t.rows + 85);
  };
  TileShape best = tiles[0];
  for (const TileShape& t : tiles)
    if (time_of(t) < time_of(best) && !(gated && t.bands != int(kBands))) best = t;
  return best;
}
// Rows of x that one load brings (grouped.cuh: kNarrow).
inline int box_rows(const TileShape& t) { return t.kernel == 80 ? 40 : t.kernel; }

}  // namespace ingot::grouped
