#pragma once
// Shared code of the kernels between the products of a prompt.
#include <cstdint>

#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/quant/weight_tile_product.cuh"

namespace ingot::decode::prompts {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr uint32_t kMostChoices = 64;  // experts of a token

// The sum of all threads' numbers, in all threads, added in a fixed order.
__device__ __forceinline__ float block_sum(float v) {
  auto& of_warp = tile::shared<float[kWarps]>();
  v = weight_tiles::lanes_sum(v);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += of_warp[w];
  return sum;
}

}  // namespace ingot::decode::prompts
