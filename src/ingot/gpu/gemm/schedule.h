#pragma once
// The tiles of a cluster, and their order. All threads of a block walk the same list of tiles: the producer needs the
// tiles to load, and the consumers need the places of their sums. A schedule is made on the host, is passed as a kernel
// argument, and has
//     Walk walk(first, step) const      the walk of a cluster: tiles first, first + step, ...
//     bool Walk::next(TileAt& t)        false after the last
// Grid: all tiles of a product or of a batch of equal products. Triangle: the tiles of a symmetric result on or below
// its diagonal. Grouped: products of different heights with common N and K and consecutive rows; the first row of each
// is read on the device. GroupedSums: products of different K with common M and N, over consecutive rows of K.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ingot/core/hd.h"
#include "ingot/gpu/gemm/shape.h"
#include "ingot/gpu/tile/divide.cuh"

namespace ingot::gemm {

// The cluster's tile; block r of the cluster takes the kTileM rows from m + r * kTileM on.
struct TileAt {
  uint32_t batch = 0, m = 0, n = 0;  // first row and column
  uint32_t m_end = 0;                // the end of this product's rows
  uint32_t k_steps = 0;              // of kTileK each
};

// Calls S::at(i) for i = first, first + step, ...
template <class S> struct CountedWalk {
  const S* schedule;
  uint32_t i, step;
  INGOT_HD bool next(TileAt& t) {
    if (i >= schedule->tiles) return false;
    t = schedule->at(i);
    i += step;
    return true;
  }
};

// Blocks of `kHeight` cluster rows are walked column by column, back and forth: concurrent clusters read few rows of A
// and of B, and these rows stay in L2.
struct Grid {
  static constexpr uint32_t kHeight = 8;
  uint32_t tiles = 0;
  uint32_t m_tiles = 0, n_tiles = 0, tile_m = 0, tile_n = 0, m = 0, k_steps = 0;
  tile::Divisor of_batch, of_block, high, last;

  static Grid of(const Problem& s, const Tile& t) {
    Grid g;
    g.tile_m = uint32_t(kTileM * t.cluster);
    g.tile_n = uint32_t(t.n);
    g.m = uint32_t(s.m);
    g.m_tiles = uint32_t(ceil_div(s.m, g.tile_m));
    g.n_tiles = uint32_t(ceil_div(s.n, t.n));
    g.k_steps = uint32_t(ceil_div(s.k, kTileK));
    g.tiles = uint32_t(s.batch) * g.m_tiles * g.n_tiles;
    if (g.tiles == 0) return g;
    g.of_batch = tile::Divisor(g.m_tiles * g.n_tiles);
    g.high = tile::Divisor(std::min(kHeight, g.m_tiles));
    g.of_block = tile::Divisor(g.high.value * g.n_tiles);
    g.last = tile::Divisor(g.m_tiles % g.high.value == 0 ? g.high.value : g.m_tiles % g.high.value);
    return g;
  }
  INGOT_HD TileAt at(uint32_t i) const {
    const tile::Division batch = tile::divide(i, of_batch), block = tile::divide(batch.remainder, of_block);
    const uint32_t first = block.quotient * high.value;
    const tile::Division in = tile::divide(block.remainder, first + high.value <= m_tiles ? high : last);
    const uint32_t column = block.quotient % 2 == 0 ? in.quotient : n_tiles - 1 - in.quotient;
    return {batch.quotient, (first + in.remainder) * tile_m, column * tile_n, m, k_steps};
  }
  INGOT_HD CountedWalk<Grid> walk(uint32_t first, uint32_t step) const { return {this, first, step}; }
};

// For square cluster tiles. Row by row: row r has r + 1 tiles.
struct Triangle {
  uint32_t tiles = 0, per_batch = 0, side = 0, m = 0, k_steps = 0;
  tile::Divisor of_batch;

  static constexpr bool fits(const Tile& t) { return kTileM * t.cluster == t.n; }
  static Triangle of(const Problem& s, const Tile& t) {
    Triangle g;
    g.side = uint32_t(t.n);
    g.m = uint32_t(s.m);
    g.k_steps = uint32_t(ceil_div(s.k, kTileK));
    const uint32_t rows = uint32_t(ceil_div(s.m, t.n));
    g.per_batch = rows * (rows + 1) / 2;
    g.tiles = uint32_t(s.batch) * g.per_batch;
    if (g.tiles > 0) g.of_batch = tile::Divisor(g.per_batch);
    return g;
  }
  INGOT_HD TileAt at(uint32_t i) const {
    const tile::Division in = tile::divide(i, of_batch);
    uint32_t r = uint32_t((sqrtf(8.f * float(in.remainder) + 1.f) - 1.f) * 0.5f);
    while (r * (r + 1) / 2 > in.remainder) --r;  // the square root is rounded
    while ((r + 1) * (r + 2) / 2 <= in.remainder) ++r;
    return {in.quotient, r * side, (in.remainder - r * (r + 1) / 2) * side, m, k_steps};
  }
  INGOT_HD CountedWalk<Triangle> walk(uint32_t first, uint32_t step) const { return {this, first, step}; }
};

// The first rows of products that divide `rows` consecutive rows, read on the device: product g has the rows from
// offsets[g] to offsets[g + 1]. An offset outside 0 to `rows` counts as `rows`, so that a wrong offset cannot cause
// accesses outside the tensors.
struct GroupOffsets {
  const int32_t* offsets = nullptr;  // groups + 1
  uint32_t groups = 0, rows = 0;
  INGOT_HD uint32_t begin(uint32_t group) const {
    const uint32_t at = uint32_t(offsets[group]);
    return at < rows ? at : rows;
  }
  INGOT_HD uint32_t end(uint32_t group) const { return group < groups ? begin(group + 1) : rows; }
  INGOT_HD uint32_t size(uint32_t group) const {
    const uint32_t from = begin(group), to = end(group);
    return from < to ? to - from : 0;
  }
};

// Product g has rows offsets[g] to offsets[g + 1] - 1 of A and C, and matrix g of B. Empty products cost nothing. The
// rows from offsets[groups] on are a last product without steps, whose sums are zero. Tiles end with their product
// (TileAt::m_end), so the epilogue must not write beyond m_end: no tensor copies of whole tiles. Within a product the
// order is the grid's: blocks of kHeight tiles of rows, column by column, back and forth.
struct Grouped {
  static constexpr uint32_t kHeight = Grid::kHeight;
  GroupOffsets at;
  uint32_t n_tiles = 0, tile_m = 0, tile_n = 0, k_steps = 0;
  tile::Divisor of_block;

  static Grouped of(const GroupOffsets& at, int64_t n, int64_t k, const Tile& t) {
    Grouped g;
    g.at = at;
    g.tile_m = uint32_t(kTileM * t.cluster);
    g.tile_n = uint32_t(t.n);
    g.n_tiles = uint32_t(ceil_div(n, t.n));
    g.k_steps = uint32_t(ceil_div(k, kTileK));
    g.of_block = tile::Divisor(std::max(kHeight * g.n_tiles, 1u));
    return g;
  }
  // Every product has at most one partial tile of rows.
  int64_t most_tiles() const { return (ceil_div(at.rows, tile_m) + at.groups) * int64_t(n_tiles); }
  struct Walk {
    const Grouped* of;
    uint32_t i, step, group, before;  // `before`: tiles of the products before `group`
    INGOT_HD bool next(TileAt& t) {
      for (; group <= of->at.groups; ++group) {
        const uint32_t high = (of->at.size(group) + of->tile_m - 1) / of->tile_m, here = high * of->n_tiles;
        if (i < before + here) {
          const tile::Division block = tile::divide(i - before, of->of_block);
          const uint32_t first = block.quotient * kHeight, height = high - first < kHeight ? high - first : kHeight;
          const uint32_t down = block.remainder % height, across = block.remainder / height;
          const uint32_t column = block.quotient % 2 == 0 ? across : of->n_tiles - 1 - across;
          t = {group, of->at.begin(group) + (first + down) * of->tile_m, column * of->tile_n, of->at.end(group),
               group < of->at.groups ? of->k_steps : 0};
          i += step;
          return true;
        }
        before += here;
      }
      return false;
    }
  };
  INGOT_HD Walk walk(uint32_t first, uint32_t step) const { return {this, first, step, 0, 0}; }
};

// Product g is a sum over the rows offsets[g] to offsets[g + 1] - 1 of MN-major operands (operand.cuh: GroupedRows);
// its last step may end within a stage (core.cuh: TrimsStages). Where sums are added to C, products without rows have
// no tiles.
struct GroupedSums {
  GroupOffsets at;
  Grid grid;
  bool adds = false;

  static GroupedSums of(const GroupOffsets& at, int64_t m, int64_t n, bool adds, const Tile& t) {
    return {at, Grid::of({m, n, 0, int64_t(at.groups)}, t), adds};
  }
  // Rows of K in the stage of step `step`: less than kTileK where the product ends.
  INGOT_HD uint32_t rows_of_stage(const TileAt& t, uint32_t step) const {
    const uint32_t left = at.size(t.batch) - step * kTileK;
    return left < uint32_t(kTileK) ? left : uint32_t(kTileK);
  }
  struct Walk {
    const GroupedSums* of;
    uint32_t i, step;
    INGOT_HD bool next(TileAt& t) {
      while (i < of->grid.tiles) {
        t = of->grid.at(i);
        t.k_steps = (of->at.size(t.batch) + kTileK - 1) / kTileK;
        i += step;
        if (t.k_steps > 0 || !of->adds) return true;
      }
      return false;
    }
  };
  INGOT_HD Walk walk(uint32_t first, uint32_t step) const { return {this, first, step}; }
};

}  // namespace ingot::gemm
