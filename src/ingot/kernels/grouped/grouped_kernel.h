#pragma once
// A product as both forms of the kernels take it.
#include "ingot/kernels/grouped/grouped.h"

namespace ingot::grouped {

struct Product {
  const uint8_t* w;
  const float* bias;
  const int32_t* offsets;
  uint32_t* claims;
  void* y;
  int64_t y_stride, row_tile_bytes, matrix_bytes;
  uint32_t groups, row_tiles, weight_tiles, n, tile_rows;
  bool add;
  float limit, alpha;
};

}  // namespace ingot::grouped
