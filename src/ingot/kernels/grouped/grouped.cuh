#pragma once
// The kernel is persistent: a block computes tiles until the whole product is done. A producer warp loads one stage at
// a time: 64 columns of 256 rows of weights as weight tiles (bulk copies) and the same columns of the tile's rows of x
// (a tensor copy). Warpgroups decode weight tiles into wgmma's A operand in registers, in the order in which weight
// tiles are stored, and multiply: the rows of weights are the product's rows, the rows of x its columns.
#include "ingot/gpu/gemm/pipeline.cuh"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/thread.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/grouped/hopper.h"
#include "ingot/kernels/grouped/parts/decode.cuh"
#include "ingot/kernels/grouped/parts/finish.cuh"
#include "ingot/kernels/grouped/schedule.h"

namespace ingot::grouped {

// How the rows of weights of a tile are divided: the number of warpgroups, and the blocks of 64 rows of each. With few
// rows of x, four warpgroups take one block each. A warp cannot decode while it issues products with register operands,
// and its instructions depend on each other, so with only two warps per scheduler the schedulers would often be idle.
// Products of more rows of x need more registers for their sums than four warpgroups can have.
template <WeightFormat F, int kRows, int kTileBands> struct Team {
  static constexpr bool kFour = F == WeightFormat::mxfp4 ? kRows <= 72 : F == WeightFormat::bf16 && kRows <= 80;
  static constexpr int kGroups = kTileBands == 4 ? 1 : kFour ? 4 : 2, kBlocks = kTileBands / 4 / kGroups;
  static constexpr int kConsumerWarps = 4 * kGroups, kThreads = 32 * (kConsumerWarps + 4);
  static constexpr int kProducerRegisters = kGroups == 4 ? 32 : 40;
  static constexpr int kConsumerRegisters = kGroups == 4 ? 112 : 232;
  static_assert(kTileBands == 4 * kBlocks * kGroups, "bands of a tile are dealt out to warps");
};

// Tiles with at most this many rows of x are multiplied by narrower instructions. A third width would spill registers.
template <WeightFormat F, int kRows> constexpr int kNarrow = narrow_of(F, kRows);

// The number of weight tiles of a row tile in a stage. Waiting, releasing and address arithmetic take some 40
// instructions per warp and stage, and the number of instructions limits the speed of products with few rows. Elements
// beyond the end of a matrix, scales included, are zeros.
template <WeightFormat F, int kRows> constexpr int kSpan = span_of(F, kRows);
// Whether a group of wgmma instructions takes a whole weight tile of the stage, or half of one where sums leave few
// registers.
template <WeightFormat F, int kRows> constexpr bool kWhole = F == WeightFormat::mxfp4&& kRows <= 40;

template <WeightFormat F, int kRows, int kTileBands> struct Memory {
  static constexpr uint32_t kWeightTile = weight_tiles::Form<F>::kBytes, kWeightTiles = kSpan<F, kRows>;
  static constexpr uint32_t kA = kTileBands * kWeightTiles * kWeightTile, kPanel = kRows * 128,
                            kB = kWeightTiles * kPanel;
  static constexpr uint32_t kFit = (216 * 1024) / (kA + kB);
  static constexpr int kMost = kTileBands == 16 ? 8 : kRows == 16 ? 20 : 12, kStages = kFit < kMost ? kFit : kMost;
  using Pipe = gemm::Pipeline<kStages, 1, gemm::Team::cooperative, Team<F, kRows, kTileBands>::kGroups>;
  alignas(1024) char b[kStages][kB];
  alignas(128) char a[kStages][kA];
  alignas(16) Tile tile[kStages];  // the tile that begins with this stage; a tile without rows ends the work
  typename Pipe::Memory pipe;
  int32_t offsets[kMostGroups + 1];
};

template <int kTileBands> __device__ __forceinline__ Walk walk_of(const Params& p, const int32_t* offsets) {
  return {offsets,    p.groups, uint32_t(kTileBands), (p.row_tiles + kTileBands - 1) / kTileBands, p.tile_rows,
          blockIdx.x, gridDim.x};
}
// The weight tiles that a tile multiplies: the first one, and the number of stages.
struct Span {
  uint32_t first, steps;
};
template <WeightFormat F, int kRows> __device__ __forceinline__ Span span_of(const Params& p, const Tile& t) {
  constexpr uint32_t kWeightTiles = kSpan<F, kRows>;
  const uint32_t first = p.parts > 1 ? t.group * p.part_tiles : 0, count = min(p.part_tiles, p.weight_tiles - first);
  return {first, (count + kWeightTiles - 1) / kWeightTiles};
}

// The number of tiles of all groups. Called by one warp, and only where blocks claim their tiles.
template <int kTileBands> __device__ __forceinline__ uint32_t count_tiles(const Params& p, const int32_t* offsets) {
  const Walk walk = walk_of<kTileBands>(p, offsets);
  uint32_t tiles = 0;
  for (uint32_t g = threadIdx.x % 32; g < p.groups; g += 32) tiles += walk.tiles_of(g);
  return __reduce_add_sync(~0u, tiles);
}

// One thread fetches the stages of every tile, each as soon as the ring has a free stage, and publishes the tile
// together with its first stage. The row tiles of a stage are one copy: issuing seventeen small copies took longer than
// computing the products of a stage. Row tiles beyond the end of a matrix belong to the next matrix or are zeros; no
// thread reads these row tiles.
template <WeightFormat F, int kRows, int kTileBands>
__device__ void produce(const Params& p, Memory<F, kRows, kTileBands>& m, uint32_t tiles) {
  using M = Memory<F, kRows, kTileBands>;
  constexpr uint32_t kBoxRows = box_rows(kRows), kBox = kBoxRows * 128, kWeightTiles = M::kWeightTiles;
  typename M::Pipe::Cursor at;
  Walk walk = walk_of<kTileBands>(p, m.offsets);
  if (p.claims != nullptr) walk.step = 0;
  const auto say = [&](const typename M::Pipe::Cursor& in, const Tile& t) {
    tile::wait_or_trap(&m.pipe.empty[in.stage], in.phase ^ 1);
    m.tile[in.stage] = t;
  };
  for (Tile t; walk.next(t);) {
    const bool is_part = p.parts > 1;
    const uint32_t boxes = t.rows() <= kBoxRows ? 1 : kRows / kBoxRows,
                   row_tile = (is_part ? 0 : t.group * p.row_tiles) + t.row_tile,
                   row = t.row - (is_part ? m.offsets[t.group] : 0);
    const auto [first, steps] = span_of<F, kRows>(p, t);
    const uint32_t claims_at = steps > 4 ? steps - 4 : 0;
    uint32_t claim = 0;
    for (uint32_t step = 0; step < steps; ++step, at.advance()) {
      if (step == claims_at && p.claims != nullptr) claim = atomicInc(p.claims, tiles - 1);
      if (step == 0) say(at, t);
      uint64_t* const full = M::Pipe::acquire(m.pipe, at, M::kA + kWeightTiles * boxes * kBox);
      ptx::tensor_load(m.a[at.stage], &p.weights, int((first + step * kWeightTiles) * (M::kWeightTile / 8)),
                       int(row_tile), full);
#pragma unroll
      for (uint32_t weight_tile = 0; weight_tile < kWeightTiles; ++weight_tile)
        for (uint32_t box = 0; box < boxes; ++box)
          ptx::tensor_load(m.b[at.stage] + weight_tile * M::kPanel + box * kBox, &p.x,
                           int((first + step * kWeightTiles + weight_tile) * 64), int(row + box * kBoxRows), full);
    }
    if (p.claims != nullptr) walk.next_tile = claimed_tile(claim, gridDim.x);
  }
  say(at, {});
  M::Pipe::acquire(m.pipe, at, 0);
}

template <WeightFormat F, int kRows, int kTileBands> class Consumer {
 public:
  using M = Memory<F, kRows, kTileBands>;
  static constexpr int kBlocks = Team<F, kRows, kTileBands>::kBlocks;
  __device__ __forceinline__ Consumer(const Params& p, M& m, uint32_t warp)
      : m_(m), p_(p), a_(ptx::shared_address(m.a[0])), b_(ptx::shared_address(m.b[0])) {
#pragma unroll
    for (uint32_t r = 0; r < kBlocks; ++r) band_[r] = (warp / 4 * kBlocks + r) * 4 + warp % 4;
  }
  // Waits for the first stage of the next tile and returns the tile; a tile without rows follows the last one.
  __device__ __forceinline__ Tile next() {
    M::Pipe::wait(m_.pipe, at_);
    uint32_t w[4] = {};
    if (threadIdx.x % 32 == 0) ptx::load_shared(w, ptx::shared_address(&m_.tile[at_.stage]));
#pragma unroll
    for (uint32_t& word : w) word = __shfl_sync(~0u, word, 0);
    return {w[0], w[1], w[2], w[3]};
  }
  // All products of tile `t` with kWidth rows of x. While the products of one part of a weight tile run, the next part
  // is decoded into other registers. A stage is released when the first products of the next stage have been issued.
  template <int kWidth> __device__ __forceinline__ void multiply(const Tile& t, float (&d)[kBlocks][kWidth / 2]) {
    steps_ = span_of<F, kRows>(p_, t).steps;
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) ptx::fence_registers(d[r]);
    decode_part(parts_[0], 0);
    uint32_t step = 0;
    for (;;) {
      if (stage<kWidth, 0>(d, step)) break;
      if (kParts % 2 == 0) continue;
      if (stage<kWidth, 1>(d, step)) break;
    }
    ptx::wgmma_wait_group<0>();
    M::Pipe::release(m_.pipe, at_.stage);
    at_.advance();
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) ptx::fence_registers(d[r]);
  }
  uint32_t band_[kBlocks];  // this warp's row tiles of the tile

 private:
  static constexpr int kOfWeightTile = kWhole<F, kRows> ? 1 : 2, kSteps = 4 / kOfWeightTile;
  static constexpr int kParts = kOfWeightTile * M::kWeightTiles;  // parts of a stage
  using Part = uint32_t[kBlocks][kSteps][4];
  // The products of a stage whose first part is already decoded in parts_[kFirst]. At the end the first part of the
  // next stage is decoded into parts_[kFirst], or into the other buffer if the number of parts is odd. Returns whether
  // this stage was the last.
  template <int kWidth, int kFirst>
  __device__ __forceinline__ bool stage(float (&d)[kBlocks][kWidth / 2], uint32_t& step) {
    static_assert(kParts > 1, "the stage before is handed back when the first of several is under way");
    const uint32_t before = before_;
    const uint32_t b = __shfl_sync(~0u, b_ + at_.stage * M::kB, 0);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      issue<kWidth>(d, parts_[(kFirst + part) % 2], b + part / kOfWeightTile * M::kPanel, part, step > 0);
      const bool more = part + 1 < kParts;
      if (!more && step + 1 == steps_) return true;
      ptx::wgmma_wait_group<1>();
      if (part == 0 && step > 0) M::Pipe::release(m_.pipe, before);
      if (!more) {
        before_ = at_.stage;
        ++step;
        at_.advance();
        M::Pipe::wait(m_.pipe, at_);
      }
      decode_part(parts_[(kFirst + part + 1) % 2], more ? part + 1 : 0);
    }
    return false;
  }
  __device__ __forceinline__ void decode_part(Part& a, int part) {
    const uint32_t from = a_ + at_.stage * M::kA + part / kOfWeightTile * M::kWeightTile;
#pragma unroll
    for (int r = 0; r < kBlocks; ++r)
      decode<F, kSteps>(from + band_[r] * (M::kWeightTiles * M::kWeightTile), part % kOfWeightTile * kSteps, kept_[r],
                        a[r]);
  }
  template <int kWidth>
  __device__ __forceinline__ void issue(float (&d)[kBlocks][kWidth / 2], Part& a, uint32_t b, int part, bool adds) {
#pragma unroll
    for (int r = 0; r < kBlocks; ++r)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) ptx::fence_registers(a[r][s]);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int r = 0; r < kBlocks; ++r)
        ptx::wgmma<bf16, kWidth>(
            d[r], a[r][s],
            tile::operand<ptx::Major::k, tile::Swizzle::b128>(b, uint32_t(16 * (part % kOfWeightTile * kSteps + s))),
            adds || part > 0 || s > 0);
    ptx::wgmma_commit_group();
  }
  M& m_;
  const Params& p_;
  uint32_t steps_ = 0, a_, b_, before_ = 0;
  Part parts_[2];
  Kept kept_[kBlocks];
  typename M::Pipe::Cursor at_;
};

template <WeightFormat F, int kRows, int kTileBands, bool kGated, int kWidth>
__device__ __forceinline__ void compute(const Params& p, Consumer<F, kRows, kTileBands>& consumer, const Tile& t) {
  constexpr int kBlocks = Team<F, kRows, kTileBands>::kBlocks;
  // With few rows of x there are registers to load bias and scales early, and little work to hide their latency later.
  constexpr bool kEarly = kRows <= 16 && kBlocks == 1;
  Ends early = {};
  if constexpr (kEarly) early = ends_of<F>(p, t, t.row_tile + consumer.band_[0]);
  float d[kBlocks][kWidth / 2];
  consumer.template multiply<kWidth>(t, d);
  const auto end = [&](uint32_t row_tile, const auto& sums) {
    if (row_tile < p.row_tiles)
      finish<F, kWidth, kGated>(p, t, row_tile, kEarly ? early : ends_of<F>(p, t, row_tile), sums);
  };
  // This is not a loop, because the compiler would not unroll such a long body, and sums with a variable index would be
  // in local memory.
  static_assert(kBlocks <= 2);
  end(t.row_tile + consumer.band_[0], d[0]);
  if constexpr (kBlocks == 2) end(t.row_tile + consumer.band_[1], d[1]);
}

template <WeightFormat F, int kRows, int kTileBands, bool kGated> __device__ __forceinline__ void run(const Params& p) {
  using M = Memory<F, kRows, kTileBands>;
  using T = Team<F, kRows, kTileBands>;
  auto& m = *tile::dynamic_shared<M>();
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) M::Pipe::init(m.pipe);
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  for (uint32_t g = threadIdx.x; g <= p.groups; g += T::kThreads) m.offsets[g] = p.offsets[g];
  __syncthreads();
  if (warp >= T::kConsumerWarps) {
    ptx::decrease_registers<T::kProducerRegisters>();
    if (warp == T::kConsumerWarps) {
      const uint32_t tiles = p.claims != nullptr ? count_tiles<kTileBands>(p, m.offsets) : 0;
      if (ptx::elect_one()) produce<F, kRows, kTileBands>(p, m, tiles);
    }
    __syncwarp();
  } else {
    ptx::increase_registers<T::kConsumerRegisters>();
    Consumer<F, kRows, kTileBands> consumer(p, m, warp);
    for (;;) {
      const Tile t = consumer.next();
      if (t.rows() == 0) break;
      if (kNarrow<F, kRows> < kRows && t.rows() <= kNarrow<F, kRows>)
        compute<F, kRows, kTileBands, kGated, kNarrow<F, kRows>>(p, consumer, t);
      else
        compute<F, kRows, kTileBands, kGated, kRows>(p, consumer, t);
    }
  }
}

template <WeightFormat F, int kRows, int kTileBands, bool kGated>
__global__ void __launch_bounds__(Team<F, kRows, kTileBands>::kThreads, 1)
    grouped_kernel(const __grid_constant__ Params p) {
  run<F, kRows, kTileBands, kGated>(p);
}
template <WeightFormat F, int kRows, int kTileBands, bool kGated>
void launch_tile(const Params& p, int64_t blocks, int device, Stream stream) {
  using T = Team<F, kRows, kTileBands>;
  const gpu::Launch at{.grid = blocks,
                       .block = T::kThreads,
                       .smem = int64_t(sizeof(Memory<F, kRows, kTileBands>)),
                       .overlap = true,
                       .device = device};
  gpu::launch("grouped_linear", grouped_kernel<F, kRows, kTileBands, kGated>, at, stream, p);
}
template <WeightFormat F, bool kGated>
void launch_tall(const Params& p, int rows, int64_t blocks, int device, Stream stream) {
  if (rows == 16) return launch_tile<F, 16, kBands, kGated>(p, blocks, device, stream);
  if (rows == widths_of(F).middle)
    return launch_tile<F, widths_of(F).middle, kBands, kGated>(p, blocks, device, stream);
  launch_tile<F, widths_of(F).widest, kBands, kGated>(p, blocks, device, stream);
}
template <WeightFormat F>
void launch(const Params& p, const TileShape& tile, bool gated, int64_t blocks, int device, Stream stream) {
  if (gated) return launch_tall<F, true>(p, tile.kernel, blocks, device, stream);
  if (tile.row_tiles == int(kBands)) return launch_tall<F, false>(p, tile.kernel, blocks, device, stream);
  if (tile.kernel == 16) return launch_tile<F, 16, kFewBands, false>(p, blocks, device, stream);
  if (tile.kernel == 80) return launch_tile<F, 80, kFewBands, false>(p, blocks, device, stream);
  launch_tile<F, 128, kFewBands, false>(p, blocks, device, stream);
}

}  // namespace ingot::grouped
