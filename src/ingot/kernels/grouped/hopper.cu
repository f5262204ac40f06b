// The choice of Hopper's kernels and their tensor maps.
#include "ingot/gpu/device.h"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/grouped/hopper.h"
#include "ingot/kernels/grouped/launch.h"
#include "ingot/kernels/quant/weight_tiles.h"

namespace ingot::grouped {

void launch_hopper(const GroupedLinear& a, const Product& product, Stream stream) {
  const int device = a.x.device.index;
  const bool gated = is_gated(a);
  const int64_t blocks = gpu::sm_count(device);
  const TileShape tile = pick_tile(a.x.rows(), a.groups, product.row_tiles, blocks, a.format, gated, a.parts);
  const int64_t span = span_of(a.format, tile.kernel);
  Params p{{}, product};
  p.tile_rows = uint32_t(tile.rows);
  p.x = gpu::tensor_map("grouped_linear: x", a.x,
                        {.rows = box_rows(tile.kernel), .cols = 64, .swizzle = tile::Swizzle::b128});
  p.weights = gpu::tensor_map(
      "grouped_linear: w",
      Tensor(const_cast<uint8_t*>(a.w), DType::f64, {a.groups * p.row_tiles, p.row_tile_bytes / 8}, a.x.device),
      {.rows = tile.row_tiles, .cols = int(span * weight_tile_bytes(a.format) / 8)});
  if (a.format == WeightFormat::bf16) return launch<WeightFormat::bf16>(p, tile, gated, blocks, device, stream);
  if (a.format == WeightFormat::fp8) return launch<WeightFormat::fp8>(p, tile, gated, blocks, device, stream);
  launch<WeightFormat::mxfp4>(p, tile, gated, blocks, device, stream);
}

}  // namespace ingot::grouped
