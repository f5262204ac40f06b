#pragma once
// The matrix product kernel for GPUs from compute capability 8.0 on: cp.async, ldmatrix and mma.sync, with the
// schedules, pairs and epilogues of Hopper's form (../core.cuh). A product type takes the form as a parameter:
//     using A = typename Core::template Operand<T, Major::k, gemm::kTileM, false>;      Core: HopperCore, PortableCore
//
// A block of four warps computes a tile of 128 x 128; each warp has 32 rows and all columns, because epilogues need the
// 128 columns of a row in one warp, and because 16 rows would leave the product waiting for shared memory: 32 rows read
// 5,120 bytes for 131,072 multiplications and additions. A fragment of mma.sync is laid out as wgmma's sums are. Three
// steps of 32 elements of K fill 48 KB, so at least two blocks share a multiprocessor and hide each other's waits and
// epilogues; the epilogue's panels reuse the steps' memory.
//
// Each sum is formed by one thread in one order, so results repeat bit for bit.
#include <cstdint>

#include "ingot/gpu/gemm/config.h"
#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/gemm/portable/operand.cuh"
#include "ingot/gpu/gemm/portable/panel_store.cuh"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/gpu/tile/shared.cuh"

namespace ingot::gemm::portable {

constexpr int kStages = 3, kRowBlocks = 2;  // of a warp: blocks of 16 rows
constexpr Tile kTile = kPortableTile;

template <class Op> struct Memory {
  static constexpr uint32_t kStageBytes = Op::A::kBytes + Op::B::kBytes;
  alignas(1024) char stage[kStages][kStageBytes];
  static_assert(sizeof(typename Op::Epilogue::Shared) <= kStages * kStageBytes, "the epilogue reuses the stages");
};

template <class Op> struct Arguments {
  typename Op::A::Params a;
  typename Op::B::Params b;
  typename Op::Schedule schedule;
  typename Op::Epilogue::Params epilogue;
};

template <class Op> struct Sums { float d[kRowBlocks][kTile.n / 2]; };

// The operands of a tile in the ring of stages.
template <class Op> class Steps {
 public:
  __device__ __forceinline__ Steps(const Arguments<Op>& p, Memory<Op>& m, const TileAt& t)
      : p_(p), tile_(t), stages_(ptx::shared_address(&m)), steps_(t.k_steps * kStepsOfTileK) {
#pragma unroll
    for (uint32_t s = 0; s + 1 < kStages; ++s) request(s);
  }
  __device__ __forceinline__ uint32_t count() const { return steps_; }
  // Waits for a step and returns its address. The stage of the step before is then free for a request.
  __device__ __forceinline__ uint32_t wait(uint32_t step) const {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
    return stage_of(step);
  }
  // Every step is a group, empty beyond the last, so that wait() counts groups alike for all steps.
  __device__ __forceinline__ void request(uint32_t step) const {
    if (step < steps_) {
      Op::A::load(p_.a, stage_of(step), tile_, tile_.m, step);
      Op::B::load(p_.b, stage_of(step) + Op::A::kBytes, tile_, tile_.n, step);
    }
    ptx::cp_async_commit_group();
  }

 private:
  __device__ __forceinline__ uint32_t stage_of(uint32_t step) const {
    return stages_ + step % kStages * Memory<Op>::kStageBytes;
  }
  const Arguments<Op>& p_;
  const TileAt& tile_;
  uint32_t stages_, steps_;
};

// d += the products of a step.
template <class Op> __device__ __forceinline__ void multiply(Sums<Op>& sums, uint32_t stage, uint32_t warp) {
  using T = typename Op::Type;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t left = Op::A::left_address(stage, warp * kRowBlocks * kWarpRows, lane),
                 right = Op::B::right_address(stage + Op::A::kBytes, lane);
#pragma unroll
  for (int k = 0; k < kStepK / 16; ++k) {
    uint32_t a[kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) Op::A::fragment(a[r], left, r, k);
#pragma unroll
    for (int n = 0; n < kTile.n / 16; ++n) {
      uint32_t b[4];
      Op::B::fragment(b, right, n, k);
      const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        float* const d = sums.d[r] + 8 * n;
        ptx::mma_m16n8k16(T{}, *reinterpret_cast<float(*)[4]>(d), a[r], low);
        ptx::mma_m16n8k16(T{}, *reinterpret_cast<float(*)[4]>(d + 4), a[r], high);
      }
    }
  }
}

// A block for each tile.
template <class Op>
__global__ void __launch_bounds__(kBlockThreads, 2) portable_gemm_kernel(const __grid_constant__ Arguments<Op> p) {
  auto& m = *tile::dynamic_shared<Memory<Op>>();
  const uint32_t warp = threadIdx.x / 32;
  TileAt t;
  if (!p.schedule.walk(blockIdx.x, gridDim.x).next(t)) return;
  Sums<Op> sums;
#pragma unroll
  for (int i = 0; i < kRowBlocks * kTile.n / 2; ++i) sums.d[i / (kTile.n / 2)][i % (kTile.n / 2)] = 0;
  const Steps<Op> steps(p, m, t);
  for (uint32_t step = 0; step < steps.count(); ++step) {
    const uint32_t stage = steps.wait(step);
    steps.request(step + kStages - 1);
    multiply<Op>(sums, stage, warp);
  }
  __syncthreads();  // the epilogue overwrites the stages
  typename Op::Epilogue epilogue(p.epilogue, *reinterpret_cast<typename Op::Epilogue::Shared*>(&m), warp);
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r)
    epilogue(sums.d[r], {t.batch, t.m + (warp * kRowBlocks + r) * kWarpRows, t.m_end, t.n});
  epilogue.end();
}

}  // namespace ingot::gemm::portable

namespace ingot::gemm {

struct PortableCore {
  template <class T, Major kMajor, int kRows, bool kShared, Pair kPair = Pair::none>
  using Operand = portable::Operand<T, kMajor, kRows, kShared, kPair>;
  using Target = portable::Target;
  template <int kPanels> using PanelStore = portable::PanelStore<kPanels>;
  using PanelExchange = portable::PanelExchange;

  static constexpr bool kAllTiles = false, kWholeRows = false;
  static constexpr Tile tile(const Tile&) { return portable::kTile; }
  // Rows may begin and end anywhere.
  template <class T> static Target target(const char*, const Tensor& t) {
    Target to = portable::target_of<T>(t);
    to.whole = rows_are_whole(t) && (reinterpret_cast<uintptr_t>(to.data) | to.stride | to.batch_stride) % 16 == 0;
    return to;
  }
  template <class T> static Target padded_target(const char* name, const Tensor& t) {
    check_padded_rows(name, t);
    return portable::target_of<T>(t);
  }
  template <class T> static Target turned_target(const char*, const Tensor& t) { return portable::target_of<T>(t); }
  template <class Op>
  static void launch(const char* name, const portable::Arguments<Op>& p, int device, Stream stream, int64_t tiles) {
    static_assert(Op::kTile == portable::kTile, "the portable core has one tile");
    if (tiles == 0) return;
    gpu::launch(name, portable::portable_gemm_kernel<Op>,
                {.grid = tiles,
                 .block = portable::kBlockThreads,
                 .smem = int64_t(sizeof(portable::Memory<Op>)),
                 .device = device},
                stream, p);
  }
};

}  // namespace ingot::gemm
