#pragma once
// The matrix product kernel for Hopper: persistent, warp-specialised. One warp brings tiles of A and B by tensor copies
// into a ring of stages; two warpgroups multiply them by wgmma into fp32 registers and hand the sums to an epilogue.
//
// To make a kernel from the core, an operation defines a type with these members and launches it:
//     using Type = bf16;                                             the operands' type: bf16 or f16
//     static constexpr gemm::Tile kTile = {.n = 256, ...};           shape.h
//     using A = gemm::Operand<bf16, Major::k, gemm::kTileM, false>;  the source of the operands: operand.cuh
//     using B = gemm::Operand<bf16, Major::k, 256, true>;
//     using Schedule = gemm::Grid;                                   the tiles and their order: schedule.h
//     using Epilogue = gemm::Store<bf16>;                            the use of the sums: epilogue.cuh
//     gemm::launch<MyProduct>("my_op", {.a = A::params<2>("my_op: x", x), .b = ..., .schedule = Schedule::of(...),
//                             .epilogue = ...}, device, stream);
// Each of the four may be the operation's own type, with the members named in those headers. An operation may also
// declare
//     static __device__ void trim(const gemm::Arguments<MyProduct>&, const gemm::TileAt&, step, a, b)
// which the warpgroups that multiply a stage call when the stage has arrived at the shared addresses a and b, and which
// may change the stage before its products.
// linear/cuda/core_product.cuh is the simplest user; swiglu/gated.cuh has two products in a tile, in K and in a batch.
// Products with decoded weights have a separate kernel, kernels/grouped, which uses the same ring of stages
// (docs/matrix-products.md gives the reason).
//
// The core has a second form for other GPUs, portable/core.cuh. An operation can run on both forms if its type takes
// the form as a template parameter: HopperCore (below) or PortableCore.
//
// Each sum is formed by one thread in one order, so results repeat bit for bit.
#include <cstdint>

#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/gemm/operand.cuh"
#include "ingot/gpu/gemm/pipeline.cuh"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/gpu/gemm/tensor_store.cuh"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/cluster.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/shared.cuh"

namespace ingot::gemm {

// Registers per thread: the producer needs few, so the consumers may have many.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// The stages of the ring fill the shared memory that the epilogue does not need.
template <class Op> struct Layout {
  static constexpr int64_t kStageBytes = Op::A::kBytes + Op::B::kBytes, kBarriers = 512;
  static constexpr int64_t kFree = kSharedBytes - int64_t(sizeof(typename Op::Epilogue::Shared)) - kBarriers;
  static constexpr int kStages = int(kFree / kStageBytes < 8 ? kFree / kStageBytes : 8);
  static_assert(kStages >= 3, "two stages are read while others arrive");
};

template <class Op> struct Memory {
  static constexpr int kStages = Layout<Op>::kStages;
  using Pipe = Pipeline<kStages, Op::kTile.cluster, Op::kTile.team>;
  alignas(1024) char a[kStages][Op::A::kBytes];
  alignas(1024) char b[kStages][Op::B::kBytes];
  typename Op::Epilogue::Shared epilogue;
  typename Pipe::Memory pipe;
};

template <class Op> struct Arguments {
  typename Op::A::Params a;
  typename Op::B::Params b;
  typename Op::Schedule schedule;
  typename Op::Epilogue::Params epilogue;
};

// The block's rank in its cluster. Tiles are assigned to clusters.
template <class Op> struct BlockAt {
  static constexpr int kCluster = Op::kTile.cluster;
  uint32_t rank = kCluster > 1 ? ptx::cluster_rank() : 0;
  uint32_t cluster = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  __device__ __forceinline__ uint32_t row(const TileAt& t) const { return t.m + rank * kTileM; }
};

// Called by a single thread: loads the steps of all tiles, each as soon as the ring has a free stage.
template <class Op> __device__ void produce(const Arguments<Op>& p, Memory<Op>& m, const BlockAt<Op>& block) {
  using Pipe = typename Memory<Op>::Pipe;
  constexpr int kCluster = Op::kTile.cluster;
  auto walk = p.schedule.walk(block.cluster, block.clusters);
  typename Pipe::Cursor at;
  for (TileAt t; walk.next(t);)
    for (uint32_t step = 0; step < t.k_steps; ++step, at.advance()) {
      uint64_t* const full = Pipe::acquire(m.pipe, at, Op::A::kBytes + Op::B::kBytes);
      Op::A::template load<kCluster>(p.a, m.a[at.stage], t, block.row(t), step, full, block.rank);
      Op::B::template load<kCluster>(p.b, m.b[at.stage], t, t.n, step, full, block.rank);
    }
}

// A warpgroup's part of a tile: its blocks of 64 rows, and their sums.
template <class Op> struct Sums {
  static constexpr int kBlocks = Op::kTile.team == Team::ping_pong ? 2 : 1;
  float d[kBlocks][Op::kTile.n / 2];
};

// d (+)= the product of a stage; issues the product without a wait.
template <class Op>
__device__ __forceinline__ void multiply(Sums<Op>& sums, uint32_t a, uint32_t b, uint32_t row_block, uint32_t step) {
  using T = typename Op::Type;
  using tile::Swizzle;
  constexpr int kN = Op::kTile.n;
  constexpr Major kA = Op::A::kMajor, kB = Op::B::kMajor;
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kTileK; k += 16)
#pragma unroll
    for (int r = 0; r < Sums<Op>::kBlocks; ++r) {
      const uint64_t of_b = tile::operand<kB, Swizzle::b128>(b, k, kPanelBytes);
      const uint64_t of_a = tile::operand<kA, Swizzle::b128>(a + (row_block + r) * kPanelBytes, k, kPanelBytes);
      ptx::wgmma<T, kN, kA, kB>(sums.d[r], of_a, of_b, step > 0 || k > 0);
    }
  ptx::wgmma_commit_group();
}

template <class Op>
concept TrimsStages = requires(const Arguments<Op>& p, const TileAt& t) {
  Op::trim(p, t, 0u, 0u, 0u);
};
template <class Epilogue>
concept RequestsInputs = requires(Epilogue& e, const WarpAt& at) {
  e.request(at);
};

// All products of a tile. A stage is returned to the producer when the next stage's products have been issued.
template <class Op>
__device__ __forceinline__ void multiply_tile(Sums<Op>& sums, const Arguments<Op>& p, Memory<Op>& m, const TileAt& t,
                                              typename Memory<Op>::Pipe::Cursor& at, uint32_t row_block,
                                              const Turns<Op::kTile.team>& turns) {
  using Pipe = typename Memory<Op>::Pipe;
  const uint32_t steps = t.k_steps;
  turns.take();
#pragma unroll
  for (int r = 0; r < Sums<Op>::kBlocks; ++r) ptx::fence_registers(sums.d[r]);
  uint32_t before = 0;
  for (uint32_t step = 0; step < steps; ++step, at.advance()) {
    Pipe::wait(m.pipe, at);
    const uint32_t a = ptx::shared_address(m.a[at.stage]), b = ptx::shared_address(m.b[at.stage]);
    if constexpr (TrimsStages<Op>) Op::trim(p, t, step, a, b);
    multiply<Op>(sums, a, b, row_block, step);
    ptx::wgmma_wait_group<1>();
    if (step > 0) Pipe::release(m.pipe, before);
    before = at.stage;
  }
  turns.pass();
  ptx::wgmma_wait_group<0>();
#pragma unroll
  for (int r = 0; r < Sums<Op>::kBlocks; ++r) ptx::fence_registers(sums.d[r]);
  if (steps > 0) Pipe::release(m.pipe, before);
}

// Two warpgroups: both in every tile, or in alternating tiles.
template <class Op>
__device__ __forceinline__ void consume(const Arguments<Op>& p, Memory<Op>& m, const BlockAt<Op>& block,
                                        uint32_t warp) {
  constexpr bool kPingPong = Op::kTile.team == Team::ping_pong;
  const uint32_t warpgroup = warp / 4, row_block = kPingPong ? 0 : warpgroup;
  const Turns<Op::kTile.team> turns{warpgroup};
  typename Op::Epilogue epilogue(p.epilogue, m.epilogue, warp);
  typename Memory<Op>::Pipe::Cursor at;
  auto walk = p.schedule.walk(block.cluster, block.clusters);
  TileAt t;
  // Skips a tile that the other warpgroup computes, and the ring's stages that hold the operands of this tile.
  const auto leave_one = [&] {
    const bool there = walk.next(t);
    if (there) at.advance(t.k_steps);
    return there;
  };
  bool more = true;
  if (kPingPong) {
    turns.start();
    if (warpgroup == 1) more = leave_one();
  }
  // A warpgroup with a turn after the last tile still takes this turn, so that no turn is pending.
  bool last_turn = false;
  while (more) {
    if (!walk.next(t)) {
      last_turn = true;
      break;
    }
    Sums<Op> sums;
    if (t.k_steps == 0)
#pragma unroll
      for (int i = 0; i < Sums<Op>::kBlocks * Op::kTile.n / 2; ++i)
        sums.d[i / (Op::kTile.n / 2)][i % (Op::kTile.n / 2)] = 0;
    const auto place = [&](int r) {
      return WarpAt{t.batch, block.row(t) + (row_block + r) * 64 + warp % 4 * kWarpRows, t.m_end, t.n};
    };
    if constexpr (RequestsInputs<typename Op::Epilogue>)
#pragma unroll
      for (int r = 0; r < Sums<Op>::kBlocks; ++r) epilogue.request(place(r));
    multiply_tile<Op>(sums, p, m, t, at, row_block, turns);
#pragma unroll
    for (int r = 0; r < Sums<Op>::kBlocks; ++r) epilogue(sums.d[r], place(r));
    if (kPingPong) more = leave_one();
  }
  if (kPingPong && last_turn) turns.take();
  epilogue.end();
}

template <class Op>
__global__ void __launch_bounds__(kThreads, 1) gemm_kernel(const __grid_constant__ Arguments<Op> p) {
  auto& m = *tile::dynamic_shared<Memory<Op>>();
  const BlockAt<Op> block;
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the shuffle shows the compiler that all lanes have
                                                                // the same value
  if (threadIdx.x == 0) Memory<Op>::Pipe::init(m.pipe);
  if (Op::kTile.cluster > 1)
    tile::sync_cluster();
  else
    __syncthreads();
  ptx::wait_for_earlier_kernels();
  if (warp < 4) {
    ptx::decrease_registers<kProducerRegisters>();
    if (warp == 0 && ptx::elect_one()) produce<Op>(p, m, block);
    __syncwarp();
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    consume<Op>(p, m, block, warp - 4);
  }
  // A block must not end while the other block of the cluster may still copy to it or arrive at its barriers.
  if (Op::kTile.cluster > 1) tile::sync_cluster();
}

// `blocks`: the most blocks; 0: one per SM.
template <class Op>
void launch(const char* name, const Arguments<Op>& p, int device, Stream stream, int64_t tiles, int64_t blocks = 0) {
  static_assert(sizeof(Memory<Op>) <= kSharedBytes, "shared memory of a block");
  if (tiles == 0) return;
  if (blocks == 0) blocks = gpu::sm_count(device);
  constexpr int64_t kCluster = Op::kTile.cluster;
  gpu::launch(name, gemm_kernel<Op>,
              {.grid = std::min(std::max<int64_t>(blocks / kCluster, 1), tiles) * kCluster,
               .block = kThreads,
               .smem = int64_t(sizeof(Memory<Op>)),
               .cluster = int(kCluster),
               .overlap = true,
               .device = device},
              stream, p);
}

// Describes this form of the core to products and epilogues that run on both forms. PortableCore (portable/core.cuh)
// has the same members.
struct HopperCore {
  template <class T, Major kMajor, int kRows, bool kShared, Pair kPair = Pair::none>
  using Operand = gemm::Operand<T, kMajor, kRows, kShared, kPair>;
  using Target = CUtensorMap;
  template <int kPanels> using PanelStore = WarpStore<kPanels>;
  using PanelExchange = WarpExchange;

  // Whether kernels of all tiles exist, and whether the rows of a result must be whole multiples of 16 bytes.
  static constexpr bool kAllTiles = true, kWholeRows = true;
  static constexpr Tile tile(const Tile& t) { return t; }
  // The targets for results whose rows are whole multiples of 16 bytes, for rows with padding at their end, and for
  // send_turned().
  template <class T> static Target target(const char* name, const Tensor& t) { return store_map<T>(name, t); }
  template <class T> static Target padded_target(const char* name, const Tensor& t) {
    return padded_store_map<T>(name, t);
  }
  template <class T> static Target turned_target(const char* name, const Tensor& t) {
    return gpu::tensor_map(name, t, kTurnedBox);
  }
  template <class Op>
  static void launch(const char* name, const Arguments<Op>& p, int device, Stream stream, int64_t tiles) {
    gemm::launch<Op>(name, p, device, stream, tiles);
  }
};

}  // namespace ingot::gemm
