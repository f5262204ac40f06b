#pragma once
// The parameters of the kernels. One translation unit per format instantiates the kernels.
#include <cuda.h>

#include "ingot/kernels/grouped/grouped.h"
#include "ingot/kernels/grouped/schedule.h"

namespace ingot::grouped {

struct Params {
  CUtensorMap x, weights;  // weights: (groups row tiles, bytes of a row tile) in elements of 8 bytes
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
// Weight tiles of a row tile that one stage brings. Rows of fp8 end with scales, which are no weight tiles.
constexpr int span_of(WeightFormat f, int rows) { return f == WeightFormat::mxfp4 && rows <= 80 ? 3 : 1; }
template <WeightFormat F>
void launch(const Params& p, const TileShape& tile, bool gated, int64_t blocks, int device, Stream stream);

}  // namespace ingot::grouped
