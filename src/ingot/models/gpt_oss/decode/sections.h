#pragma once
// What one block of the megakernel takes of a product, piece by piece: the thread that copies weights walks the list,
// the warps that multiply know how long it is.
//
// Granules are numbered along the bands, bands along the matrix, and of a bank's chosen experts either expert by expert
// (gate and up) or band by band, all experts of each (down, which adds them up). A block takes a range of the numbers.
// Where ranges end within a band two blocks hold a part of its sums.
#include "ingot/models/gpt_oss/decode/state.h"

namespace ingot::gpt_oss_decode {

struct GranuleRange {
  uint32_t begin = 0, end = 0;
};
// Of all granules [0, all) those of block `block`, where each takes `share`.
INGOT_HD inline GranuleRange range_of(uint32_t all, uint32_t share, uint32_t block) {
  const uint64_t begin = uint64_t(share) * block;
  if (begin >= all) return {all, all};
  return {uint32_t(begin), begin + share < all ? uint32_t(begin) + share : all};
}
// Shares of whole granules, at least a band's, so that no band is in more than two; or of whole bands.
INGOT_HD inline uint32_t share_of_granules(uint64_t bands, uint32_t granules, uint32_t blocks) {
  const uint64_t share = (bands * granules + blocks - 1) / blocks;
  return share < granules ? granules : uint32_t(share);
}
INGOT_HD inline uint32_t share_of_bands(uint64_t bands, uint32_t granules, uint32_t blocks) {
  return uint32_t((bands + blocks - 1) / blocks) * granules;
}

struct Section {
  int64_t granule_bytes, band_bytes, matrix_bytes;
  const int32_t* expert;   // of each entry; null: one matrix
  uint32_t granules;       // of a band
  uint32_t bands;          // of a matrix
  uint32_t entries;        // chosen experts; 1 of one matrix
  bool by_band;            // all entries of a band, then the next band; else all bands of an entry
  uint32_t piece;          // granules of a piece, at most
  uint32_t column_stride;  // bytes from one entry's column to the next, where each has its own (by_band)
  GranuleRange range;
  uint32_t first_entry, first_band;  // where the range begins
  uint32_t first, until;             // its first granule in its band; where the piece it is in ends
  uint32_t of_band;                  // pieces of a band
  uint32_t first_piece, end_piece;   // the range's, numbered over all

  INGOT_HD void begin() {
    const uint32_t v = range.begin / granules;
    first = range.begin % granules;
    until = (first / piece + 1) * piece;
    first_entry = by_band ? v % entries : v / bands;
    first_band = by_band ? v / entries : v % bands;
    of_band = (granules + piece - 1) / piece;
    first_piece = v * of_band + first / piece;
    end_piece = range.end / granules * of_band + (range.end % granules + piece - 1) / piece;
    if (range.begin == range.end) end_piece = first_piece;
  }
  // The number of the first piece of sums `band`.
  INGOT_HD uint32_t piece_of_sums(uint32_t band) const { return (by_band ? band * entries : band) * of_band; }
  // The first of the bands whose sums the range takes part in, counted over all entries where each has its own.
  INGOT_HD uint32_t first_sums() const { return by_band ? first_band : first_entry * bands + first_band; }
  // Granules that share 16 sums.
  INGOT_HD uint32_t of_sums() const { return by_band ? granules * entries : granules; }
};
// Pieces of a band as even as they come: most granules of one where `most` fit.
INGOT_HD inline uint32_t piece_of(uint32_t granules, uint32_t most) {
  const uint32_t pieces = (granules + most - 1) / most;
  return (granules + pieces - 1) / pieces;
}

struct Piece {
  const uint8_t* data;
  uint32_t entry, band, first, count;  // its granules: first to first + count - 1 of a band
};
class Pieces {
 public:
  INGOT_HD Pieces(const Section& s, const uint8_t* data)
      : s_(s),
        data_(data),
        at_(s.range.begin),
        first_(s.first),
        until_(s.until),
        entry_(s.first_entry),
        band_(s.first_band) {}
  INGOT_HD bool next(Piece& p) {
    if (at_ >= s_.range.end) return false;
    const uint32_t stop = until_ < s_.granules ? until_ : s_.granules, left = s_.range.end - at_,
                   count = stop - first_ < left ? stop - first_ : left;
    const uint8_t* const matrix = s_.expert == nullptr ? data_ : data_ + s_.expert[entry_] * s_.matrix_bytes;
    p = {matrix + band_ * s_.band_bytes + first_ * s_.granule_bytes, entry_, band_, first_, count};
    at_ += count;
    first_ += count;
    until_ += s_.piece;
    if (first_ == s_.granules) next_band();
    return true;
  }

 private:
  INGOT_HD void next_band() {
    first_ = 0;
    until_ = s_.piece;
    if (s_.by_band) {
      if (++entry_ == s_.entries) entry_ = 0, ++band_;
    } else if (++band_ == s_.bands) {
      band_ = 0, ++entry_;
    }
  }

  const Section& s_;
  const uint8_t* const data_;
  uint32_t at_, first_, until_, entry_, band_;
};

}  // namespace ingot::gpt_oss_decode
