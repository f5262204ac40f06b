#pragma once
// What one block of the megakernel takes of a product, piece by piece: the warp that copies weights makes the list,
// those that multiply know how long it is.
//
// Weight tiles are numbered along the bands, bands along the matrix, and of a bank's chosen experts either expert by
// expert (gate and up) or band by band, all experts of each (down, which adds them up). A block takes a range of the
// numbers. Where ranges end within a band two blocks hold a part of its sums.
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

struct WeightTileRange {
  uint32_t begin = 0, end = 0;
};
// Of all weight tiles [0, all) those of block `block`, where each takes `share`.
INGOT_HD inline WeightTileRange range_of(uint32_t all, uint32_t share, uint32_t block) {
  const uint64_t begin = uint64_t(share) * block;
  if (begin >= all) return {all, all};
  return {uint32_t(begin), begin + share < all ? uint32_t(begin) + share : all};
}
// Shares of whole weight tiles, at least a band's, so that no band is in more than two; or of whole bands.
INGOT_HD inline uint32_t share_of_weight_tiles(uint64_t bands, uint32_t weight_tiles, uint32_t blocks) {
  const uint64_t share = (bands * weight_tiles + blocks - 1) / blocks;
  return share < weight_tiles ? weight_tiles : uint32_t(share);
}
INGOT_HD inline uint32_t share_of_bands(uint64_t bands, uint32_t weight_tiles, uint32_t blocks) {
  return uint32_t((bands + blocks - 1) / blocks) * weight_tiles;
}

struct Piece {
  const uint8_t* data;
  uint32_t entry, band, first, count;  // its weight tiles: first to first + count - 1 of a band
};
struct Section {
  int64_t weight_tile_bytes, band_bytes, matrix_bytes;
  const int32_t* expert;   // of each entry; null: one matrix
  uint32_t weight_tiles;   // of a band
  uint32_t bands;          // of a matrix
  uint32_t entries;        // chosen experts; 1 of one matrix
  bool by_band;            // all entries of a band, then the next band; else all bands of an entry
  uint32_t piece;          // weight tiles of a piece, at most
  uint32_t column_stride;  // bytes from one entry's column to the next, where each has its own (by_band)
  WeightTileRange range;
  uint32_t of_band;                 // pieces of a band
  uint32_t first_piece, end_piece;  // the range's, numbered over all
  // The bands whose sums the range takes part in, counted over all entries where each has its own.
  uint32_t begin_sums, end_sums;

  INGOT_HD void begin() {
    of_band = (weight_tiles + piece - 1) / piece;
    first_piece = range.begin / weight_tiles * of_band + range.begin % weight_tiles / piece;
    end_piece = range.end / weight_tiles * of_band + (range.end % weight_tiles + piece - 1) / piece;
    if (range.begin == range.end) end_piece = first_piece;
    begin_sums = range.begin / of_sums();
    end_sums = (range.end + of_sums() - 1) / of_sums();
  }
  // Piece `number` of first_piece to end_piece - 1, as if of the first matrix. No piece is of two bands.
  INGOT_HD Piece piece_at(uint32_t number, const uint8_t* data) const {
    const uint32_t v = number / of_band, place = number % of_band * piece, begin = v * weight_tiles;
    const uint32_t first = begin + place < range.begin ? range.begin - begin : place,
                   most = place + piece < weight_tiles ? place + piece : weight_tiles,
                   end = range.end - begin < most ? range.end - begin : most;
    const uint32_t entry = by_band ? v % entries : v / bands, band = by_band ? v / entries : v % bands;
    return {data + band * band_bytes + first * weight_tile_bytes, entry, band, first, end - first};
  }
  // Of its own matrix.
  INGOT_HD void add_expert(Piece& p) const {
    if (expert != nullptr) p.data += expert[p.entry] * matrix_bytes;
  }
  // The number of the first piece of sums `band`.
  INGOT_HD uint32_t piece_of_sums(uint32_t band) const { return (by_band ? band * entries : band) * of_band; }
  // Of a round of at most `most` bands whose sums there is room for at once, from sums `band` on.
  INGOT_HD uint32_t bands_of(uint32_t band, uint32_t most) const {
    return end_sums - band < most ? end_sums - band : most;
  }
  INGOT_HD uint32_t pieces_of(uint32_t band, uint32_t most) const {
    return (band + most < end_sums ? piece_of_sums(band + most) : end_piece) -
           (band > begin_sums ? piece_of_sums(band) : first_piece);
  }
  // Weight tiles that share 16 sums.
  INGOT_HD uint32_t of_sums() const { return by_band ? weight_tiles * entries : weight_tiles; }
};
// Pieces of a band as even as they come: most weight tiles of one where `most` fit.
INGOT_HD inline uint32_t piece_of(uint32_t weight_tiles, uint32_t most) {
  const uint32_t pieces = (weight_tiles + most - 1) / most;
  return (weight_tiles + pieces - 1) / pieces;
}

}  // namespace ingot::decode
