#pragma once
// The matrix product kernel for GPUs from compute capability 8.0 on: cp.async, ldmatrix and mma.sync, with the
// schedules, pairs and epilogues of Hopper's form (../core.cuh). A product type takes the form as a parameter:
//     using A = typename Core::template Operand<T, Major::k, gemm::kTileM, false>;      Core: HopperCore, PortableCore
//
// A block of four warps computes a tile of 128 x 128, of which each warp multiplies 64 x 64: it reads 4,096 bytes of
// shared memory for 131,072 multiplications and additions, where 32 x 128 would read 5,120. Epilogues need the 128
// columns of a row in one warp, so the two warps of the same rows exchange halves of their sums first. A fragment of
// mma.sync is laid out as wgmma's sums are. Three steps of 32 elements of K fill 48 KB, so at least two blocks share a
// multiprocessor and hide each other's waits and epilogues; the exchange and the epilogue's panels reuse the steps'
// memory.
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
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/tile/shared.cuh"

namespace ingot::gemm::portable {

constexpr int kStages = 3, kRowBlocks = 2;           // of a warp in the epilogue: blocks of 16 rows
constexpr int kSide = 64, kSideBlocks = kSide / 16;  // of a warp's part of the product
constexpr int kExchanged = kSide / 2 * kSide / 32;   // numbers of a thread that its warp gives to another warp
constexpr Tile kTile = kPortableTile;

template <class Op> struct Memory {
  static constexpr uint32_t kStageBytes = Op::A::kBytes + Op::B::kBytes;
  alignas(1024) char stage[kStages][kStageBytes];
  static_assert(sizeof(typename Op::Epilogue::Shared) <= kStages * kStageBytes, "the epilogue reuses the stages");
  static_assert(kExchanged * 4 * kBlockThreads <= kStages * kStageBytes, "the exchange reuses the stages");
};

template <class Op> struct Arguments {
  typename Op::A::Params a;
  typename Op::B::Params b;
  typename Op::Schedule schedule;
  typename Op::Epilogue::Params epilogue;
};

// A warp's sums: 64 x 64 during the product, then 32 rows of all columns.
struct Square {
  float d[kSideBlocks][kSide / 2];
};
struct Rows {
  float d[kRowBlocks][kTile.n / 2];
};

// The operands of a tile in the ring of stages.
template <class Op> class Steps {
 public:
  __device__ __forceinline__ Steps(const Arguments<Op>& p, Memory<Op>& m, const TileAt& t)
      : a_(p.a, t, t.m), b_(p.b, t, t.n), stages_(ptx::shared_address(&m)), steps_(t.k_steps * kStepsOfTileK) {
    ptx::settle(stages_);
#pragma unroll
    for (int s = 0; s + 1 < kStages; ++s) {
      request<false>(0), request<false>(1);
      commit();
    }
  }
  __device__ __forceinline__ uint32_t count() const { return steps_; }
  // The number of first steps for which request<true>() may request the step kStages - 1 further on.
  __device__ __forceinline__ uint32_t whole() const {
    const uint32_t steps = min(min(a_.whole_steps(), b_.whole_steps()), steps_);
    return steps < kStages - 1 ? 0 : steps - (kStages - 1);
  }
  // Waits for the next step and returns its address. The stage of the step before is then free for a request.
  __device__ __forceinline__ uint32_t wait() {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
    const uint32_t stage = stages_ + read_;
    read_ = behind(read_);
    return stage;
  }
  // Requests an operand, 0 or 1, of the step behind those requested so far. kWhole: that step is one of the whole
  // steps.
  template <bool kWhole> __device__ __forceinline__ void request(int operand) const {
    if (!kWhole && requested_ >= steps_) return;
    const uint32_t to = stages_ + written_;
    if (operand == 0)
#pragma unroll
      for (uint32_t i = 0; i < Op::A::kCopies; ++i) a_.template request<kWhole>(to, i);
    else
#pragma unroll
      for (uint32_t i = 0; i < Op::B::kCopies; ++i) b_.template request<kWhole>(to + Op::A::kBytes, i);
  }
  // After both requests. Every step is a group, empty beyond the last, so that wait() counts groups alike for all
  // steps.
  __device__ __forceinline__ void commit() {
    ptx::cp_async_commit_group();
    a_.advance(), b_.advance();
    ++requested_;
    written_ = behind(written_);
  }

 private:
  static __device__ __forceinline__ uint32_t behind(uint32_t stage) {
    constexpr uint32_t kStageBytes = Memory<Op>::kStageBytes;
    return stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
  }
  typename Op::A::Copies a_;
  typename Op::B::Copies b_;
  uint32_t stages_, steps_, requested_ = 0, read_ = 0, written_ = 0;  // read_, written_: of the ring, in bytes
};

// The addresses of a lane's fragments in a stage.
struct Fragments {
  uint32_t left, right;
};
template <class Op> __device__ __forceinline__ Fragments fragments_of(uint32_t warp) {
  const uint32_t lane = threadIdx.x % 32;
  Fragments at{Op::A::left_address(0, warp / 2 * kSide, lane),
               Op::A::kBytes + Op::B::right_address(0, lane) + warp % 2 * kSide * kStepK * 2};
  ptx::settle(at.left), ptx::settle(at.right);
  return at;
}

// d += the products of a step. Calls between(0) and between(1) among the products, for the copies of a later step:
// their instructions take the time in which the tensor cores multiply.
template <class Op, class Between>
__device__ __forceinline__ void multiply(Square& sums, uint32_t stage, const Fragments& at, Between&& between) {
  using T = typename Op::Type;
#pragma unroll
  for (int k = 0; k < kStepK / 16; ++k) {
    uint32_t a[kSideBlocks][4];
#pragma unroll
    for (int r = 0; r < kSideBlocks; ++r) Op::A::fragment(a[r], stage + at.left, r, k);
#pragma unroll
    for (int n = 0; n < kSideBlocks; ++n) {
      uint32_t b[4];
      Op::B::fragment(b, stage + at.right, n, k);
      const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
      for (int r = 0; r < kSideBlocks; ++r) {
        float* const d = sums.d[r] + 8 * n;
        ptx::mma_m16n8k16(T{}, *reinterpret_cast<float(*)[4]>(d), a[r], low);
        ptx::mma_m16n8k16(T{}, *reinterpret_cast<float(*)[4]>(d + 4), a[r], high);
      }
      if (n == 1) between(k);
    }
  }
}
static_assert(kStepK / 16 == 2, "multiply() has a place for the copies of each operand");

// Two warps of the same 64 rows exchange halves of their sums, through kExchanged * 4 * kBlockThreads bytes of memory:
// the warp of the left columns keeps the upper 32 rows.
__device__ __forceinline__ void exchange(const Square& square, Rows& rows, void* memory, uint32_t warp) {
  const bool right = warp % 2 != 0;
  const uint32_t lane = threadIdx.x % 32;
  float4* const all = static_cast<float4*>(memory) + lane;
  const uint32_t mine = warp * kExchanged / 4 * 32, others = (warp ^ 1) * kExchanged / 4 * 32;
#pragma unroll
  for (int i = 0; i < kExchanged / 4; ++i) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = 4 * i / (kSide / 2), c = 4 * i % (kSide / 2) + e;
      x[e] = right ? square.d[r][c] : square.d[r + kRowBlocks][c];
    }
    all[mine + i * 32] = make_float4(x[0], x[1], x[2], x[3]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kExchanged / 4; ++i) {
    const float4 got = all[others + i * 32];
    const float x[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = 4 * i / (kSide / 2), c = 4 * i % (kSide / 2) + e;
      const float kept = right ? square.d[r + kRowBlocks][c] : square.d[r][c];
      rows.d[r][c] = right ? x[e] : kept;
      rows.d[r][kSide / 2 + c] = right ? kept : x[e];
    }
  }
  __syncthreads();  // the epilogue overwrites the memory
}

// A block for each tile.
template <class Op>
__global__ void __launch_bounds__(kBlockThreads, 2) portable_gemm_kernel(const __grid_constant__ Arguments<Op> p) {
  auto& m = *tile::dynamic_shared<Memory<Op>>();
  const uint32_t warp = threadIdx.x / 32;
  TileAt t;
  if (!p.schedule.walk(blockIdx.x, gridDim.x).next(t)) return;
  Square square;
#pragma unroll
  for (int i = 0; i < kSideBlocks * kSide / 2; ++i) square.d[i / (kSide / 2)][i % (kSide / 2)] = 0;
  Steps<Op> steps(p, m, t);
  const Fragments at = fragments_of<Op>(warp);
  const uint32_t whole = steps.whole();
  for (uint32_t step = 0; step < whole; ++step) {
    multiply<Op>(square, steps.wait(), at, [&](int operand) { steps.template request<true>(operand); });
    steps.commit();
  }
  for (uint32_t step = whole; step < steps.count(); ++step) {
    multiply<Op>(square, steps.wait(), at, [&](int operand) { steps.template request<false>(operand); });
    steps.commit();
  }
  __syncthreads();  // the exchange overwrites the stages
  Rows rows;
  exchange(square, rows, &m, warp);
  typename Op::Epilogue epilogue(p.epilogue, *reinterpret_cast<typename Op::Epilogue::Shared*>(&m), warp);
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r)
    epilogue(rows.d[r], {t.batch, t.m + (warp * kRowBlocks + r) * kWarpRows, t.m_end, t.n});
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
