// The requirements on the operands, and the choice of a form.
#include <limits>

#include "ingot/gpu/device.h"
#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/gemm/variant.h"
#include "ingot/gpu/generation.h"
#include "ingot/kernels/grouped/launch.h"
#include "ingot/kernels/grouped/schedule.h"
#include "ingot/kernels/quant/weight_tiles.h"

namespace ingot {

bool grouped_takes_parts(Device device) {
#ifdef INGOT_EMULATE
  (void)device;
  return false;
#else
  return device.kind == Device::cuda && gemm::variant_on(device.index) == gemm::Variant::hopper;
#endif
}

void grouped_linear(const GroupedLinear& a, Stream stream) {
  grouped::launch(a, gpu::device_limits(a.x.device), stream);
}

void grouped::launch(const GroupedLinear& a, const gpu::Limits& limits, Stream stream) {
  const char* const op = "grouped_linear";
  const bool gated = is_gated(a);
  INGOT_CHECK(a.x.dtype == DType::bf16, op, ": found x of ", a.x.dtype, ", expected bf16");
  INGOT_CHECK(gated || a.y.dtype == DType::f32, op, ": found y of ", a.y.dtype, ", expected f32, or bf16 for a gate");
  INGOT_CHECK(has_weight_tiles(a.format), op, ": found weights of ", a.format, ", expected bf16, fp8 or mxfp4");
  INGOT_CHECK(a.parts == 1 || (2 <= a.parts && a.groups == 1 && !gated && !a.add && grouped_takes_parts(a.x.device)),
              op, ": found ", a.parts, " parts, expected 1, or more of one group into y on a Hopper GPU");
  INGOT_CHECK_EQ(a.y.rows(), a.x.rows() * a.parts, op, ": rows of y");
  INGOT_CHECK_EQ(a.y.cols() * (gated ? 2 : 1), a.n, op, ": columns of y");
  INGOT_CHECK(!gated || !a.add, op, ": found add beside a gate, expected one of the two");
  INGOT_CHECK(0 <= a.groups && a.groups <= int64_t(kMostGroups), op, ": found ", a.groups, " groups, expected 0 to ",
              kMostGroups);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  INGOT_CHECK(a.x.rows() <= kMost && a.n <= kMost && a.x.cols() <= kMost, op, ": found ", a.x.rows(), " rows of ",
              a.x.cols(), " columns and ", a.n, " rows of weights, expected at most ", kMost, " of each");
  if (a.x.rows() == 0 || a.n == 0 || a.groups == 0) return;
  const int64_t weight_tiles = weight_tile_padded_cols(a.x.cols()) / kWeightTileCols;
  // A part consists of whole stages of every kernel (hopper.h), so that its sums do not depend on the kernel.
  const int64_t part_tiles = a.parts > 1 ? ((weight_tiles + a.parts - 1) / a.parts + 2) / 3 * 3 : weight_tiles;
  INGOT_CHECK((a.parts - 1) * part_tiles < weight_tiles, op, ": found ", a.parts, " parts of ", a.x.cols(),
              " columns, expected fewer");
  const Product p{.w = a.w,
                  .bias = a.bias,
                  .offsets = a.offsets,
                  .claims = a.claims,
                  .y = a.y.data,
                  .y_stride = a.y.row_stride(),
                  .row_tile_bytes = row_tile_bytes(a.format, a.x.cols()),
                  .matrix_bytes = a.parts > 1 ? 0 : row_tile_count(a.n) * row_tile_bytes(a.format, a.x.cols()),
                  .groups = uint32_t(a.groups * a.parts),
                  .row_tiles = uint32_t(row_tile_count(a.n)),
                  .weight_tiles = uint32_t(weight_tiles),
                  .n = uint32_t(a.n),
                  .tile_rows = 0,
                  .parts = uint32_t(a.parts),
                  .part_tiles = uint32_t(part_tiles),
                  .add = a.add,
                  .limit = a.limit,
                  .alpha = a.alpha};
  gpu::check_generation(op, limits);
#ifndef INGOT_EMULATE
  if (gemm::variant_on(a.x.device.index) == gemm::Variant::hopper) return launch_hopper(a, p, stream);
#endif
  launch_portable(a, p, limits, stream);
}

}  // namespace ingot
