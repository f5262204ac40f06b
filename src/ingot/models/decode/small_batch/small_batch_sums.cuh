#pragma once
// Adds the results of the experts of a small batch to the residual stream, and writes the activation vectors of the
// next product.
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/models/decode/phased/stages.cuh"

namespace ingot::decode::small_batch {

// Writes four numbers of an activation vector, beginning at column c.
__device__ __forceinline__ void put_normed(const Normed& to, uint32_t token, uint32_t C, uint32_t c,
                                           const float (&v)[4]) {
  uint32_t a, b;
  weight_tiles::words4(to.format, v, a, b);
  weight_tiles::put_words4(to.vectors + token * weight_tiles::vector_bytes(C), to.format, c, a, b);
}
constexpr uint32_t kSplitThreads = kSplitWeightTiles * 64 / 4, kSplitWarps = kSplitThreads / 32;
// Adds the results of a token's experts to x, in the order in which the experts were chosen, and writes the activation
// vectors of the next product. A block handles kSplitWeightTiles weight tiles of a token.
__device__ __forceinline__ void add_residual_and_norm(const ResidualNorm& p, uint32_t token, uint32_t part) {
  auto& squares = tile::shared<float[4]>();
  const uint32_t c = part * kSplitWeightTiles * 64 + 4 * threadIdx.x, warp = threadIdx.x / 32;
  float* const x = p.x + token * p.x_stride + c;
  float all[4] = {}, weight[4] = {};
  if (p.normed.vectors != nullptr && c < weight_tiles::padded(p.C)) weight_tiles::load4(p.weight, c, p.C, weight);
  if (!p.first_part) weight_tiles::load4(x - c, c, p.C, all);
  constexpr uint32_t kHeld = 4;
#pragma unroll 1
  for (uint32_t first = 0; first < p.k; first += kHeld) {
    float one[kHeld][4] = {};
#pragma unroll
    for (uint32_t s = 0; s < kHeld; ++s)
      if (first + s < p.k) weight_tiles::load4(p.sums + (token * p.k + first + s) * p.sums_stride, c, p.C, one[s]);
#pragma unroll
    for (uint32_t s = 0; s < kHeld; ++s)
#pragma unroll
      for (int u = 0; u < 4; ++u) all[u] += one[s][u];
  }
  float sum = 0;
#pragma unroll
  for (uint32_t u = 0; u < 4; ++u) {
    if (c + u < p.C && p.k > 0) x[u] = all[u];
    sum += all[u] * all[u];
    all[u] *= weight[u];
  }
  if (p.normed.vectors == nullptr) return;
  if (c < weight_tiles::padded(p.C)) put_normed(p.normed, token, p.C, c, all);
  sum = weight_tiles::lanes_sum(sum);
  if (threadIdx.x % 32 == 0) squares[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0)
    p.normed.squares[part * kMostTokens + token] = (squares[0] + squares[1]) + (squares[2] + squares[3]);
}

}  // namespace ingot::decode::small_batch
