#pragma once
// The weight tiles of a matrix that a block of the megakernel multiplies, and their division into chunks. The copying
// warp enumerates the chunks; the multiplying warps only need their number.
//
// The weight tiles of a matrix are numbered along its row tiles, row tile after row tile. The matrices of the chosen
// experts are numbered together: slot by slot (gate and up), or row tile by row tile with all slots of each row tile
// (down, which adds the slots up). A block takes a range of these numbers. Where a range ends within a row tile, two
// blocks each hold a part of the row tile's sums.
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

struct WeightTileRange {
  uint32_t begin = 0, end = 0;
};
// The range of block `block` among the weight tiles [0, all), where each block takes `each`.
INGOT_HD inline WeightTileRange range_of_block(uint32_t all, uint32_t each, uint32_t block) {
  const uint64_t begin = uint64_t(each) * block;
  if (begin >= all) return {all, all};
  return {uint32_t(begin), begin + each < all ? uint32_t(begin) + each : all};
}
// The number of weight tiles for each block: at least those of a row tile, or exactly half of them, so that no row tile
// is shared by more than two blocks.
INGOT_HD inline uint32_t weight_tiles_per_block(uint64_t row_tiles, uint32_t weight_tiles, uint32_t blocks) {
  const uint64_t each = (row_tiles * weight_tiles + blocks - 1) / blocks;
  if (each >= weight_tiles) return uint32_t(each);
  return weight_tiles % 2 == 0 && each <= weight_tiles / 2 ? weight_tiles / 2 : weight_tiles;
}
// The same number for stages in which blocks must not share a row tile.
INGOT_HD inline uint32_t whole_row_tiles_per_block(uint64_t row_tiles, uint32_t weight_tiles, uint32_t blocks) {
  return uint32_t((row_tiles + blocks - 1) / blocks) * weight_tiles;
}

// Weight tiles `first` to `first + count - 1` of a row tile of the matrix in an expert slot.
struct Chunk {
  const uint8_t* data;
  uint32_t slot, row_tile, first, count;
};
struct WorkRange {
  int64_t weight_tile_bytes, row_tile_bytes, matrix_bytes;
  const int32_t* expert;  // the expert of each slot; null for a single matrix
  uint32_t weight_tiles;  // of a row tile
  uint32_t row_tiles;     // of a matrix
  uint32_t slots;         // chosen experts; 1 for a single matrix
  // order of the numbering: all slots of a row tile, then the next row tile; else all row tiles of a slot, then the
  // next slot
  bool by_row_tile;
  uint32_t chunk_tiles;  // the most weight tiles of a chunk
  // bytes between the activation vectors of two slots, where each slot has its own vector (by_row_tile)
  uint32_t vector_stride;
  WeightTileRange range;            // the block's range of the numbered weight tiles
  uint32_t row_tile_chunks;         // chunks of a row tile
  uint32_t first_chunk, end_chunk;  // the chunks of the range, numbered over the whole matrix
  // The groups of 16 sums that the range adds to: one for each row tile, counted over all slots unless by_row_tile.
  uint32_t first_sums, end_sums;

  INGOT_HD void begin() {
    row_tile_chunks = (weight_tiles + chunk_tiles - 1) / chunk_tiles;
    first_chunk = range.begin / weight_tiles * row_tile_chunks + range.begin % weight_tiles / chunk_tiles;
    end_chunk = range.end / weight_tiles * row_tile_chunks + (range.end % weight_tiles + chunk_tiles - 1) / chunk_tiles;
    if (is_empty()) end_chunk = first_chunk;
    first_sums = range.begin / tiles_per_sums();
    end_sums = (range.end + tiles_per_sums() - 1) / tiles_per_sums();
  }
  INGOT_HD bool is_empty() const { return range.begin == range.end; }
  // Chunk `number`, between first_chunk and end_chunk - 1, as part of the first slot's matrix. A chunk never spans two
  // row tiles.
  INGOT_HD Chunk chunk(uint32_t number, const uint8_t* data) const {
    const uint32_t v = number / row_tile_chunks, place = number % row_tile_chunks * chunk_tiles,
                   begin = v * weight_tiles;
    const uint32_t first = begin + place < range.begin ? range.begin - begin : place,
                   most = place + chunk_tiles < weight_tiles ? place + chunk_tiles : weight_tiles,
                   end = range.end - begin < most ? range.end - begin : most;
    const uint32_t slot = by_row_tile ? v % slots : v / row_tiles, row_tile = by_row_tile ? v / slots : v % row_tiles;
    return {data + row_tile * row_tile_bytes + first * weight_tile_bytes, slot, row_tile, first, end - first};
  }
  // Moves the chunk to the matrix of its slot's expert.
  INGOT_HD void move_to_expert(Chunk& c) const {
    if (expert != nullptr) c.data += expert[c.slot] * matrix_bytes;
  }
  // A round consists of at most `most` groups of sums from `sums` on, for which a block has memory at once.
  INGOT_HD uint32_t groups_in_round(uint32_t sums, uint32_t most) const {
    return end_sums - sums < most ? end_sums - sums : most;
  }
  INGOT_HD uint32_t chunks_in_round(uint32_t sums, uint32_t most) const {
    return (sums + most < end_sums ? first_chunk_of_sums(sums + most) : end_chunk) -
           (sums > first_sums ? first_chunk_of_sums(sums) : first_chunk);
  }
  INGOT_HD uint32_t first_chunk_of_sums(uint32_t sums) const {
    return (by_row_tile ? sums * slots : sums) * row_tile_chunks;
  }
  // The number of weight tiles that add to the same 16 sums.
  INGOT_HD uint32_t tiles_per_sums() const { return by_row_tile ? weight_tiles * slots : weight_tiles; }
};
// The number of weight tiles of a chunk where at most `most` fit. The chunks of a row tile are as equal as possible.
INGOT_HD inline uint32_t even_chunk_tiles(uint32_t weight_tiles, uint32_t most) {
  const uint32_t chunks = (weight_tiles + most - 1) / most;
  return (weight_tiles + chunks - 1) / chunks;
}

// Where each warp copies and multiplies its own weights (megakernel/warp_ring.cuh), the weight tiles are divided into
// steps of 512 bytes; in MXFP4 a step is a weight tile. The steps are numbered as the weight tiles are, and each warp
// of a block takes an equal and contiguous part of a round.

// Quotients by a divisor that many threads share. Exact where dividend times divisor is less than 2^32.
struct Divisor {
  uint32_t divisor = 1, inverse = 0;

  Divisor() = default;
  INGOT_HD explicit Divisor(uint32_t d) : divisor(d), inverse(d > 1 ? uint32_t((uint64_t(1) << 32) / d) + 1 : 0) {}
  INGOT_HD uint32_t quotient(uint32_t n) const { return inverse == 0 ? n : uint32_t(uint64_t(n) * inverse >> 32); }
};

// Neighbouring steps of one row tile.
struct RowTileSteps {
  uint32_t slot, row_tile;  // the expert slot and the row tile
  uint32_t group;           // the group of sums that the steps add to
  uint32_t first, count;    // counted within the row tile
};
// The steps of a block's part of a product.
struct WarpSteps {
  Divisor row_tile_steps;  // the steps of a row tile
  Divisor order;           // the slots of a row tile, or the row tiles of a slot (WorkRange::by_row_tile)

  WarpSteps() = default;
  // `tile_steps`: the steps of a weight tile.
  INGOT_HD WarpSteps(const WorkRange& s, uint32_t tile_steps)
      : row_tile_steps(s.weight_tiles * tile_steps), order(s.by_row_tile ? s.slots : s.row_tiles) {}

  // The steps of warp `warp` of `warps` in the round of `groups` groups of sums from `round` on.
  INGOT_HD static WeightTileRange of_warp(const WorkRange& s, uint32_t tile_steps, uint32_t round, uint32_t groups,
                                          uint32_t warp, uint32_t warps) {
    const uint32_t each = s.tiles_per_sums(), first = round * each, last = first + groups * each,
                   begin = (s.range.begin > first ? s.range.begin : first) * tile_steps,
                   end = (s.range.end < last ? s.range.end : last) * tile_steps;
    if (begin >= end) return {};
    return {begin + (end - begin) * warp / warps, begin + (end - begin) * (warp + 1) / warps};
  }
  // The first of the steps [step, end) that lie in one row tile.
  INGOT_HD RowTileSteps row_tile_of(const WorkRange& s, uint32_t step, uint32_t end) const {
    const uint32_t v = row_tile_steps.quotient(step), first = step - v * row_tile_steps.divisor,
                   quotient = order.quotient(v), rest = v - quotient * order.divisor,
                   left = row_tile_steps.divisor - first;
    return {s.by_row_tile ? rest : quotient, s.by_row_tile ? quotient : rest, s.by_row_tile ? quotient : v, first,
            left < end - step ? left : end - step};
  }
};

}  // namespace ingot::decode
