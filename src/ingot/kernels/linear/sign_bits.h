#pragma once
// The storage of the signs of a linear layer's elements before the activation. On a GPU a bit each, in the order in
// which the core's threads hold their sums, so a thread writes and reads the 64 bits of its part of 16 rows x 128
// columns as a single word; on a CPU a byte each, row by row.
#include <cstdint>

#include "ingot/core/hd.h"

namespace ingot::sign_bits {

constexpr int64_t kRows = 16, kColumns = 128, kLanes = 32;  // of a block of words; a word a lane

INGOT_HD constexpr int64_t column_blocks(int64_t columns) { return (columns + kColumns - 1) / kColumns; }
INGOT_HD constexpr int64_t words(int64_t rows, int64_t columns) {
  return (rows + kRows - 1) / kRows * column_blocks(columns) * kLanes;
}
INGOT_HD constexpr int64_t word_at(int64_t row, int64_t column, int64_t columns, int64_t lane) {
  return (row / kRows * column_blocks(columns) + column / kColumns) * kLanes + lane;
}
// Bit `bit` of lane `lane`'s word is (row, column) of its block: the order of wgmma's sums (ptx/wgmma.cuh).
struct Place {
  int row, column;
};
INGOT_HD constexpr Place place(int lane, int bit) {
  return {lane / 4 + (bit & 2 ? 8 : 0), bit / 4 * 8 + lane % 4 * 2 + (bit & 1)};
}

}  // namespace ingot::sign_bits
