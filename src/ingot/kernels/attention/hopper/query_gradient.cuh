#pragma once
// dQ: the walk of the forward kernel, with dO beside Q. The products S = Q K^T and dP = dO V^T run together; dS = P (dP
// - delta) in registers is the operand of dQ += dS K; this product runs during the next step's products.
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/attention/hopper/backward.h"
#include "ingot/kernels/attention/hopper/walk.cuh"
#include "ingot/kernels/attention/parts/fragments.cuh"

namespace ingot::cuda::attention_hopper {

template <class T_, int kWidth_, int kGroups_, int kKeys_, int kStages_, bool kCapped_, bool kTurns_>
struct QueryKernelForm {
  using T = T_;
  static constexpr int kWidth = kWidth_, kGroups = kGroups_, kKeys = kKeys_, kStages = kStages_;
  static constexpr bool kCapped = kCapped_, kTurns = kTurns_;
  static constexpr int kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1), kPanels = kWidth / 64;
  static constexpr uint32_t kPanelQ = kRows * 128, kPanelK = kKeys * 128;
  static constexpr int kRowOperands = 2;  // Q and dO
  static constexpr bool kZeroKeys = true, kZeroValues = false;
  static constexpr int kFetcherRegisters = kGroups == 2 ? 24 : 32, kMultiplierRegisters = kGroups == 2 ? 240 : 160;
};

template <class F> struct QueryGradient {
  using T = typename F::T;
  static constexpr auto kB128 = tile::Swizzle::b128;

  WalkMemory<F>& memory;
  const QueryGradientParams& p;
  uint32_t group, warp, g, t;
  tile::RingCursor<F::kStages> ring = {};
  Tile tile_ = {};
  float s[F::kKeys / 2], dp[F::kKeys / 2], dq[F::kWidth / 2];
  uint32_t a[F::kKeys / 16][4];  // dS
  float lse[2], delta[2];        // of the thread's rows; lse in powers of two

  __device__ __forceinline__ void run() {
    const Turn<F> turn{group};
    turn.begin();
    for (uint32_t tiles = 0;; ++tiles) {
      tile::wait_warp_or_trap(&memory.q_full, tiles & 1);
      tile_ = memory.tile;
      if (tile_.steps < 0) break;
      take_tile(turn);
    }
    turn.end();
  }

  __device__ __forceinline__ int row_of(int r) const {
    return tile_.first + 64 * int(group) + 16 * int(warp) + int(g) + 8 * r;
  }
  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  // Skips a step of keys that is invisible to these 64 queries.
  __device__ __forceinline__ void pass_over(const Turn<F>& turn) {
    turn.await();
    turn.pass();
    tile::wait_warp_or_trap(&memory.k_full[ring.stage], ring.phase);
    release(&memory.k_empty[ring.stage]);
    tile::wait_warp_or_trap(&memory.v_full[ring.stage], ring.phase);
    release(&memory.v_empty[ring.stage]);
    ring.advance();
  }

  __device__ __forceinline__ void take_tile(const Turn<F>& turn) {
#pragma unroll
    for (float& x : dq) x = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool there = row_of(r) < tile_.queries;
      const int64_t token = int64_t(tile_.q_begin) + row_of(r);
      lse[r] = there ? p.scores.lse[tile_.head * p.scores.lse_stride + token] * kLog2E : INFINITY;
      delta[r] = there ? p.scores.delta[tile_.head * p.scores.delta_stride + token] : 0;
    }
    // The block's steps visible to these 64 queries; keys invisible to a row are masked.
    const detail::StepRange seen =
        detail::steps_seen(tile_.first + 64 * int(group), tile_.queries, tile_.keys, p.walk.causal, p.walk.window,
                           F::kKeys, tile_.begin, tile_.begin + tile_.steps);
    uint32_t before = 0;
    int n = tile_.begin + tile_.steps - 1;
    for (; n >= seen.end; --n) pass_over(turn);
    for (; n >= seen.begin; --n) {
      step(turn, n, n != seen.end - 1, before);
      before = ring.stage;
      ring.advance();
    }
    release(&memory.q_empty);
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(dq);
    if (F::kStages > 1 && seen.end > seen.begin) release(&memory.k_empty[before]);
    for (; n >= tile_.begin; --n) pass_over(turn);
    finish();
  }

  __device__ __forceinline__ void step(const Turn<F>& turn, int n, bool has_before, uint32_t before) {
    tile::wait_warp_or_trap(&memory.k_full[ring.stage], ring.phase);
    turn.await();
    const uint32_t k = ptx::shared_address(memory.k[ring.stage]), v = ptx::shared_address(memory.v[ring.stage]);
    issue(s, ptx::shared_address(memory.rows[0]), k);
    tile::wait_warp_or_trap(&memory.v_full[ring.stage], ring.phase);
    issue(dp, ptx::shared_address(memory.rows[1]), v);
    turn.pass();
    ptx::wgmma_wait_group<1>();  // the products of the step before are complete too
    ptx::fence_registers(s);
    if (F::kStages > 1 && has_before) release(&memory.k_empty[before]);
    probabilities();
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(dp);
    release(&memory.v_empty[ring.stage]);
#pragma unroll
    for (int i = 0; i < F::kKeys / 2; ++i) dp[i] = s[i] * (dp[i] - delta[i / 2 % 2]);
    if constexpr (F::kCapped) slope_of_cap();
    if (is_masked(n)) mask(dp, n);
    pack_operand<T>(a, dp);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < F::kKeys / 16; ++i)
      ptx::wgmma<T, F::kWidth, ptx::Major::mn>(dq, a[i], tile::operand<ptx::Major::mn, kB128>(k, 16 * i, F::kPanelK),
                                               true);
    ptx::wgmma_commit_group();
    if constexpr (F::kStages == 1) {  // the next step's K needs this memory
      ptx::wgmma_wait_group<0>();
      ptx::fence_registers(dq);
      release(&memory.k_empty[ring.stage]);
    }
  }

  __device__ __forceinline__ void issue(float (&d)[F::kKeys / 2], uint32_t rows, uint32_t keys) {
    rows += group * 64 * 128;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < F::kWidth / 16; ++i)
      ptx::wgmma<T, F::kKeys>(d, tile::operand<ptx::Major::k, kB128>(rows, 16 * i, F::kPanelQ),
                              tile::operand<ptx::Major::k, kB128>(keys, 16 * i, F::kPanelK), i > 0);
    ptx::wgmma_commit_group();
  }

  float slope[F::kCapped ? F::kKeys / 2 : 1];
  __device__ __forceinline__ void slope_of_cap() {
#pragma unroll
    for (int i = 0; i < F::kKeys / 2; ++i) dp[i] *= slope[F::kCapped ? i : 0];
  }

  __device__ __forceinline__ void probabilities() {
#pragma unroll
    for (int i = 0; i < F::kKeys / 2; ++i) {
      const Probability x = probability<F::kCapped>(p.scores, s[i], lse[i / 2 % 2]);
      if constexpr (F::kCapped) slope[i] = x.slope;
      s[i] = x.value;
    }
  }
  // Masks keys invisible to a row, in the scores or their gradients; rows beyond the segment may have any numbers.
  __device__ __forceinline__ void mask(float (&d)[F::kKeys / 2], int n) const {
    const int column = n * F::kKeys + 2 * int(t);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const detail::KeyRange seen =
          detail::keys_seen(row_of(r), row_of(r) + 1, tile_.queries, tile_.keys, p.walk.causal, p.walk.window);
      const int low = int(seen.begin) - column, end = int(seen.end) - column;
#pragma unroll
      for (int j = 0; j < F::kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e < low || 8 * j + e >= end) d[4 * j + 2 * r + e] = 0;
    }
  }
  __device__ __forceinline__ bool is_masked(int n) const {
    const int first = tile_.first + 64 * int(group), begin = n * F::kKeys, end = begin + F::kKeys;
    if (end > tile_.keys) return true;
    if (!p.walk.causal) return false;
    const int offset = tile_.keys - tile_.queries + 1;
    return end > first + offset || (p.walk.window > 0 && begin < first + 63 + offset - p.walk.window);
  }

  __device__ __forceinline__ void finish() {
    const float scale[2] = {p.scores.scale, p.scores.scale};
    T* row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      row[r] = row_of(r) < tile_.queries
                   ? static_cast<T*>(p.dq) + (int64_t(tile_.q_begin) + row_of(r)) * p.dq_strides.token +
                         tile_.head * p.dq_strides.head
                   : nullptr;
    store_rows<T>(dq, scale, row, p.scores.width, t);
  }
};

template <class F>
__global__ void __launch_bounds__(F::kThreads, 1)
    attention_query_gradient(const __grid_constant__ WalkMaps maps, const __grid_constant__ QueryGradientParams p) {
  auto& memory = *tile::dynamic_shared<WalkMemory<F>>();
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  prepare_barriers<F>(memory);
  __syncthreads();
  if (warp < 4) {
    ptx::decrease_registers<F::kFetcherRegisters>();
    if (warp == 0) KeyFetcher<F>{.memory = memory, .maps = maps, .w = p.walk, .lane = lane}.run();
  } else {
    ptx::increase_registers<F::kMultiplierRegisters>();
    QueryGradient<F>{.memory = memory, .p = p, .group = warp / 4 - 1, .warp = warp % 4, .g = lane / 4, .t = lane % 4}
        .run();
  }
}

template <class F> QueryGradientKernel query_gradient_kernel_of() {
  return {attention_query_gradient<F>, F::kRows, F::kKeys, F::kThreads, int64_t(sizeof(WalkMemory<F>))};
}
template <class T, bool kCapped> QueryGradientKernel query_gradient_kernel_for(int width) {
  if (width <= 64) return query_gradient_kernel_of<QueryKernelForm<T, 64, 3, 64, 4, kCapped, false>>();
  if (width <= 128) return query_gradient_kernel_of<QueryKernelForm<T, 128, 2, kCapped ? 64 : 96, 2, kCapped, true>>();
  return query_gradient_kernel_of<QueryKernelForm<T, 256, 2, kCapped ? 32 : 64, 1, kCapped, false>>();
}
template <class T> QueryGradientKernel query_gradient_kernel(int width, bool capped) {
  return capped ? query_gradient_kernel_for<T, true>(width) : query_gradient_kernel_for<T, false>(width);
}

}  // namespace ingot::cuda::attention_hopper
