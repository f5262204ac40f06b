#pragma once
// Shared code of the kernels up to 512 wide.
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/kernels/mlp/parts/row_tile.cuh"
#include "ingot/kernels/mlp/to_512/forward.h"

namespace ingot::cuda::to_512_panels {

using namespace mlp_parts;

constexpr uint32_t kPanels = kMlpTo512 / kMlpPanel, kPanelBytes = kTileRows * 128;  // of a tile's rows

struct Maps {
  CUtensorMap x, w[kMlpMaxLayers], saved[kMlpMaxLayers];
};
inline Maps maps_of(const Mlp& m, const Params& p, const gpu::TmaBox& weights) {
  const gpu::TmaBox rows{.rows = int(kTileRows), .cols = kMlpPanel, .swizzle = tile::Swizzle::b128};
  Maps maps{};
  maps.x = gpu::tensor_map("mlp: x", mlp_matrix(m.x), rows);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const MlpLayer& layer = m.layers[l];
    maps.w[l] = gpu::tensor_map("mlp: w", layer.w, weights);
    if (p.layer[l].saved != nullptr && !p.saved_f32)
      maps.saved[l] = gpu::tensor_map("mlp: saved",
                                      Tensor(p.layer[l].saved, m.x.dtype, {p.rows, layer.w.rows()}, m.x.device), rows);
  }
  return maps;
}

// Whether layer l's values are stored from shared memory, as the next layer's input.
template <class F> __device__ __forceinline__ bool stores_panels(const Params& p, int l) {
  return has_slope_from_value<F> && p.saves && !p.saved_f32 && l + 1 < p.layers;
}

// Four words a lane of a row's 32 columns, two adjacent columns each, 8 columns apart, become 8 adjacent columns.
__device__ __forceinline__ void gather_columns(uint32_t (&w)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? w[j] : w[j | bit], bit);
      if (upper)
        w[j] = got;
      else
        w[j | bit] = got;
    }
  }
}
// Columns 32 i to 32 i + 31 from the layout of A straight to memory, 16 bytes a lane.
template <int kWidth>
__device__ __forceinline__ void store_columns(const Rows<kWidth>& a, int i, Target to, int64_t first, int64_t rows) {
  const uint32_t column = 32 * i + threadIdx.x % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = a[2 * i + j / 2][2 * (j % 2) + half];
    gather_columns(w);
    const int64_t row = first + lane() / 4 + 8 * half;
    if (row < rows && column < to.cols) ptx::store_streaming(to.rows + row * to.stride_bytes + column * 2, w);
  }
}
// A matrix of n columns from column `first` on.
__device__ __forceinline__ Target columns_from(uint32_t first, void* rows, int64_t stride_bytes, uint32_t n,
                                               uint32_t element) {
  return {static_cast<char*>(rows) + first * element, stride_bytes, n - first};
}

}  // namespace ingot::cuda::to_512_panels
