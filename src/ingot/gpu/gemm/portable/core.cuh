#pragma once
// The matrix product kernel for GPUs from compute capability 8.0 on: cp.async, ldmatrix and mma.sync, with the
// schedules, pairs and epilogues of Hopper's form (../core.cuh). A product type takes the form of the core as a
// template parameter:
//     using A = typename Core::template Operand<T, Major::k, gemm::kTileM, false>;      Core: HopperCore, PortableCore
//
// A block of four warps computes a tile of 128 x 128, of which each warp multiplies 64 x 64: it reads 4,096 bytes of
// shared memory for 131,072 multiplications and additions, where 32 x 128 would read 5,120. Three steps of 32 elements
// of K fill 48 KB, so two blocks share a multiprocessor and hide each other's waits and epilogues. Over a long K, where
// epilogues count less and shared memory allows steps of 64 elements of 384 rows, 144 KB, a block of eight warps
// computes two tiles, one above the other: it copies a quarter less from L2, and waits half as often.
//
// Some epilogues need all 128 columns of a row in one warp. Before such an epilogue, the two warps that computed the
// same rows exchange halves of their sums. A fragment of mma.sync is laid out as wgmma's sums are. The exchange and the
// epilogue's panels reuse the steps' memory.
//
// Each sum is formed by one thread in one order, so results repeat bit for bit.
#include <cstdint>
#include <type_traits>

#include "ingot/gpu/device_limits.h"
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

constexpr int kSide = 64, kSideBlocks = kSide / 16;  // of a warp's part of the product
constexpr int kRowBlocks = 2;                        // of a warp in the epilogue: blocks of 16 rows
constexpr int kExchanged = kSide / 2 * kSide / 32;   // numbers of a thread that its warp gives to another warp
constexpr Tile kTile = kPortableTile;

// Whether an epilogue computes with all columns of a row at once. Store takes any whole panels.
template <class Epilogue> constexpr bool kNeedsRows = true;
template <class T, class Finish, int kMatrices, int kPanels, class Core>
constexpr bool kNeedsRows<Store<T, Finish, kMatrices, kPanels, Core>> = false;

// The sizes of a thread block that computes kHeight tiles of 128 x 128 with the same columns and neighbouring rows.
template <int kHeight> struct Block {
  static constexpr int kRows = kHeight * kTileM, kThreads = kHeight * 128;
  static constexpr int kStepK = kHeight == 1 ? 32 : 64, kStages = 3;
  static constexpr uint32_t kStepsOfTileK = kTileK / kStepK;  // schedules count steps of kTileK
  static constexpr int kResident = 2 / kHeight;               // such blocks on a multiprocessor: registers
};

template <class Op, int kHeight> struct Form : Block<kHeight> {
  using Type = typename Op::Type;
  using A = typename Op::A::template Staged<Form::kRows, Form>;
  using B = typename Op::B::template Staged<kTile.n, Form>;
  static constexpr uint32_t kStageBytes = A::kBytes + B::kBytes;
};

// The exchange and the epilogue reuse the stages.
template <class Op, int kHeight> union Memory {
  using F = Form<Op, kHeight>;
  alignas(1024) char stage[F::kStages][F::kStageBytes];
  typename Op::Epilogue::Shared epilogue;
  char exchanged[kNeedsRows<typename Op::Epilogue> ? kExchanged * 4 * F::kThreads : 1];
  static_assert(sizeof(epilogue) <= sizeof(stage) && sizeof(exchanged) <= sizeof(stage), "the stages are the largest");
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
template <class Op, int kHeight> class Steps {
  using F = Form<Op, kHeight>;

 public:
  __device__ __forceinline__ Steps(const Arguments<Op>& p, Memory<Op, kHeight>& m, const TileAt& t)
      : a_(p.a, t, t.m), b_(p.b, t, t.n), stages_(ptx::shared_address(&m)), steps_(t.k_steps * F::kStepsOfTileK) {
    ptx::settle(stages_);
#pragma unroll
    for (int s = 0; s + 1 < F::kStages; ++s) {
      request<false>(0), request<false>(1);
      commit();
    }
  }
  __device__ __forceinline__ uint32_t count() const { return steps_; }
  // The number of steps, from the first on, during which request<true>() may be used: the step that they request,
  // kStages - 1 steps later, is a whole step.
  __device__ __forceinline__ uint32_t whole() const {
    const uint32_t steps = min(min(a_.whole_steps(), b_.whole_steps()), steps_);
    return steps < F::kStages - 1 ? 0 : steps - (F::kStages - 1);
  }
  // Waits for the next step and returns its address. The stage of the preceding step is then free for a request.
  __device__ __forceinline__ uint32_t wait() {
    ptx::cp_async_wait_group<F::kStages - 2>();
    __syncthreads();
    const uint32_t stage = stages_ + read_;
    read_ = behind(read_);
    return stage;
  }
  // Requests operand 0 or 1 of the first step that has not been requested yet. kWhole: this step is one of the whole
  // steps.
  template <bool kWhole> __device__ __forceinline__ void request(int operand) const {
    if (!kWhole && requested_ >= steps_) return;
    const uint32_t to = stages_ + written_;
    if (operand == 0)
#pragma unroll
      for (uint32_t i = 0; i < F::A::kCopies; ++i) a_.template request<kWhole>(to, i);
    else
#pragma unroll
      for (uint32_t i = 0; i < F::B::kCopies; ++i) b_.template request<kWhole>(to + F::A::kBytes, i);
  }
  // Call after both requests of a step. Each call makes one group of copies. Beyond the last step the groups are empty,
  // so that wait() can count groups in the same way for all steps.
  __device__ __forceinline__ void commit() {
    ptx::cp_async_commit_group();
    a_.advance(), b_.advance();
    ++requested_;
    written_ = behind(written_);
  }

 private:
  static __device__ __forceinline__ uint32_t behind(uint32_t stage) {
    return stage == (F::kStages - 1) * F::kStageBytes ? 0 : stage + F::kStageBytes;
  }
  typename F::A::Copies a_;
  typename F::B::Copies b_;
  uint32_t stages_, steps_, requested_ = 0, read_ = 0, written_ = 0;  // read_, written_: of the ring, in bytes
};

// A warp's fragments and its sums. The fragments of a part of a step (16 elements of K) are loaded during the products
// of the preceding part, so that no product waits for a load. During the last part, the first fragments of the next
// step are loaded.
template <class F> class Products {
 public:
  __device__ __forceinline__ explicit Products(uint32_t warp)
      : left_(F::A::left_address(warp / 2 * kSide, threadIdx.x % 32)),
        right_(F::A::kBytes + F::B::right_address(warp % 2 * kSide, threadIdx.x % 32)) {
    ptx::settle(left_), ptx::settle(right_);
#pragma unroll
    for (int i = 0; i < kSideBlocks * kSide / 2; ++i) sums.d[i / (kSide / 2)][i % (kSide / 2)] = 0;
  }
  // The first step is at `stage`.
  __device__ __forceinline__ void begin(uint32_t stage) {
    stage_ = stage;
    load_left(0, 0);
#pragma unroll
    for (int n = 0; n < kSideBlocks; ++n) load_right(0, n, 0);
  }
  // Adds the products of a step. Calls request(0) and request(1) among the products, for the copies of a later step:
  // their instructions take the time in which the tensor cores multiply. Then wait() returns the address of the next
  // step; this step's stage is free from then on.
  template <class Request, class Wait> __device__ __forceinline__ void step(Request&& request, Wait&& wait) {
    constexpr int kParts = F::kStepK / 16;
    static_assert(kParts % 2 == 0, "a step begins with the first set of fragments");
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      const int next = (k + 1) % kParts, set = k % 2;
      if (next == 0) stage_ = wait();
      load_left(1 - set, next);
#pragma unroll
      for (int n = 0; n < kSideBlocks; ++n) {
        load_right(1 - set, n, next);
        multiply(set, n);
        if (k == 0 && n == 1) request(0);
        if (k == 0 && n == kSideBlocks - 1) request(1);
      }
    }
  }
  Square sums;

 private:
  __device__ __forceinline__ void load_left(int set, int k) {
#pragma unroll
    for (int r = 0; r < kSideBlocks; ++r) F::A::fragment(a_[set][r], stage_ + left_, r, k);
  }
  __device__ __forceinline__ void load_right(int set, int n, int k) {
    F::B::fragment(b_[set][n], stage_ + right_, n, k);
  }
  __device__ __forceinline__ void multiply(int set, int n) {
    using T = typename F::Type;
    const uint32_t(&b)[4] = b_[set][n];
    const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
    for (int r = 0; r < kSideBlocks; ++r) {
      float* const d = sums.d[r] + 8 * n;
      ptx::mma_m16n8k16(T{}, *reinterpret_cast<float(*)[4]>(d), a_[set][r], low);
      ptx::mma_m16n8k16(T{}, *reinterpret_cast<float(*)[4]>(d + 4), a_[set][r], high);
    }
  }
  uint32_t left_, right_, stage_ = 0;
  uint32_t a_[2][kSideBlocks][4], b_[2][kSideBlocks][4];
};

// Two warps of the same 64 rows exchange halves of their sums, through kExchanged * 4 bytes of memory per thread:
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

template <class Op, int kHeight>
__device__ __forceinline__ void store(const Arguments<Op>& p, Memory<Op, kHeight>& m, const TileAt& t, Square& sums,
                                      uint32_t warp) {
  typename Op::Epilogue epilogue(p.epilogue, m.epilogue, warp);
  if constexpr (kNeedsRows<typename Op::Epilogue>) {
    Rows rows;
    exchange(sums, rows, &m, warp);
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r)
      epilogue(rows.d[r], {t.batch, t.m + (warp * kRowBlocks + r) * kWarpRows, t.m_end, t.n});
  } else {
#pragma unroll
    for (int r = 0; r < kSideBlocks; ++r)
      epilogue(sums.d[r], {t.batch, t.m + warp / 2 * kSide + r * kWarpRows, t.m_end, t.n + warp % 2 * kSide});
  }
  epilogue.end();
}

// A block for each kHeight tiles.
template <class Op, int kHeight>
__global__ void __launch_bounds__(Block<kHeight>::kThreads, Block<kHeight>::kResident)
    portable_gemm_kernel(const __grid_constant__ Arguments<Op> p) {
  auto& m = *tile::dynamic_shared<Memory<Op, kHeight>>();
  const uint32_t warp = threadIdx.x / 32;
  TileAt t;
  if (!p.schedule.walk(blockIdx.x, gridDim.x).next(t)) return;
  Steps<Op, kHeight> steps(p, m, t);
  Products<Form<Op, kHeight>> products(warp);
  const auto wait = [&] { return steps.wait(); };
  products.begin(wait());
  const uint32_t whole = steps.whole();
  for (uint32_t step = 0; step < whole; ++step)
    products.step(
        [&](int operand) {
          steps.template request<true>(operand);
          if (operand == 1) steps.commit();
        },
        wait);
  for (uint32_t step = whole; step < steps.count(); ++step)
    products.step(
        [&](int operand) {
          steps.template request<false>(operand);
          if (operand == 1) steps.commit();
        },
        wait);
  __syncthreads();  // the exchange and the epilogue overwrite the stages
  store<Op, kHeight>(p, m, t, products.sums, warp);
}

// The grid of blocks that compute two tiles of `g` each.
inline Grid paired(const Grid& g) {
  const int64_t batch = int64_t(g.tiles) / (int64_t(g.m_tiles) * g.n_tiles);
  return Grid::of({g.m, int64_t(g.n_tiles) * g.tile_n, int64_t(g.k_steps) * kTileK, batch},
                  {.n = int(g.tile_n), .cluster = 2});
}
// Whether a product has kernels whose blocks compute two tiles. Products with the schedule Grid have them, unless the
// member kPairsTiles states the choice.
template <class Op> constexpr bool has_pairs() {
  if constexpr (requires { Op::kPairsTiles; }) return Op::kPairsTiles;
  return std::is_same_v<typename Op::Schedule, Grid>;
}
// Whether blocks of two tiles, which take `bytes` of shared memory, are faster. Only one such block fits on a
// multiprocessor, so no second block hides its epilogue, which costs too much where K is short (measured:
// docs/lab/portable.md). The model's times, in units of half the time of two one-tile blocks that share a
// multiprocessor: 2 for these two blocks, 1.2 for one of them alone, and 1.9 for a block of two tiles.
inline bool pairs_tiles(const Grid& g, int64_t bytes, const gpu::Limits& limits) {
  constexpr uint32_t kLongK = 2048;
  if (bytes > limits.smem_per_block || g.k_steps < kLongK / kTileK) return false;
  const int64_t at_once = 2 * int64_t(limits.sms), last = g.tiles % at_once;
  const double apart = 2. * double(g.tiles / at_once) + (last == 0 ? 0 : last <= limits.sms ? 1.2 : 2);
  const int64_t pairs = int64_t(g.tiles) / g.m_tiles * ceil_div(g.m_tiles, 2);
  return 1.9 * double(ceil_div(pairs, limits.sms)) < apart;
}
template <class Op, int kHeight>
void launch(const char* name, const Arguments<Op>& p, int device, Stream stream, int64_t blocks) {
  gpu::launch(name, portable_gemm_kernel<Op, kHeight>,
              {.grid = blocks,
               .block = Block<kHeight>::kThreads,
               .smem = int64_t(sizeof(Memory<Op, kHeight>)),
               .device = device},
              stream, p);
}
// The same products by blocks of two tiles.
template <class Op> void launch_pairs(const char* name, Arguments<Op> p, int device, Stream stream) {
  p.schedule = paired(p.schedule);
  launch<Op, 2>(name, p, device, stream, p.schedule.tiles);
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
    if constexpr (portable::has_pairs<Op>()) {
      const gpu::Limits& limits = gpu::device_limits({Device::cuda, device});
      if (portable::pairs_tiles(p.schedule, sizeof(portable::Memory<Op, 2>), limits))
        return portable::launch_pairs<Op>(name, p, device, stream);
    }
    portable::launch<Op, 1>(name, p, device, stream, tiles);
  }
};

}  // namespace ingot::gemm
