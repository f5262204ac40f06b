#pragma once
// Which weight tiles of a matrix a block of the megakernel multiplies, and in which chunks they come. The warp that
// copies weights makes the list of chunks; the warps that multiply know how many there are.
//
// The weight tiles of a matrix are numbered along its row tiles, row tile after row tile. The matrices of the chosen
// experts are numbered together: slot by slot (gate and up), or row tile by row tile with all slots of each (down,
// which adds the slots up). A block takes a range of the numbers. Where a range ends within a row tile, two blocks hold
// a part of its sums.
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

struct WeightTileRange {
  uint32_t begin = 0, end = 0;
};
// The range of block `block` out of the weight tiles [0, all), where each block takes `each`.
INGOT_HD inline WeightTileRange range_of_block(uint32_t all, uint32_t each, uint32_t block) {
  const uint64_t begin = uint64_t(each) * block;
  if (begin >= all) return {all, all};
  return {uint32_t(begin), begin + each < all ? uint32_t(begin) + each : all};
}
// Weight tiles that each block takes: at least a row tile's, so that no row tile is shared by more than two blocks.
INGOT_HD inline uint32_t weight_tiles_per_block(uint64_t row_tiles, uint32_t weight_tiles, uint32_t blocks) {
  const uint64_t each = (row_tiles * weight_tiles + blocks - 1) / blocks;
  return each < weight_tiles ? weight_tiles : uint32_t(each);
}
// The same where no row tile is shared.
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
  const int32_t* expert;     // of each slot; null: one matrix
  uint32_t weight_tiles;     // of a row tile
  uint32_t row_tiles;        // of a matrix
  uint32_t slots;            // of chosen experts; 1 for one matrix
  bool by_row_tile;          // the order: all slots of a row tile, then the next row tile; else all row tiles of a slot
  uint32_t chunk_tiles;      // weight tiles of a chunk, at most
  uint32_t vector_stride;    // bytes between the activation vectors of two slots, where each has its own (by_row_tile)
  WeightTileRange range;     // of the numbered weight tiles
  uint32_t row_tile_chunks;  // chunks of a row tile
  uint32_t first_chunk, end_chunk;  // of the range, numbered over all
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
  // Chunk `number` of first_chunk to end_chunk - 1, at its place in the first slot's matrix. A chunk is of one row
  // tile.
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
  // A round is the sums from `sums` on, at most `most` groups, for which a block has memory at once.
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
  // Weight tiles that add to the same 16 sums.
  INGOT_HD uint32_t tiles_per_sums() const { return by_row_tile ? weight_tiles * slots : weight_tiles; }
};
// Weight tiles of a chunk where at most `most` fit: the chunks of a row tile are as even as they come.
INGOT_HD inline uint32_t even_chunk_tiles(uint32_t weight_tiles, uint32_t most) {
  const uint32_t chunks = (weight_tiles + most - 1) / most;
  return (weight_tiles + chunks - 1) / chunks;
}

}  // namespace ingot::decode
