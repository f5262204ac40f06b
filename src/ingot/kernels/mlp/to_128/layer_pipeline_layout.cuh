#pragma once
// Shared by the layer pipeline's kernels and launchers: the operands, and the layout of the partial sums of dW.
#include <cuda.h>

#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/mlp/parts/backward_plan.h"
#include "ingot/kernels/mlp/parts/slopes.cuh"

namespace ingot::cuda::layer_pipeline {

using namespace mlp_parts;

using tile::Swizzle;

constexpr int kMaxCluster = 8;
constexpr int kRows = 64;  // of a warpgroup's product
constexpr int kPanel = kMlpPanel;
constexpr uint32_t kPanelBytes = kRows * kPanel * 2;

struct LayerShape : MlpSumLayer {
  int first_part = 0;  // of its partial sums
};

struct Maps {
  CUtensorMap dy, dx;
  CUtensorMap h[kMlpMaxLayers + 1];  // h[0] is x, h[l] the saved values of layer l - 1
  CUtensorMap w[kMlpMaxLayers];
};

// Floats of a part: dW of a layer, then bias_rows() partial sums of its db, each over an equal share of every unit's
// rows. dW has the order of the summing threads' registers: of rows r and r + 8, r % 16 < 8, columns c and c + 1, c
// even, four floats from part_float4() * 4.
constexpr int bias_rows(int panels) { return 4 / panels; }
constexpr int64_t part_floats(int panels) { return int64_t(64 * panels) * (64 * panels + bias_rows(panels)); }

constexpr int part_float4(int row, int column, int width) {
  return (row / 64 * (width / 8) + column / 8) * 128 + row / 16 % 4 * 32 + row % 8 * 4 + column % 8 / 2;
}

// db += the columns of 64 rows of dz, in shared memory. A warp of the warpgroup takes 64 / bias_rows() consecutive rows
// of a panel, a lane two columns.
template <class T, int kPanels, int kUnroll>
__device__ __forceinline__ void add_bias_gradient(float (&db)[2], uint32_t dz) {
  constexpr uint32_t kGroups = bias_rows(kPanels);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t panel = dz + warp % kPanels * kPanelBytes, group = warp / kPanels;
#pragma unroll kUnroll
  for (uint32_t row = 0; row < kRows / kGroups; ++row) {
    uint32_t v[1];
    float low, high;
    ptx::load_shared(v, panel + tile::swizzled<Swizzle::b128>(group * (kRows / kGroups) + row, lane * 4));
    ptx::unpack(T{}, v[0], low, high);
    db[0] += low;
    db[1] += high;
  }
}

}  // namespace ingot::cuda::layer_pipeline
