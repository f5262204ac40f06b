#pragma once
// What the experts' products take, in e4m3 times a power of two per 32 numbers (kernels/quant/e4m3_blocks.h): kernels
// of their own between the usual ones, a warp a block of 32. The products then read what they always do, bf16.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/quant/e4m3_blocks.h"
#include "ingot/kernels/quant/weight_tile_product.cuh"
#include "ingot/models/decode/phased/stages.h"

namespace ingot::decode {

constexpr uint32_t kRoundingThreads = 256;

// Rows of bf16 in place: as they are, or columns in the order of a product with `format` (weight tiles::put).
struct RoundedRows {
  char* rows;
  int64_t row_bytes;
  uint32_t count, numbers;
  WeightFormat format = WeightFormat::bf16;
};
// Columns of norm(x), of which the product need not divide by the root mean square in the end.
struct RoundedNorm {
  const float* x;
  int64_t x_stride;
  const float* weight;
  Normed to;
  uint32_t T, C;
  float eps;
};

// This lane's number of its warp's block.
__device__ __forceinline__ float round_in_warp(float v) {
  v = float(bf16(v));
  const uint32_t top = __reduce_max_sync(~0u, magnitude_of(v));
  return top < kE4m3NoNumber ? e4m3_in_block(v, e4m3_block_scale(top)) : NAN;
}
// Calls with this lane's row and number, where its warp has a block; not all numbers are below `numbers`.
template <class Call> __device__ __forceinline__ void on_block(uint32_t rows, uint32_t numbers, Call&& call) {
  const uint32_t blocks = (numbers + kE4m3Block - 1) / kE4m3Block;
  const uint32_t unit = blockIdx.x * (kRoundingThreads / 32) + threadIdx.x / 32;
  if (unit < rows * blocks) call(unit / blocks, unit % blocks * kE4m3Block + threadIdx.x % 32);
}

template <bool kColumns>
__global__ void __launch_bounds__(kRoundingThreads) round_rows_kernel(const __grid_constant__ RoundedRows p) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();  // what comes next may read what this one's forerunners wrote before it waits
  on_block(p.count, p.numbers, [&](uint32_t row, uint32_t c) {
    const float lift = kColumns ? weight_tiles::lift_of(p.format) : 1;
    const uint32_t at = kColumns ? weight_tiles::place(p.format == WeightFormat::fp8, c) : c;
    uint16_t* const number = reinterpret_cast<uint16_t*>(p.rows + row * p.row_bytes) + at;
    const float v = c < p.numbers ? std::bit_cast<float>(uint32_t(__ldcg(number)) << 16) * (1 / lift) : 0;
    const float y = round_in_warp(v);
    if (c < p.numbers) *number = bf16(y * lift).bits;
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
    if (c < p.C) weight_tiles::put(p.to.columns + t * weight_tiles::column_bytes(p.C), p.to.format, c, y);
  });
}

inline gpu::Launch rounding_launch(uint32_t rows, uint32_t numbers, int device) {
  constexpr uint32_t kWarps = kRoundingThreads / 32;
  const int64_t units = int64_t(rows) * ((numbers + kE4m3Block - 1) / kE4m3Block);
  return {.grid = (units + kWarps - 1) / kWarps, .block = kRoundingThreads, .overlap = true, .device = device};
}

}  // namespace ingot::decode
