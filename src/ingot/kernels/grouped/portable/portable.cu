// The launch of the portable kernels.
#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/kernels/grouped/launch.h"
#include "ingot/kernels/grouped/portable/portable.h"
#include "ingot/kernels/grouped/schedule.h"

namespace ingot::grouped {

void launch_portable(const GroupedLinear& a, const Product& product, const gpu::Limits& limits, Stream stream) {
  using namespace cuda::grouped_portable;
  const int64_t stride = a.x.row_stride() * 2;
  INGOT_CHECK(reinterpret_cast<uintptr_t>(a.x.data) % 16 == 0 && stride % 16 == 0, "grouped_linear: x: found rows at ",
              a.x.data, " that begin every ", stride, " bytes, expected multiples of 16 bytes");
  const int width = pick_portable_width(a.format, a.x.rows(), a.groups, product.row_tiles, limits.sms);
  const bool gated = is_gated(a);
  const Kernel kernel = a.format == WeightFormat::bf16  ? kernel_of<WeightFormat::bf16>(width, gated)
                        : a.format == WeightFormat::fp8 ? kernel_of<WeightFormat::fp8>(width, gated)
                                                        : kernel_of<WeightFormat::mxfp4>(width, gated);
  Arguments p{product, {static_cast<const char*>(a.x.data), stride, uint32_t(a.x.cols())}};
  p.product.tile_rows = uint32_t(width);
  // Only the GPU knows the number of tiles, because the last tile of each group may be partly empty. This is an upper
  // bound.
  const int64_t most = (product.row_tiles + kBands - 1) / kBands * (a.x.rows() / width + a.groups);
  const int64_t resident = std::clamp<int64_t>(limits.smem_per_sm / (kernel.smem + 1024), 1, 2);
  gpu::launch("grouped_linear", kernel.kernel,
              {.grid = std::min(most, resident * limits.sms),
               .block = kThreads,
               .smem = kernel.smem,
               .device = a.x.device.index},
              stream, p);
}

}  // namespace ingot::grouped
