#pragma once
// The router of a prompt: the logits of all experts, and the choice of a token's experts.
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/moe/route.cuh"
#include "ingot/kernels/quant/weight_tile_product.cuh"
#include "ingot/models/decode/prompt/prompt_block.cuh"

namespace ingot::decode::prompts {

// logits = x w^T + bias, for few rows of bf16 weights. A block takes kRouted rows of weights and as many tokens, which
// gives more blocks than the tiles of a product would; its warps share K. The sums of the warps are added in their
// order. The last block of the tokens to finish makes their choice, where `arrived` is given.
constexpr uint32_t kRouted = 16;
constexpr int kRouteWarps = 16, kRouteThreads = 32 * kRouteWarps;
constexpr uint32_t kMostChosenHere = 256;  // experts
struct Choose {
  const float* logits;  // (T, E)
  uint32_t* chosen;
  float* weights;
  uint32_t T, E, k;
};
struct Route {
  const bf16* x;     // (T, stride), of which the first C of each row are used
  const uint8_t* w;  // row tiles of bf16 weight tiles
  const float* bias;
  float* logits;  // (T, E)
  int64_t stride, row_tile_bytes;
  uint32_t T, E, C, weight_tiles;
  uint32_t* arrived = nullptr;  // a counter for kRouted tokens each, zero between launches
  Choose choose = {};
};
struct RouteMemory {
  union {
    float parts[kRouteWarps][kRouted][kRouted + 1];
    float logits[kRouted][kMostChosenHere];
  };
  uint32_t last;
};
// This lane's words of up to kRouterTiles weight tiles of a row tile of the router, which are requested together: every
// kRouteWarps-th weight tile from `first` on. The words of weight tiles behind the last one are zeros.
constexpr uint32_t kRouterTiles = 3;
struct RouterWords {
  uint32_t a[kRouterTiles][4][4];
};
__device__ __forceinline__ void load_router(const Route& p, uint32_t first, uint32_t row_tile, RouterWords& words) {
  const uint4* const w = reinterpret_cast<const uint4*>(p.w + row_tile * p.row_tile_bytes) + threadIdx.x % 32;
#pragma unroll
  for (uint32_t i = 0; i < kRouterTiles; ++i)
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s) {
      const uint32_t at = first + i * kRouteWarps;
      uint4 four = {};
      if (at < p.weight_tiles) four = __ldg(w + at * (weight_tiles::Form<WeightFormat::bf16>::kBytes / 16) + s * 32);
      uint32_t(&a)[4] = words.a[i][s];
      a[0] = four.x, a[1] = four.y, a[2] = four.z, a[3] = four.w;
    }
}
__device__ __forceinline__ void choose_here(const Route& p, uint32_t first, RouteMemory& m) {
  const uint32_t tokens = min(kRouted, p.T - first), warp = threadIdx.x / 32;
  static_assert(kRouteWarps >= int(kRouted), "each token has a warp");
  for (uint32_t i = threadIdx.x; i < tokens * p.E; i += kRouteThreads)
    m.logits[i / p.E][i % p.E] = __ldcg(p.logits + int64_t(first) * p.E + i);
  __syncthreads();
  const uint32_t k = p.choose.k, t = first + warp;
  if (warp < tokens) routing::choose(m.logits[warp], p.E, k, p.choose.chosen + t * k, p.choose.weights + t * k);
}
// This lane's words of the columns of x that belong to the weight tiles of load_router(), for two blocks of 8 tokens.
__device__ __forceinline__ void load_columns(const Route& p, const uint32_t* const (&x)[2], const bool (&here)[2],
                                             uint32_t begin, uint32_t (&b)[kRouterTiles][4][2][2]) {
  const uint32_t column = threadIdx.x % 4 * 2;
#pragma unroll
  for (uint32_t i = 0; i < kRouterTiles; ++i)
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s)
#pragma unroll
      for (uint32_t block = 0; block < 2; ++block)
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
          const uint32_t c = (begin + i * kRouteWarps) * 64 + 16 * s + 8 * half + column;
          uint32_t two = 0;
          if (here[block] && c < p.C) two = x[block][c / 2];
          b[i][s][block][half] = c + 1 < p.C ? two : two & 0xffffu;
        }
}
// Adds the warps' sums and the bias.
__device__ __forceinline__ void write_logits(const Route& p, const RouteMemory& m, uint32_t row_tile, uint32_t first) {
  if (threadIdx.x >= kRouted * kRouted) return;
  const uint32_t row = threadIdx.x % kRouted, token = threadIdx.x / kRouted, e = row_tile * kRouted + row,
                 t = first + token;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kRouteWarps; ++w) sum += m.parts[w][row][token];
  if (t < p.T && e < p.E) p.logits[int64_t(t) * p.E + e] = sum + p.bias[e];
}
__global__ void __launch_bounds__(kRouteThreads) route_kernel(Route p) {
  auto& m = tile::shared<RouteMemory>();
  const uint32_t row_tiles = (p.E + kRouted - 1) / kRouted, row_tile = blockIdx.x % row_tiles;
  const uint32_t group = blockIdx.x / row_tiles, first = group * kRouted;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, column = lane % 4 * 2;
  // The words of kRouterTiles weight tiles, and of the same columns of x, are requested together.
  RouterWords words;
  uint32_t b[kRouterTiles][4][2][2];
  load_router(p, warp, row_tile, words);  // no kernel writes the weights
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t* x[2];
  bool here[2];
#pragma unroll
  for (uint32_t block = 0; block < 2; ++block) {
    const uint32_t t = first + 8 * block + g;
    x[block] = reinterpret_cast<const uint32_t*>(p.x + t * p.stride), here[block] = t < p.T;
  }
  float sums[2][4] = {};
  for (uint32_t begin = warp; begin < p.weight_tiles; begin += kRouterTiles * kRouteWarps) {
    if (begin != warp) load_router(p, begin, row_tile, words);
    load_columns(p, x, here, begin, b);
#pragma unroll
    for (uint32_t i = 0; i < kRouterTiles; ++i)
#pragma unroll
      for (uint32_t s = 0; s < 4; ++s)
#pragma unroll
        for (uint32_t block = 0; block < 2; ++block)
          ptx::mma_m16n8k16(bf16{}, sums[block], words.a[i][s], b[i][s][block]);
  }
#pragma unroll
  for (uint32_t block = 0; block < 2; ++block)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) m.parts[warp][g + i / 2 * 8][8 * block + column + i % 2] = sums[block][i];
  __syncthreads();
  write_logits(p, m, row_tile, first);
  if (p.arrived == nullptr) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    m.last = ptx::fetch_add_acq_rel(p.arrived + group, 1) == row_tiles - 1;
    if (m.last) ptx::store_relaxed(p.arrived + group, 0);
  }
  __syncthreads();
  if (m.last) choose_here(p, first, m);
}

// A warp for each token.
__global__ void __launch_bounds__(kThreads) choose_kernel(Choose p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t t = blockIdx.x * kWarps + threadIdx.x / 32;
  if (t < p.T) routing::choose(p.logits + int64_t(t) * p.E, p.E, p.k, p.chosen + t * p.k, p.weights + t * p.k);
}

}  // namespace ingot::decode::prompts
