#pragma once
// Hopper's form of the kernels: wgmma and tensor copies. One translation unit per format instantiates the kernels.
#include <cuda.h>

#include "ingot/kernels/grouped/grouped_kernel.h"
#include "ingot/kernels/grouped/schedule.h"

namespace ingot::grouped {

struct Maps {
  CUtensorMap x, weights;  // weights: (groups row tiles, bytes of a row tile) in elements of 8 bytes
};
struct Params : Maps, Product {};
// The number of weight tiles of a row tile in one stage. In fp8 the scales at the end of a row tile do not count as
// weight tiles.
constexpr int span_of(WeightFormat f, int rows) { return f == WeightFormat::mxfp4 && rows <= 80 ? 3 : 1; }
template <WeightFormat F>
void launch(const Params& p, const TileShape& tile, bool gated, int64_t blocks, int device, Stream stream);

}  // namespace ingot::grouped
