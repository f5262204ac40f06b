// Converts uploaded weight tiles from the order of archives to the order of the products, in place, at the speed of
// memory.
#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/kernels/quant/device_order.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/weights/builder.h"

namespace ingot::decode {
namespace {

constexpr int kThreads = 256, kBlocksPerSm = 8;

// The first 512 of every 544 bytes are codes. One thread handles the 16 bytes of a lane.
__global__ void __launch_bounds__(kThreads) order_codes(uint4* to, int64_t vectors) {
  constexpr int64_t kUnit = 34, kCodes = 32;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += int64_t(gridDim.x) * kThreads) {
    if (i % kUnit >= kCodes) continue;
    const uint4 w = to[i];
    to[i] = make_uint4(weight_tiles::to_device_order(w.x), weight_tiles::to_device_order(w.y),
                       weight_tiles::to_device_order(w.z), weight_tiles::to_device_order(w.w));
  }
}

}  // namespace

void order_for_device(const WeightMatrix& w, Stream stream) {
  const int64_t vectors = w.data.numel() / 16;
  if (w.format != WeightFormat::mxfp4 || vectors == 0) return;
  const int device = std::max(0, gpu::current_device());
  gpu::launch("order of weight tiles", order_codes,
              {.grid = std::min<int64_t>(kBlocksPerSm * gpu::sm_count(device), (vectors + kThreads - 1) / kThreads),
               .block = kThreads,
               .device = device},
              stream, static_cast<uint4*>(w.data.data), vectors);
}

}  // namespace ingot::decode
