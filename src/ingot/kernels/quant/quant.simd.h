#pragma once
// The arguments of the functions in quant.simd.cpp (compiled once for every CPU level).
#include <cstdint>

namespace ingot::detail {

constexpr int kStoredRows = 8;  // rows of x in a pass over the weights

// y[t * y_row + n] = sum_k x[t * x_row + k] w[n, k] + bias[n] for n in [0, rows): t < tokens <= kStoredRows.
// bf16: data holds k numbers a row. fp8: bytes, and a scale per row. mxfp4: k / 2 bytes and k / 32 scales a row, and x
// with the 16 even numbers of every 32 before the 16 odd ones.
struct StoredDots {
  const void* data;
  const void* scales;
  const float* exponents;  // the value of each of the 256 mxfp4 scales
  const float* x;
  const float* bias;
  float* y;
  int64_t k, x_row, y_row, rows;
  int tokens;
};

// out[n * out_row + k] = w[n, k] for n in [0, rows); mxfp4 in the order of the row.
struct StoredWiden {
  const void* data;
  const void* scales;
  const float* exponents;
  float* out;
  int64_t k, out_row, rows;
};

// A row of k finite numbers as mxfp4: of the two candidate scales near the largest number, the scale with the smaller
// error.
struct NarrowMxfp4 {
  const float* x;
  uint8_t* bytes;
  uint8_t* scales;
  int64_t k;
};

// StoredDots for whole row tiles: x has the columns of each weight tile in the order of weight_tile_column(), with
// zeros where the matrix has no column.
struct WeightTileDots {
  const void* row_tiles;
  const float* exponents;
  const float* x;
  const float* bias;  // null: none
  float* y;
  int64_t weight_tiles, row_tile_bytes, x_row, y_row, rows;  // rows: at most 16 a row tile; the last may have fewer
  int tokens;
};
// out[n * out_row + 64 q + i]: number i, in the order of weight_tile_column(), of weight tile q; all 16 rows of every
// row tile.
struct WeightTileWiden {
  const void* row_tiles;
  const float* exponents;
  float* out;
  int64_t weight_tiles, row_tile_bytes, out_row, count;  // count: row tiles
};

}  // namespace ingot::detail
