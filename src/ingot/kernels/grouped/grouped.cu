#include <limits>

#include "ingot/gpu/device.h"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/grouped/grouped_kernel.h"
#include "ingot/kernels/grouped/schedule.h"
#include "ingot/kernels/quant/weight_tiles.h"

namespace ingot {

void grouped_linear(const GroupedLinear& a, Stream stream) {
  using namespace grouped;
  const char* const op = "grouped_linear";
  const bool gated = a.y.dtype == DType::bf16;
  INGOT_CHECK(a.x.dtype == DType::bf16, op, ": found x of ", a.x.dtype, ", expected bf16");
  INGOT_CHECK(gated || a.y.dtype == DType::f32, op, ": found y of ", a.y.dtype, ", expected f32, or bf16 for a gate");
  INGOT_CHECK(has_weight_tiles(a.format), op, ": found weights of ", a.format, ", expected bf16, fp8 or mxfp4");
  INGOT_CHECK_EQ(a.y.rows(), a.x.rows(), op, ": rows of y");
  INGOT_CHECK_EQ(a.y.cols() * (gated ? 2 : 1), a.n, op, ": columns of y");
  INGOT_CHECK(!gated || !a.add, op, ": found add beside a gate, expected one of the two");
  INGOT_CHECK(0 <= a.groups && a.groups <= int64_t(kMostGroups), op, ": found ", a.groups, " groups, expected 0 to ",
              kMostGroups);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  INGOT_CHECK(a.x.rows() <= kMost && a.n <= kMost && a.x.cols() <= kMost, op, ": found ", a.x.rows(), " rows of ",
              a.x.cols(), " columns and ", a.n, " rows of weights, expected at most ", kMost, " of each");
  if (a.x.rows() == 0 || a.n == 0 || a.groups == 0) return;
  const int device = a.x.device.index;
  const int64_t blocks = gpu::sm_count(device);
  const TileShape tile = pick_tile(a.x.rows(), a.groups, row_tile_count(a.n), blocks, a.format, gated);
  const int64_t span = span_of(a.format, tile.kernel);
  Params p{.x = gpu::tensor_map("grouped_linear: x", a.x,
                                {.rows = box_rows(tile.kernel), .cols = 64, .swizzle = tile::Swizzle::b128}),
           .w = a.w,
           .bias = a.bias,
           .offsets = a.offsets,
           .claims = a.claims,
           .y = a.y.data,
           .y_stride = a.y.row_stride(),
           .groups = uint32_t(a.groups),
           .row_tiles = uint32_t(row_tile_count(a.n)),
           .weight_tiles = uint32_t(weight_tile_padded_cols(a.x.cols()) / kWeightTileCols),
           .n = uint32_t(a.n),
           .tile_rows = uint32_t(tile.rows),
           .add = a.add,
           .limit = a.limit,
           .alpha = a.alpha};
  p.row_tile_bytes = row_tile_bytes(a.format, a.x.cols());
  p.weights = gpu::tensor_map(
      "grouped_linear: w",
      Tensor(const_cast<uint8_t*>(a.w), DType::f64, {a.groups * p.row_tiles, p.row_tile_bytes / 8}, a.x.device),
      {.rows = tile.row_tiles, .cols = int(span * weight_tile_bytes(a.format) / 8)});
  p.matrix_bytes = p.row_tiles * p.row_tile_bytes;
  if (a.format == WeightFormat::bf16) return launch<WeightFormat::bf16>(p, tile, gated, blocks, device, stream);
  if (a.format == WeightFormat::fp8) return launch<WeightFormat::fp8>(p, tile, gated, blocks, device, stream);
  launch<WeightFormat::mxfp4>(p, tile, gated, blocks, device, stream);
}

}  // namespace ingot
