#pragma once
// Attention's forward kernel for Hopper. One block per SM takes tiles of queries of a head in turn. A warp loads Q,
// then K and V through a ring, a step of keys at a time, from the last visible step of the tile to the first, and runs
// ahead into the next tile. Each of two or three warpgroups takes 64 of the tile's queries: S = Q K^T in registers,
// softmax in place, and P, packed, is the register operand of O += P V. The product S of a step runs together with the
// product P V of the preceding step. The softmax runs during that product P V and the products of other warpgroups.
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/ring.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/attention/hopper/forward.h"
#include "ingot/kernels/attention/hopper/walk.cuh"
#include "ingot/kernels/attention/parts/fragments.cuh"
#include "ingot/kernels/attention/parts/tiles.h"

namespace ingot::cuda::attention_hopper {

constexpr float kLn2 = 0.69314718f;

template <class T_, int kWidth_, int kGroups_, int kKeys_, int kStages_, bool kCapped_, bool kTurns_>
struct ForwardForm {
  using T = T_;
  static constexpr int kWidth = kWidth_, kGroups = kGroups_, kKeys = kKeys_, kStages = kStages_;
  static constexpr bool kCapped = kCapped_, kTurns = kTurns_;
  static constexpr int kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1), kPanels = kWidth / 64;
  static constexpr uint32_t kPanelQ = kRows * 128, kPanelK = kKeys * 128;  // bytes of 64 columns
  static constexpr int kRowOperands = 1;                                   // Q
  static constexpr bool kZeroKeys = false, kZeroValues = true;
  static constexpr int kFetcherRegisters = kGroups == 2 ? 24 : 32, kMultiplierRegisters = kGroups == 2 ? 240 : 160;
};

// --- a multiplying warpgroup -------------------------------------------------------------------------------------

template <class F> struct Multiplier {
  using T = typename F::T;
  static constexpr auto kB128 = tile::Swizzle::b128;

  WalkMemory<F>& memory;
  const ForwardParams& p;
  uint32_t group, warp, g, t;  // warpgroup; its warp; row and column of the thread in its warp's fragments
  tile::RingCursor<F::kStages> ring;
  Tile tile_ = {};
  float s[F::kKeys / 2], o[F::kWidth / 2];
  uint32_t a[F::kKeys / 16][4];  // P
  float high[2], sum[2];         // of the thread's two rows: the largest score, the sum of the thread's powers

  __device__ __forceinline__ void run() {
    if (group == F::kGroups - 1) pass_turn();  // the last warpgroup passes the turn to the first
    for (uint32_t tiles = 0;; ++tiles) {
      tile::wait_warp_or_trap(&memory.q_full, tiles & 1);
      tile_ = memory.tile;
      if (tile_.steps < 0) break;
      take_tile();
    }
    if (group == 0) await_turn();  // no warpgroup may end while another one still arrives at its barrier
  }

  // Finds the steps of keys that are visible to this warpgroup's 64 queries, among the block's steps.
  __device__ __forceinline__ void take_tile() {
    const int first = tile_.first + 64 * int(group), end = min(first + 64, tile_.queries);
    int low = tile_.begin, high_step = tile_.begin;
    if (first < end) {
      const detail::KeyRange seen =
          detail::keys_seen(first, end, tile_.queries, tile_.keys, p.walk.causal, p.walk.window);
      if (seen.end > seen.begin) low = int(seen.begin / F::kKeys), high_step = int((seen.end - 1) / F::kKeys) + 1;
    }
    if (low == high_step) low = high_step = tile_.begin;
    begin_rows();
    int n = tile_.begin + tile_.steps - 1;
    for (; n >= high_step; --n) pass_over();
    if (low < high_step) {
      multiply(n, low);
      n = low - 1;
    } else {
      release(&memory.q_empty);
    }
    for (; n >= tile_.begin; --n) pass_over();
    finish(first);
  }

  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }
  // The warpgroups issue their products in turns, so that the softmax of a warpgroup runs during the products of the
  // rest. Each warpgroup takes a turn for every step of the tile, also for steps that are invisible to its queries.
  __device__ __forceinline__ void await_turn() {
    if constexpr (F::kTurns) ptx::barrier_sync_unaligned(1 + group, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (F::kTurns) ptx::barrier_arrive(1 + (group + 1) % F::kGroups, 256);
  }
  __device__ __forceinline__ void pass_over() {
    await_turn();
    pass_turn();
    tile::wait_warp_or_trap(&memory.k_full[ring.stage], ring.phase);
    release(&memory.k_empty[ring.stage]);
    tile::wait_warp_or_trap(&memory.v_full[ring.stage], ring.phase);
    release(&memory.v_empty[ring.stage]);
    ring.advance();
  }

  // Without a cap, scores are compared unscaled, and this function returns the factor that converts a score to an
  // exponent of two. Capped scores already are exponents of two.
  __device__ __forceinline__ float unit() const { return F::kCapped ? 1.f : p.scale_log2; }

  // A sink acts as a first key with value zero, visible to all queries.
  __device__ __forceinline__ void begin_rows() {
#pragma unroll
    for (float& x : o) x = 0;
    const float sink = p.sinks == nullptr ? -INFINITY
                       : p.sinks_f32      ? static_cast<const float*>(p.sinks)[tile_.head]
                                          : tile::to_float(static_cast<const T*>(p.sinks)[tile_.head]);
    high[0] = high[1] = sink * kLog2E / unit();
    sum[0] = sum[1] = p.sinks != nullptr && t == 0 ? 1.f : 0.f;
  }

  __device__ __forceinline__ void issue_scores() {
    const uint32_t q = ptx::shared_address(memory.rows[0]) + group * 64 * 128;
    const uint32_t k = ptx::shared_address(memory.k[ring.stage]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < F::kWidth / 16; ++i)
      ptx::wgmma<T, F::kKeys>(s, tile::operand<ptx::Major::k, kB128>(q, 16 * i, F::kPanelQ),
                              tile::operand<ptx::Major::k, kB128>(k, 16 * i, F::kPanelK), i > 0);
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_values(uint32_t stage) {
    const uint32_t v = ptx::shared_address(memory.v[stage]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < F::kKeys / 16; ++i)
      ptx::wgmma<T, F::kWidth, ptx::Major::mn>(o, a[i], tile::operand<ptx::Major::mn, kB128>(v, 16 * i, F::kPanelK),
                                               true);
    ptx::wgmma_commit_group();
  }

  // Steps n down to `last`: the product of a step's scores runs together with the product of the values of the step
  // before.
  __device__ __forceinline__ void multiply(int n, int last) {
    tile::wait_warp_or_trap(&memory.k_full[ring.stage], ring.phase);
    await_turn();
    issue_scores();
    pass_turn();
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(s);
    release(&memory.k_empty[ring.stage]);
    if (n == last) release(&memory.q_empty);
    float shrink[2];
    softmax(n, shrink);
    pack_operand<T>(a, s);
    while (--n >= last) {
      const uint32_t stage = ring.stage, phase = ring.phase;
      ring.advance();
      tile::wait_warp_or_trap(&memory.k_full[ring.stage], ring.phase);
      await_turn();
      issue_scores();
      tile::wait_warp_or_trap(&memory.v_full[stage], phase);
      issue_values(stage);
      pass_turn();
      ptx::wgmma_wait_group<1>();
      ptx::fence_registers(s);
      release(&memory.k_empty[ring.stage]);
      if (n == last) release(&memory.q_empty);
      softmax(n, shrink);
      ptx::wgmma_wait_group<0>();
      ptx::fence_registers(o);
      release(&memory.v_empty[stage]);
#pragma unroll
      for (int i = 0; i < F::kWidth / 2; ++i) o[i] *= shrink[i / 2 % 2];
      pack_operand<T>(a, s);
    }
    tile::wait_warp_or_trap(&memory.v_full[ring.stage], ring.phase);
    issue_values(ring.stage);
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(o);
    release(&memory.v_empty[ring.stage]);
    ring.advance();
  }

  // Turns the scores of step n into powers relative to the rows' largest score so far; shrink: the factor for older
  // sums.
  __device__ __forceinline__ void softmax(int n, float (&shrink)[2]) {
    if constexpr (F::kCapped) {
#pragma unroll
      for (float& x : s) x = capped(x, p.cap_in, p.cap_out);
    }
    if (is_masked(n)) mask(n);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = high[r];
#pragma unroll
      for (int j = 0; j < F::kKeys / 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      top = quad_max(top);
      const float base = (top == -INFINITY ? 0.f : top) * unit();  // no key seen so far: all powers are 0
      shrink[r] = ptx::exp2_approx(high[r] * unit() - base);
      high[r] = top;
      float added = 0;
#pragma unroll
      for (int j = 0; j < F::kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          x = ptx::exp2_approx(x * unit() - base);
          added += x;
        }
      sum[r] = sum[r] * shrink[r] + added;
    }
  }

  // Whether some row of the warpgroup does not see some key of step n.
  __device__ __forceinline__ bool is_masked(int n) const {
    const int first = tile_.first + 64 * int(group), begin = n * F::kKeys, end = begin + F::kKeys;
    if (end > tile_.keys) return true;
    if (!p.walk.causal) return false;
    const int offset = tile_.keys - tile_.queries + 1;
    return end > first + offset || (p.walk.window > 0 && begin < first + 63 + offset - p.walk.window);
  }
  __device__ __forceinline__ void mask(int n) {
    const int column = n * F::kKeys + 2 * int(t);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = tile_.first + 64 * int(group) + 16 * int(warp) + int(g) + 8 * r;
      const detail::KeyRange seen =
          detail::keys_seen(row, row + 1, tile_.queries, tile_.keys, p.walk.causal, p.walk.window);
      const int low = int(seen.begin) - column, end = int(seen.end) - column;
#pragma unroll
      for (int j = 0; j < F::kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e < low || 8 * j + e >= end) s[4 * j + 2 * r + e] = -INFINITY;
    }
  }

  __device__ __forceinline__ void finish(int first) {
    float scale[2];
    T* row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first + 16 * int(warp) + int(g) + 8 * r;
      const int64_t token = int64_t(tile_.q_begin) + i;
      const float all = quad_sum(sum[r]);
      scale[r] = all == 0 ? 0.f : 1 / all;
      row[r] = i < tile_.queries
                   ? static_cast<T*>(p.out) + token * p.out_strides.token + tile_.head * p.out_strides.head
                   : nullptr;
      if (p.lse != nullptr && i < tile_.queries && t == 0)
        p.lse[tile_.head * p.lse_stride + token] = all == 0 ? -INFINITY : high[r] * unit() * kLn2 + logf(all);
    }
    store_rows<T>(o, scale, row, p.width, t);
  }
};

template <class F>
__global__ void __launch_bounds__(F::kThreads, 1)
    attention_forward(const __grid_constant__ WalkMaps maps, const __grid_constant__ ForwardParams p) {
  auto& memory = *tile::dynamic_shared<WalkMemory<F>>();
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  prepare_barriers<F>(memory);
  __syncthreads();
  if (warp < 4) {
    ptx::decrease_registers<F::kFetcherRegisters>();
    if (warp == 0) KeyFetcher<F>{.memory = memory, .maps = maps, .w = p.walk, .lane = lane}.run();
  } else {
    ptx::increase_registers<F::kMultiplierRegisters>();
    Multiplier<F>{.memory = memory, .p = p, .group = warp / 4 - 1, .warp = warp % 4, .g = lane / 4, .t = lane % 4}
        .run();
  }
}

template <class F> ForwardKernel forward_kernel_of() {
  return {attention_forward<F>, F::kRows, F::kKeys, F::kThreads, int64_t(sizeof(WalkMemory<F>))};
}
template <class T, bool kCapped> ForwardKernel forward_kernel_for(int width) {
  if (width <= 64) return forward_kernel_of<ForwardForm<T, 64, 3, 128, 3, kCapped, true>>();
  if (width <= 128) return forward_kernel_of<ForwardForm<T, 128, 3, 80, 2, kCapped, true>>();
  return forward_kernel_of<ForwardForm<T, 256, 2, 64, 2, kCapped, false>>();
}
template <class T> ForwardKernel forward_kernel(int width, bool capped) {
  return capped ? forward_kernel_for<T, true>(width) : forward_kernel_for<T, false>(width);
}

}  // namespace ingot::cuda::attention_hopper
