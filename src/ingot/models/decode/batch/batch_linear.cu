// A block multiplies its share of the row tiles over one part of K: three row tiles at a time, each by its own warp. A
// producer warp copies stages. A stage has three weight tiles of each of these row tiles, and the same columns of x.
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
#include "ingot/kernels/grouped/parts/finish.cuh"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/batch/batch_linear.h"

namespace ingot::decode {
namespace {

constexpr int kFewRows = 32, kMostRows = 64;  // of x
constexpr uint32_t kTeam = 3;                 // row tiles that a block multiplies at a time
constexpr uint32_t kSpan = 3;                 // weight tiles of a row tile in a stage
constexpr int64_t kMostShare = 16;            // row tiles of a block
// The limits for more than kFewRows rows. Larger products are left to grouped_linear(): a block would have several
// rounds of row tiles, or many weight tiles along K, and these cases have not been measured.
constexpr int64_t kMostShareOfManyRows = kTeam, kMostTilesOfManyRows = 64;
constexpr int kThreads = 32 * (int(kTeam) + 1);

struct Params : grouped::Product {
  CUtensorMap x;
  uint32_t T, blocks_of_part;  // blocks that share a part of K
};
template <WeightFormat F, int kRows> struct Memory {
  static constexpr uint32_t kWeightTile = weight_tiles::Form<F>::kBytes, kBand = kSpan * kWeightTile,
                            kPanel = kRows * 128, kStage = kTeam * kBand + kSpan * kPanel;
  // With few rows of x, the number of stages leaves enough shared memory for a block of the next kernel (attention or
  // the router), which can then start before this block ends.
  static constexpr uint32_t kStages = std::min((kRows <= kFewRows ? 150u : 200u) * 1024 / kStage, 12u);
  alignas(1024) char x[kStages][kSpan * kPanel];
  alignas(128) char w[kStages][kTeam * kBand];
  uint64_t full[kStages], empty[kStages];
  using Cursor = tile::RingCursor<kStages>;
};

// The row tiles that a block multiplies, and its part of K.
struct Share {
  uint32_t part, row_tile, count;      // `count` row tiles from `row_tile` on
  uint32_t stages;                     // stages for three row tiles
  uint32_t weight_tile, weight_tiles;  // of a row tile: the first one in the part of K, and their number
  __device__ __forceinline__ explicit Share(const Params& p) {
    part = blockIdx.x / p.blocks_of_part;
    const uint32_t i = blockIdx.x - part * p.blocks_of_part;
    row_tile = p.row_tiles * i / p.blocks_of_part;
    count = p.row_tiles * (i + 1) / p.blocks_of_part - row_tile;
    weight_tile = part * p.part_tiles;
    weight_tiles = min(p.part_tiles, p.weight_tiles - weight_tile);
    stages = (weight_tiles + kSpan - 1) / kSpan;
  }
  __device__ __forceinline__ uint32_t tiles_of(uint32_t stage) const {
    return min(kSpan, weight_tiles - stage * kSpan);
  }
};

// A position in the order of a block's stages: stage `stage` of the row tiles from `first` on, counted within the
// share.
struct Step {
  uint32_t first = 0, stage = 0;
  __device__ __forceinline__ bool exists(const Share& s) const { return first < s.count; }
  __device__ __forceinline__ void advance(const Share& s) {
    if (++stage == s.stages) stage = 0, first += kTeam;
  }
};
template <class M>
__device__ __forceinline__ void request_weights(const Params& p, const Share& s, const Step& step,
                                                const typename M::Cursor& at, M& m) {
  const uint32_t tiles = s.tiles_of(step.stage), bytes = tiles * M::kWeightTile,
                 team = min(kTeam, s.count - step.first);
  tile::wait_or_trap(&m.empty[at.stage], at.phase ^ 1);
  ptx::mbarrier_arrive_expect_tx(&m.full[at.stage], team * bytes + tiles * M::kPanel);
  const uint8_t* from =
      p.w + (s.row_tile + step.first) * p.row_tile_bytes + int64_t(s.weight_tile + step.stage * kSpan) * M::kWeightTile;
  for (uint32_t i = 0; i < team; ++i, from += p.row_tile_bytes)
    ptx::bulk_load(m.w[at.stage] + i * M::kBand, from, bytes, &m.full[at.stage]);
}
template <class M>
__device__ __forceinline__ void request_x(const Params& p, const Share& s, const Step& step,
                                          const typename M::Cursor& at, M& m) {
  for (uint32_t i = 0; i < s.tiles_of(step.stage); ++i)
    ptx::tensor_load(m.x[at.stage] + i * M::kPanel, &p.x, int((s.weight_tile + step.stage * kSpan + i) * 64), 0,
                     &m.full[at.stage]);
}
template <class M> __device__ void produce(const Params& p, const Share& s, M& m) {
  typename M::Cursor at, of_x;
  Step step, early;
  // No kernel writes the weights, so they are requested before the preceding kernel ends.
  for (uint32_t i = 0; i < M::kStages && step.exists(s); ++i, step.advance(s), at.advance())
    request_weights(p, s, step, at, m);
  ptx::wait_for_earlier_kernels();
  for (uint32_t i = 0; i < M::kStages && early.exists(s); ++i, early.advance(s), of_x.advance())
    request_x(p, s, early, of_x, m);
  for (; step.exists(s); step.advance(s), at.advance()) {
    request_weights(p, s, step, at, m);
    request_x(p, s, step, at, m);
  }
}

template <WeightFormat F, int kRows>
__device__ __forceinline__ void consume(const Params& p, const Share& s, Memory<F, kRows>& m) {
  using M = Memory<F, kRows>;
  constexpr uint32_t kBlocks = kRows / 8;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane % 8, chunk = lane / 8;
  const uint32_t w = ptx::shared_address(m.w[0]) + warp * M::kBand, x = ptx::shared_address(m.x[0]) + row * 128;
  typename M::Cursor at;
#pragma unroll 1
  for (uint32_t first = 0; first < s.count; first += kTeam) {
    const uint32_t row_tile = s.row_tile + first + warp;
    const bool exists = first + warp < s.count;
    const grouped::Tile t{s.part, row_tile, s.part * p.T, (s.part + 1) * p.T};
    const grouped::Ends ends = grouped::ends_of<F>(p, t, row_tile);
    float d[kBlocks][4] = {};
#pragma unroll 1
    for (uint32_t i = 0; i < s.stages; ++i, at.advance()) {
      tile::wait_warp_or_trap(&m.full[at.stage], at.phase);
      const uint32_t tiles = exists ? s.tiles_of(i) : 0;
      const uint32_t of_w = w + at.stage * (kTeam * M::kBand), of_x = x + at.stage * (kSpan * M::kPanel);
#pragma unroll
      for (uint32_t k = 0; k < kSpan; ++k) {
        if (k >= tiles) break;
        uint32_t a[4][4], b[kBlocks][2][4];
        grouped::Kept kept;
        grouped::decode<F, 4>(of_w + k * M::kWeightTile, 0, kept, a);
#pragma unroll
        for (uint32_t j = 0; j < kBlocks; ++j)
#pragma unroll
          for (uint32_t half = 0; half < 2; ++half)
            ptx::ldmatrix(b[j][half], of_x + k * M::kPanel + j * 1024 + ((4 * half + chunk) ^ row) * 16);
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
          for (uint32_t j = 0; j < kBlocks; ++j) {
            const uint32_t two[2] = {b[j][step / 2][step % 2 * 2], b[j][step / 2][step % 2 * 2 + 1]};
            ptx::mma_m16n8k16(bf16{}, d[j], a[step], two);
          }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&m.empty[at.stage]);
    }
    if (exists) grouped::finish<F, kRows, false>(p, t, row_tile, ends, reinterpret_cast<const float(&)[kRows / 2]>(d));
  }
}

template <WeightFormat F, int kRows>
__global__ void __launch_bounds__(kThreads, 1) batch_linear_kernel(const __grid_constant__ Params p) {
  auto& m = *tile::dynamic_shared<Memory<F, kRows>>();
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const Share s(p);
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : m.full) ptx::mbarrier_init(&barrier, 1);
    for (uint64_t& barrier : m.empty) ptx::mbarrier_init(&barrier, kTeam);
    ptx::fence_mbarrier_init();
  }
  ptx::let_next_kernel_start();
  __syncthreads();
  if (warp == kTeam) {
    if (ptx::elect_one()) produce(p, s, m);
    __syncwarp();
  } else {
    ptx::wait_for_earlier_kernels();  // an earlier kernel may still read what y holds
    consume<F, kRows>(p, s, m);
  }
}

int64_t blocks_of_part(const GroupedLinear& a) {
  return std::min(gpu::sm_count(a.x.device.index) / a.parts, row_tile_count(a.n));
}

template <WeightFormat F, int kRows> void launch(const GroupedLinear& a, Stream stream) {
  const int device = a.x.device.index;
  const int64_t weight_tiles = weight_tile_padded_cols(a.x.cols()) / kWeightTileCols;
  const Params p{
      {.w = a.w,
       .bias = a.bias,
       .offsets = nullptr,
       .claims = nullptr,
       .y = a.y.data,
       .y_stride = a.y.row_stride(),
       .row_tile_bytes = row_tile_bytes(a.format, a.x.cols()),
       .matrix_bytes = 0,
       .groups = 1,
       .row_tiles = uint32_t(row_tile_count(a.n)),
       .weight_tiles = uint32_t(weight_tiles),
       .n = uint32_t(a.n),
       .tile_rows = 0,
       .parts = uint32_t(a.parts),
       // K is divided as in grouped_linear().
       .part_tiles = uint32_t(a.parts > 1 ? ((weight_tiles + a.parts - 1) / a.parts + 2) / 3 * 3 : weight_tiles),
       .add = a.add,
       .limit = 0,
       .alpha = 0},
      gpu::tensor_map("batch_linear: x", a.x, {.rows = kRows, .cols = 64, .swizzle = tile::Swizzle::b128}),
      uint32_t(a.x.rows()),
      uint32_t(blocks_of_part(a))};
  gpu::launch("batch linear", batch_linear_kernel<F, kRows>,
              {.grid = a.parts * int64_t(p.blocks_of_part),
               .block = kThreads,
               .smem = int64_t(sizeof(Memory<F, kRows>)),
               .overlap = true,
               .device = device},
              stream, p);
}
template <WeightFormat F> void launch(const GroupedLinear& a, Stream stream) {
  if (a.x.rows() <= 16) return launch<F, 16>(a, stream);
  a.x.rows() <= kFewRows ? launch<F, kFewRows>(a, stream) : launch<F, kMostRows>(a, stream);
}

}  // namespace

bool takes_batch_linear(const GroupedLinear& a) {
  if (!has_weight_tiles(a.format) || a.groups != 1 || (a.add && a.parts > 1) || a.y.dtype != DType::f32 ||
      a.x.rows() > kMostRows || a.x.rows() == 0 || a.x.device.kind != Device::cuda ||
      !gpu::device_limits(a.x.device).hopper)
    return false;
  const int64_t blocks = blocks_of_part(a);
  if (a.x.rows() <= kFewRows) return blocks > 0 && row_tile_count(a.n) <= kMostShare * blocks;
  return blocks > 0 && row_tile_count(a.n) <= kMostShareOfManyRows * blocks &&
         a.x.cols() <= kMostTilesOfManyRows * kWeightTileCols * a.parts;
}

void batch_linear(const GroupedLinear& a, Stream stream) {
  INGOT_CHECK(takes_batch_linear(a), "batch_linear: found a product that it does not take");
  if (a.format == WeightFormat::bf16) return launch<WeightFormat::bf16>(a, stream);
  if (a.format == WeightFormat::fp8) return launch<WeightFormat::fp8>(a, stream);
  launch<WeightFormat::mxfp4>(a, stream);
}

}  // namespace ingot::decode
#endif
