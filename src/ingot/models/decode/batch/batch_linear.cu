// A block multiplies up to three row tiles of the weights, a warp for each, over one part of K. A producer warp brings
// stages of three weight tiles of each row tile and the same columns of x.
#ifndef INGOT_EMULATE  // the emulator has no tensor copies
#include <algorithm>

#include "ingot/gpu/device.h"
#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/thread.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/ring.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/grouped/parts/decode.cuh"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/batch/batch_linear.h"

namespace ingot::decode {
namespace {

constexpr int kRows = 16;      // of x
constexpr uint32_t kMost = 3;  // row tiles of a block
constexpr int kThreads = 32 * (int(kMost) + 1);

struct Params {
  CUtensorMap x;
  const uint8_t* w;
  const float* bias;  // added to part 0
  float* y;           // (parts T, N)
  int64_t y_stride, row_tile_bytes;
  uint32_t T, n, row_tiles, weight_tiles;
  uint32_t part_tiles, blocks_of_part;  // weight tiles of a part of K; blocks that share a part
};
struct Memory {
  static constexpr uint32_t kSpan = 3;  // weight tiles of a row tile in a stage
  static constexpr uint32_t kWeightTile = weight_tiles::Form<WeightFormat::bf16>::kBytes, kBand = kSpan * kWeightTile,
                            kPanel = kRows * 128;
  // Few enough that a block of the next kernel, attention or router, finds room beside this one and starts early.
  static constexpr uint32_t kStages = 7;
  alignas(1024) char x[kStages][kSpan * kPanel];
  alignas(128) char w[kStages][kMost * kBand];
  uint64_t full[kStages], empty[kStages];
};
using Cursor = tile::RingCursor<Memory::kStages>;

// What a block multiplies.
struct Share {
  uint32_t part, row_tile, count;      // row tiles from `row_tile` on
  uint32_t weight_tile, weight_tiles;  // of the part of K
  __device__ __forceinline__ explicit Share(const Params& p) {
    part = blockIdx.x / p.blocks_of_part;
    const uint32_t i = blockIdx.x - part * p.blocks_of_part;
    row_tile = p.row_tiles * i / p.blocks_of_part;
    count = p.row_tiles * (i + 1) / p.blocks_of_part - row_tile;
    weight_tile = part * p.part_tiles;
    weight_tiles = min(p.part_tiles, p.weight_tiles - weight_tile);
  }
  __device__ __forceinline__ uint32_t stages() const { return (weight_tiles + Memory::kSpan - 1) / Memory::kSpan; }
  __device__ __forceinline__ uint32_t tiles_of(uint32_t stage) const {
    return min(Memory::kSpan, weight_tiles - stage * Memory::kSpan);
  }
};

__device__ __forceinline__ void request_weights(const Params& p, const Share& s, uint32_t stage, const Cursor& at,
                                                Memory& m) {
  const uint32_t tiles = s.tiles_of(stage), bytes = tiles * Memory::kWeightTile;
  tile::wait_or_trap(&m.empty[at.stage], at.phase ^ 1);
  ptx::mbarrier_arrive_expect_tx(&m.full[at.stage], s.count * bytes + tiles * Memory::kPanel);
  const uint8_t* from =
      p.w + s.row_tile * p.row_tile_bytes + int64_t(s.weight_tile + stage * Memory::kSpan) * Memory::kWeightTile;
  for (uint32_t i = 0; i < s.count; ++i, from += p.row_tile_bytes)
    ptx::bulk_load(m.w[at.stage] + i * Memory::kBand, from, bytes, &m.full[at.stage]);
}
__device__ __forceinline__ void request_x(const Params& p, const Share& s, uint32_t stage, const Cursor& at,
                                          Memory& m) {
  for (uint32_t i = 0; i < s.tiles_of(stage); ++i)
    ptx::tensor_load(m.x[at.stage] + i * Memory::kPanel, &p.x, int((s.weight_tile + stage * Memory::kSpan + i) * 64), 0,
                     &m.full[at.stage]);
}
__device__ void produce(const Params& p, const Share& s, Memory& m) {
  const uint32_t stages = s.stages(), early = min(stages, Memory::kStages);
  Cursor at;
  for (uint32_t i = 0; i < early; ++i, at.advance()) request_weights(p, s, i, at, m);  // no kernel writes them
  ptx::wait_for_earlier_kernels();
  Cursor of_x;
  for (uint32_t i = 0; i < early; ++i, of_x.advance()) request_x(p, s, i, of_x, m);
  for (uint32_t i = early; i < stages; ++i, at.advance()) request_weights(p, s, i, at, m), request_x(p, s, i, at, m);
}

__device__ __forceinline__ void consume(const Params& p, const Share& s, Memory& m) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane % 8, chunk = lane / 8, g = lane / 4;
  const uint32_t row_tile = s.row_tile + warp;
  float bias[2] = {};
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half)
    if (const uint32_t n = 16 * row_tile + 8 * half + g; p.bias != nullptr && s.part == 0 && n < p.n)
      bias[half] = __ldg(p.bias + n);
  const uint32_t w = ptx::shared_address(m.w[0]) + warp * Memory::kBand, x = ptx::shared_address(m.x[0]) + row * 128;
  float d[2][4] = {};
  Cursor at;
  const uint32_t stages = s.stages();
#pragma unroll 1
  for (uint32_t i = 0; i < stages; ++i, at.advance()) {
    tile::wait_warp_or_trap(&m.full[at.stage], at.phase);
    const uint32_t tiles = s.tiles_of(i);
    const uint32_t of_w = w + at.stage * (kMost * Memory::kBand),
                   of_x = x + at.stage * (Memory::kSpan * Memory::kPanel);
#pragma unroll
    for (uint32_t k = 0; k < Memory::kSpan; ++k) {
      if (k >= tiles) break;
      uint32_t a[4][4], b[2][2][4];
      grouped::Kept kept;
      grouped::decode<WeightFormat::bf16, 4>(of_w + k * Memory::kWeightTile, 0, kept, a);
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half)
          ptx::ldmatrix(b[j][half], of_x + k * Memory::kPanel + j * 1024 + ((4 * half + chunk) ^ row) * 16);
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
          const uint32_t two[2] = {b[j][step / 2][step % 2 * 2], b[j][step / 2][step % 2 * 2 + 1]};
          ptx::mma_m16n8k16(bf16{}, d[j], a[step], two);
        }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&m.empty[at.stage]);
  }
#pragma unroll
  for (uint32_t j = 0; j < 2; ++j)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t t = 8 * j + lane % 4 * 2 + i % 2, n = 16 * row_tile + i / 2 * 8 + g;
      if (t < p.T && n < p.n) p.y[int64_t(s.part * p.T + t) * p.y_stride + n] = d[j][i] + bias[i / 2];
    }
}

__global__ void __launch_bounds__(kThreads, 1) batch_linear_kernel(const __grid_constant__ Params p) {
  auto& m = *tile::dynamic_shared<Memory>();
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const Share s(p);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < Memory::kStages; ++i)
      ptx::mbarrier_init(&m.full[i], 1), ptx::mbarrier_init(&m.empty[i], s.count);
    ptx::fence_mbarrier_init();
  }
  ptx::let_next_kernel_start();
  __syncthreads();
  if (warp == kMost) {
    if (ptx::elect_one()) produce(p, s, m);
    __syncwarp();
  } else {
    ptx::wait_for_earlier_kernels();  // an earlier kernel may still read what y holds
    if (warp < s.count) consume(p, s, m);
  }
}

int64_t blocks_of_part(const GroupedLinear& a) {
  return std::min(gpu::sm_count(a.x.device.index) / a.parts, row_tile_count(a.n));
}

}  // namespace

bool takes_batch_linear(const GroupedLinear& a) {
  if (a.format != WeightFormat::bf16 || a.groups != 1 || a.add || a.y.dtype != DType::f32 || a.x.rows() > kRows ||
      a.x.rows() == 0 || a.x.device.kind != Device::cuda || !gpu::device_limits(a.x.device).hopper)
    return false;
  const int64_t blocks = blocks_of_part(a);
  return blocks > 0 && row_tile_count(a.n) <= int64_t(kMost) * blocks;
}

void batch_linear(const GroupedLinear& a, Stream stream) {
  INGOT_CHECK(takes_batch_linear(a), "batch_linear: found a product that it does not take");
  const int device = a.x.device.index;
  const int64_t weight_tiles = weight_tile_padded_cols(a.x.cols()) / kWeightTileCols;
  Params p{.x = gpu::tensor_map("batch_linear: x", a.x, {.rows = kRows, .cols = 64, .swizzle = tile::Swizzle::b128}),
           .w = a.w,
           .bias = a.bias,
           .y = a.y.ptr<float>(),
           .y_stride = a.y.row_stride(),
           .row_tile_bytes = row_tile_bytes(a.format, a.x.cols()),
           .T = uint32_t(a.x.rows()),
           .n = uint32_t(a.n),
           .row_tiles = uint32_t(row_tile_count(a.n)),
           .weight_tiles = uint32_t(weight_tiles),
           // As grouped_linear() divides K.
           .part_tiles = uint32_t(a.parts > 1 ? ((weight_tiles + a.parts - 1) / a.parts + 2) / 3 * 3 : weight_tiles),
           .blocks_of_part = uint32_t(blocks_of_part(a))};
  gpu::launch("batch linear", batch_linear_kernel,
              {.grid = a.parts * int64_t(p.blocks_of_part),
               .block = kThreads,
               .smem = int64_t(sizeof(Memory)),
               .overlap = true,
               .device = device},
              stream, p);
}

}  // namespace ingot::decode
#endif
