#pragma once
// The portable kernels (sm_80 and later). A block takes a tile of rows through all layers. Its activations stay in
// shared memory, in two buffers used in turn, while tiles of the weights stream from L2, each fetched one tile ahead.
// 16-bit types multiply on the tensor cores, f32 by fused multiply-adds in the order of k, in sums of 32 products each.
#include <type_traits>

#include "ingot/gpu/launch.h"
#include "ingot/kernels/mlp/portable/chain.cuh"
#include "ingot/kernels/mlp/portable/forward.cuh"
#include "ingot/kernels/mlp/portable/portable.h"
#include "ingot/kernels/mlp/portable/weight_gradients.cuh"

namespace ingot::cuda {

// Calls use(rows, reduction), both std::integral_constant, for the tile of the configuration, from height number kFirst
// on.
template <class T, int kFirst, class Use> void with_tile(const PortableConfig& c, Use&& use) {
  constexpr int kSize = int(sizeof(T)), kHigh = portable_height(kSize, 0), kMiddle = portable_height(kSize, 1),
                kLow = portable_height(kSize, 2);
  using Low = std::integral_constant<int, kLow>;
  using Wide = std::integral_constant<int, portable_reduction(kSize)>;
  if constexpr (portable_has_narrow(kSize)) {
    if (c.reduction == kPortableNarrow) return use(Low{}, std::integral_constant<int, kPortableNarrow>{});
  }
  if constexpr (kFirst == 0) {
    if (c.rows == kHigh) return use(std::integral_constant<int, kHigh>{}, Wide{});
  }
  c.rows == kMiddle ? use(std::integral_constant<int, kMiddle>{}, Wide{}) : use(Low{}, Wide{});
}
template <class T>
void launch_portable_forward(const PortableRows& p, const PortableConfig& c, int device, Stream stream) {
  with_tile<T, 0>(c, [&](auto rows, auto reduction) {
    gpu::launch("mlp", mlp_portable_forward<T, rows(), reduction()>,
                {.grid = c.grid, .block = kPortableThreads, .smem = c.smem, .device = device}, stream, p);
  });
}
template <class T>
void launch_portable_chain(const PortableRows& p, const PortableConfig& c, int device, Stream stream) {
  with_tile<T, portable_backward_height(int(sizeof(T)))>(c, [&](auto rows, auto reduction) {
    gpu::launch("mlp_backward", mlp_portable_chain<T, rows(), reduction()>,
                {.grid = c.grid, .block = kPortableThreads, .smem = c.smem, .device = device}, stream, p);
  });
}
template <class T> void launch_portable_grad(const PortableGrad& p, int device, Stream stream) {
  gpu::launch(
      "mlp_backward", mlp_portable_grad<T>,
      {.grid = int64_t(p.tiles) * p.splits, .block = kPortableThreads, .smem = sizeof(GradMemory<T>), .device = device},
      stream, p);
}

}  // namespace ingot::cuda
