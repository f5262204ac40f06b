#pragma once
// Rounds the inputs of the experts' products to e4m3 times a power of two per 32 numbers (kernels/quant/e4m3_blocks.h).
// The rounding is done by additional kernels between the phases, with a warp for each block of 32 numbers; the products
// still read bf16.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/quant/e4m3_blocks.h"
#include "ingot/kernels/quant/weight_tile_product.cuh"
#include "ingot/models/decode/phased/stages.h"

namespace ingot::decode {

constexpr uint32_t kRoundingThreads = 256;

// Rounds bf16 rows in place: plain rows, or activation vectors in the order of a product with `format`
// (weight_tiles::put).
struct RoundedRows {
  char* rows;
  int64_t row_bytes;
  uint32_t count, numbers;
  WeightFormat format = WeightFormat::bf16;
};
// Writes activation vectors of norm(x), already divided by the root mean square.
struct RoundedNorm {
  const float* x;
  int64_t x_stride;
  const float* weight;
  Normed to;
  uint32_t T, C;
  float eps;
};

// Rounds the number of this lane in the block of its warp.
__device__ __forceinline__ float round_in_warp(float v) {
  v = float(bf16(v));
  const uint32_t top = __reduce_max_sync(~0u, magnitude_of(v));
  return top < kE4m3NoNumber ? e4m3_in_block(v, e4m3_block_scale(top)) : NAN;
}
// Calls `call` with this lane's row and number, if its warp has a block. The last lanes of a block may lie beyond
// `numbers`.
template <class Call> __device__ __forceinline__ void on_block(uint32_t rows, uint32_t numbers, Call&& call) {
  const uint32_t blocks = (numbers + kE4m3Block - 1) / kE4m3Block;
  const uint32_t unit = blockIdx.x * (kRoundingThreads / 32) + threadIdx.x / 32;
  if (unit < rows * blocks) call(unit / blocks, unit % blocks * kE4m3Block + threadIdx.x % 32);
}

template <bool kVectors>
__global__ void __launch_bounds__(kRoundingThreads) round_rows_kernel(const __grid_constant__ RoundedRows p) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();  // before the wait: the next kernel may read what kernels before this one wrote
  on_block(p.count, p.numbers, [&](uint32_t row, uint32_t c) {
    const float input_scale = kVectors ? weight_tiles::input_scale_of(p.format) : 1;
    const uint32_t at = kVectors ? weight_tiles::place(p.format == WeightFormat::fp8, c) : c;
    uint16_t* const number = reinterpret_cast<uint16_t*>(p.rows + row * p.row_bytes) + at;
    const float v = c < p.numbers ? std::bit_cast<float>(uint32_t(__ldcg(number)) << 16) * (1 / input_scale) : 0;
    const float y = round_in_warp(v);
    if (c < p.numbers) *number = bf16(y * input_scale).bits;
  });
}
template <int kTokens>
__global__ void __launch_bounds__(kRoundingThreads) round_norm_kernel(const __grid_constant__ RoundedNorm p) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  on_block(p.T, p.C, [&](uint32_t t, uint32_t c) {
    float squares = 0;
    for (uint32_t s = 0; s < p.to.parts; ++s) squares += __ldcg(p.to.squares + s * kTokens + t);
    const float rstd = 1 / sqrtf(squares / float(p.C) + p.eps);
    const float y = round_in_warp(c < p.C ? __ldcg(p.x + t * p.x_stride + c) * p.weight[c] * rstd : 0);
    if (c < p.C) weight_tiles::put(p.to.vectors + t * weight_tiles::vector_bytes(p.C), p.to.format, c, y);
  });
}

inline gpu::Launch rounding_launch(uint32_t rows, uint32_t numbers, int device) {
  constexpr uint32_t kWarps = kRoundingThreads / 32;
  const int64_t units = int64_t(rows) * ((numbers + kE4m3Block - 1) / kE4m3Block);
  return {.grid = (units + kWarps - 1) / kWarps, .block = kRoundingThreads, .overlap = true, .device = device};
}

}  // namespace ingot::decode
