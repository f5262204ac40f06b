#pragma once
// The parameters of a product, the same for Hopper's kernels and the portable kernels.
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
  // If `parts` is above 1, the groups are the parts of the sums of a single product. Each part has `part_tiles` weight
  // tiles along K; the last part has the remaining ones.
  uint32_t parts, part_tiles;
  bool add;
  float limit, alpha;
};

}  // namespace ingot::grouped
