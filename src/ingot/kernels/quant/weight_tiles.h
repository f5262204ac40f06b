#pragma once
// Weights in the reading order of matrix instructions: a warp loads its operands with a wide read per lane, without a
// rearrangement afterwards. A weight tile is 16 rows x 64 columns; a row tile is the weight tiles of the same 16 rows,
// one after the other; a matrix is its row tiles. The last weight tiles are padded with zeros.
//
// Lane l = 4 g + t of a warp holds rows g and g + 8 of a weight tile:
//   bf16   2048 bytes: 4 steps s of 16 columns, each 32 lanes of 16 bytes: the A operand of mma.m16n8k16. The lane's
//          word i (of 4) holds row g + 8 (i & 1), columns 16 s + 2 t + 8 (i >> 1) and the next one.
//   fp8    1024 bytes: 2 steps s of 32 columns, each 32 lanes of 16 bytes: the A operand of mma.m16n8k32. Word i holds
//          row g + 8 (i & 1), columns 32 s + 4 t + 16 (i >> 1) and the next three. The scales of the row tile's rows,
//          16 floats, follow its last weight tile.
//   mxfp4   544 bytes: 32 lanes of 16 bytes, then 32 scales. Word s (of 4) holds the codes of step s as bf16 has them:
//          code i (0 to 3, from the low end) is the first column of word i there, code i + 4 the second, so that a
//          shift and a mask give two numbers that one register holds. The scale of row g + 8 r, columns 32 b to
//          32 b + 31 is byte 4 g + 2 b + r.
// A range of row tiles is a range of rows; a range of weight tiles in each row tile is a range of columns.
#include "ingot/kernels/quant/quant.h"

namespace ingot {

constexpr int64_t kWeightTileRows = 16, kWeightTileCols = 64;

bool has_weight_tiles(WeightFormat f);          // bf16, fp8 and mxfp4
int64_t weight_tile_bytes(WeightFormat f);      // without fp8's scales
int64_t row_tile_count(int64_t rows);           // rows rounded up to row tiles
int64_t weight_tile_padded_cols(int64_t cols);  // columns rounded up to weight tiles
int64_t row_tile_bytes(WeightFormat f, int64_t cols);
// Views `memory` as a matrix (experts 0) or a bank of `experts` matrices.
WeightMatrix weight_tiles_at(void* memory, WeightFormat f, int64_t experts, int64_t rows, int64_t cols);

// A matrix from rows to weight tiles and back, in the same format. Every byte of `to` is written.
void pack_weight_tiles(const WeightMatrix& from, const WeightMatrix& to);
void unpack_weight_tiles(const WeightMatrix& from, const WeightMatrix& to);

// Converts mxfp4 codes in place from an archive's bit order to that of GPU memory (device_order.h), and back. For a
// matrix or a bank in host memory; all further formats stay unchanged.
void to_device_order(const WeightMatrix& weight_tiles);
void from_device_order(const WeightMatrix& weight_tiles);

namespace detail {
// The place of number (row, col) in a row tile: its byte, and for mxfp4 the half of the byte.
struct WeightTilePlace {
  int64_t byte;
  bool high;
};
WeightTilePlace weight_tile_place(WeightFormat f, int64_t row, int64_t col);
int64_t weight_tile_scale_place(WeightFormat f, int64_t row, int64_t col, int64_t cols);  // fp8 and mxfp4
// The order of a weight tile row's 64 numbers in the CPU's vector code.
int weight_tile_column(WeightFormat f, int position);
}  // namespace detail

}  // namespace ingot
