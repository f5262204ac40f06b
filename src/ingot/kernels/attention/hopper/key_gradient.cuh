#pragma once
// dK and dV. A block takes tiles of keys of a key head in turn. One warp fetches the operands (query_fetcher.cuh), and
// two warpgroups multiply. Products are transposed, keys by queries: P^T and dS^T are the register operands of
// dV += P^T dO and dK += dS^T Q, and these products run during the next step's scores. All query heads of the group add
// to the same registers.
//
// Up to 128 wide each of the two warpgroups has 64 of the keys. Above this width, registers hold only one of the two
// sums: both warpgroups have the same 64 keys; the first computes dV, the second dK.
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/attention/hopper/key_gradient_form.cuh"
#include "ingot/kernels/attention/hopper/query_fetcher.cuh"

namespace ingot::cuda::attention_hopper {

// A multiplying warpgroup. kDv, kDk: whether it computes dV, and whether it computes dK.
template <class F, bool kDv, bool kDk> struct KeyGradient {
  using T = typename F::T;
  static constexpr auto kB128 = tile::Swizzle::b128;

  KeyMemory<F>& memory;
  const KeyGradientParams& p;
  uint32_t group, warp, g, t;  // group selects 64 of the keys; warp: of the warpgroup; lane 4 g + t
  std::conditional_t<F::kAddsQueries, QuerySums<F>, NoQuerySums> sums = {};
  tile::RingCursor<F::kStages> ring = {};
  KeyTile key_tile = {};
  float s[F::kQueries / 2];             // S^T, then P^T
  float dp[kDk ? F::kQueries / 2 : 2];  // dP^T, then dS^T
  float dk[kDk ? F::kWidth / 2 : 4], dv[kDv ? F::kWidth / 2 : 4];
  uint32_t a[F::kQueries / 16][4], b[F::kQueries / 16][4];  // P^T, dS^T
  float slope[F::kCapped ? F::kQueries / 2 : 1];            // of the cap

  __device__ __forceinline__ void run() {
    if constexpr (F::kAddsQueries) {
      sums.shared = &memory.scores, sums.barriers = &memory.scores_barriers, sums.p = &p;
      sums.k = ptx::shared_address(memory.k), sums.group = group, sums.warp = warp;
    }
    for (uint32_t tiles = 0;; ++tiles) {
      tile::wait_warp_or_trap(&memory.kv_full, tiles & 1);
      key_tile = memory.tile;
      if (key_tile.steps < 0) break;
      take_tile();
    }
  }

  __device__ __forceinline__ int key_of(int r) const {
    return key_tile.first + 64 * int(group) + 16 * int(warp) + int(g) + 8 * r;
  }
  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ uint32_t stage_before() const { return (ring.stage == 0 ? F::kStages : ring.stage) - 1; }

  // Skips a step whose queries see none of these 64 keys.
  __device__ __forceinline__ void skip_step() {
    tile::wait_warp_or_trap(&memory.q_full[ring.stage], ring.phase);
    release(&memory.q_empty[ring.stage]);
    ring.advance();
  }
  __device__ __forceinline__ void end_sums() {
    ptx::wgmma_wait_group<0>();
    if constexpr (kDk) ptx::fence_registers(dk);
    if constexpr (kDv) ptx::fence_registers(dv);
  }

  __device__ __forceinline__ void take_tile() {
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;
    const int end = key_tile.begin + key_tile.steps;
    const detail::StepRange seeing =
        detail::steps_seeing(key_tile.first + 64 * int(group), key_tile.queries, key_tile.keys, p.walk.causal,
                             p.walk.window, F::kQueries, key_tile.begin, end);
    bool has_before = false;
    for (int head = 0; head < p.walk.group; ++head)
      for (int n = key_tile.begin; n < end; ++n) {
        const bool has_sums = head > 0 || n > key_tile.begin;
        if (n >= seeing.begin && n < seeing.end) {
          step(n, has_before, has_sums);
          has_before = true;
          ring.advance();
          if constexpr (F::kAddsQueries) advance_sums(head, n);
          continue;
        }
        if constexpr (F::kAddsQueries) end_sums();
        if (has_before) {  // released early, because the ring would fill up while the other warpgroup continues
          end_sums();
          release(&memory.q_empty[stage_before()]);
          has_before = false;
        }
        skip_step();
        if constexpr (F::kAddsQueries) {
          sums.share_zeros();
          if (has_sums) compute_query_sums();
          advance_sums(head, n);
        }
      }
    if constexpr (F::kAddsQueries) {
      end_sums();
      if (key_tile.steps > 0) compute_query_sums();
    }
    if constexpr (F::kAddsQueries) key_tile = memory.tile;  // read again to free registers during the steps
    release(&memory.kv_empty);
    end_sums();
    if (has_before) release(&memory.q_empty[stage_before()]);
    finish();
  }
  // Computes dQ of the step before the last shared step, and waits for the result.
  __device__ __forceinline__ void compute_query_sums() {
    sums.issue(true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(sums.dq);
    sums.add(memory.tile, p.walk);
  }
  __device__ __forceinline__ void advance_sums(int head, int n) {
    sums.next(key_tile.kv_head * p.walk.group + head, n * F::kQueries);
  }

  __device__ __forceinline__ void issue_scores(float (&d)[F::kQueries / 2], uint32_t keys, uint32_t queries) {
    keys += group * 64 * 128;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < F::kWidth / 16; ++i)
      ptx::wgmma<T, F::kQueries>(d, tile::operand<ptx::Major::k, kB128>(keys, 16 * i, F::kPanelK),
                                 tile::operand<ptx::Major::k, kB128>(queries, 16 * i, F::kPanelQ), i > 0);
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_sum(float (&d)[F::kWidth / 2], const uint32_t (&x)[F::kQueries / 16][4],
                                            uint32_t rows) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < F::kQueries / 16; ++i)
      ptx::wgmma<T, F::kWidth, ptx::Major::mn>(d, x[i], tile::operand<ptx::Major::mn, kB128>(rows, 16 * i, F::kPanelQ),
                                               true);
    ptx::wgmma_commit_group();
  }

  // `has_before`: the ring's preceding stage waits for its release. `has_sums`: dS of a preceding step is shared.
  __device__ __forceinline__ void step(int n, bool has_before, bool has_sums) {
    const uint32_t stage = ring.stage;
    const uint32_t q = ptx::shared_address(memory.q[stage]), dout = ptx::shared_address(memory.dout[stage]);
    tile::wait_warp_or_trap(&memory.q_full[stage], ring.phase);
    issue_scores(s, ptx::shared_address(memory.k), q);
    ptx::wgmma_wait_group<1>();  // the sums of the step before: their operands' registers take dP
    if (has_before) release(&memory.q_empty[stage_before()]);
    if constexpr (kDk) {
      issue_scores(dp, ptx::shared_address(memory.v), dout);
      ptx::wgmma_wait_group<1>();
    } else {
      ptx::wgmma_wait_group<0>();
    }
    ptx::fence_registers(s);
    probabilities(n);
    if constexpr (kDk) {
      ptx::wgmma_wait_group<0>();
      ptx::fence_registers(dp);
      score_gradients();
    }
    if constexpr (F::kAddsQueries)
      issue_all_sums(q, dout, has_sums);
    else
      issue_key_sums(q, dout, stage);
  }

  // Issues dV and dK of this step, and computes dQ of the step before.
  __device__ __forceinline__ void issue_all_sums(uint32_t q, uint32_t dout, bool has_sums) {
    pack_operand<T>(a, s);
    pack_operand<T>(b, dp);
    sums.share(b);
    sums.issue(has_sums);
    ptx::wgmma_commit_group();
    issue_sum(dv, a, dout);
    issue_sum(dk, b, q);
    ptx::wgmma_wait_group<2>();
    ptx::fence_registers(sums.dq);
    if (has_sums) sums.add(memory.tile, p.walk);
  }
  // Issues this warpgroup's sums of dV and dK. The operands are packed only now, because registers hold the sums and
  // either scores or operands, but not both.
  __device__ __forceinline__ void issue_key_sums(uint32_t q, uint32_t dout, uint32_t stage) {
    if constexpr (kDv) {
      pack_operand<T>(a, s);
      issue_sum(dv, a, dout);
    }
    if constexpr (kDk) {
      pack_operand<T>(b, dp);
      if constexpr (F::kStoresScores) {
        // A copy of the operand: its registers must not be read while the product runs, and the stores take some time.
        uint32_t ds[F::kQueries / 16][4];
#pragma unroll
        for (int i = 0; i < F::kQueries / 16; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r) ds[i][r] = b[i][r];
#pragma unroll
        for (auto& four : ds) ptx::fence_registers(four);
        issue_sum(dk, b, q);
        __syncwarp();  // otherwise ptxas places the stores between the products
        store_scores<F::kQueries>(memory.score_places.panels[stage], group, warp, ds);
      } else {
        issue_sum(dk, b, q);
      }
    }
  }

  __device__ __forceinline__ void score_gradients() {
    const float* delta = memory.delta[ring.stage];
#pragma unroll
    for (int j = 0; j < F::kQueries / 8; ++j) {
      const float2 of = *reinterpret_cast<const float2*>(delta + 8 * j + 2 * t);
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * j + 2 * r + e;
          dp[i] = s[i] * (dp[i] - (e == 0 ? of.x : of.y));
          if constexpr (F::kCapped) dp[i] *= slope[i];
        }
    }
  }

  __device__ __forceinline__ void probabilities(int n) {
    const float* lse = memory.lse[ring.stage];
#pragma unroll
    for (int j = 0; j < F::kQueries / 8; ++j) {
      const float2 of = *reinterpret_cast<const float2*>(lse + 8 * j + 2 * t);
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        const Probability x = probability<F::kCapped>(p.scores, s[i], i % 2 == 0 ? of.x : of.y);
        if constexpr (F::kCapped) slope[i] = x.slope;
        s[i] = x.value;
      }
    }
    if (is_masked(n)) mask(n);
  }
  // Rows are keys here, columns queries. Query i sees key j where j - offset <= i < j - offset + window.
  __device__ __forceinline__ void mask(int n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int low = p.walk.causal ? key_of(r) - (key_tile.keys - key_tile.queries) - n * F::kQueries - 2 * int(t) : 0;
      if (F::kMasksKeys && key_of(r) >= key_tile.keys)
        low = F::kQueries;  // the row belongs to no segment, or to another one
      const int64_t last = p.walk.window > 0 ? low + p.walk.window : F::kQueries;
      const int end = int(min(last, int64_t(F::kQueries)));
#pragma unroll
      for (int j = 0; j < F::kQueries / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e < low || 8 * j + e >= end) s[4 * j + 2 * r + e] = 0;
    }
  }
  __device__ __forceinline__ bool is_masked(int n) const {
    if (F::kMasksKeys && key_tile.first + 64 * int(group) + 64 > key_tile.keys) return true;
    if (!p.walk.causal) return false;
    const int first = key_tile.first + 64 * int(group) - (key_tile.keys - key_tile.queries), begin = n * F::kQueries;
    return begin < first + 63 || (p.walk.window > 0 && begin + F::kQueries > first + p.walk.window);
  }

  __device__ __forceinline__ void finish() {
    if constexpr (kDk) store(dk, p.dk, p.dk_strides, p.scores.scale, false);
    if constexpr (kDv) store(dv, p.dv, p.dv_strides, 1.f, p.add_dv);
  }
  __device__ __forceinline__ void store(const float (&d)[F::kWidth / 2], void* to, const Strides& strides, float by,
                                        bool adds) {
    const float scale[2] = {by, by};
    T* row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      row[r] = key_of(r) < key_tile.keys
                   ? static_cast<T*>(to) + (int64_t(key_tile.k_begin) + key_of(r)) * strides.token +
                         key_tile.kv_head * strides.head
                   : nullptr;
    store_rows<T>(d, scale, row, p.scores.width, t, adds);
  }
};

template <class F>
__global__ void __launch_bounds__(F::kThreads, 1)
    attention_key_gradient(const __grid_constant__ KeyGradientMaps maps, const __grid_constant__ KeyGradientParams p) {
  auto& memory = *tile::dynamic_shared<KeyMemory<F>>();
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&memory.kv_full, 1);
    ptx::mbarrier_init(&memory.kv_empty, 4 * F::kGroups);
    for (uint64_t& raw : memory.raw) ptx::mbarrier_init(&raw, 1);
    memory.scores_barriers.prepare();
    for (int i = 0; i < F::kStages; ++i) {
      ptx::mbarrier_init(&memory.q_full[i], 1);
      ptx::mbarrier_init(&memory.q_empty[i], 4 * F::kGroups);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (warp < 4) {
    ptx::decrease_registers<F::kFetcherRegisters>();
    if (warp == 0) QueryFetcher<F>{.memory = memory, .maps = maps, .p = p, .lane = lane}.run();
  } else {
    ptx::increase_registers<F::kMultiplierRegisters>();
    const uint32_t group = warp / 4 - 1;
    const uint32_t in_group = warp % 4, g = lane / 4, t = lane % 4;
    if constexpr (!F::kApart)
      KeyGradient<F, true, true>{.memory = memory, .p = p, .group = group, .warp = in_group, .g = g, .t = t}.run();
    else if (group == 0)
      KeyGradient<F, true, false>{.memory = memory, .p = p, .group = 0, .warp = in_group, .g = g, .t = t}.run();
    else
      KeyGradient<F, false, true>{.memory = memory, .p = p, .group = 0, .warp = in_group, .g = g, .t = t}.run();
  }
}

template <class F> KeyGradientKernel key_gradient_kernel_of() {
  return {attention_key_gradient<F>, F::kKeys, F::kQueries, F::kThreads, int64_t(sizeof(KeyMemory<F>))};
}
template <class T, bool kCapped> KeyGradientKernel key_gradient_kernel_for(int width) {
  if (width <= 64) return key_gradient_kernel_of<KeyGradientForm<T, 64, kCapped ? 64 : 96, 4, false, kCapped>>();
  if (width <= 128) return key_gradient_kernel_of<KeyGradientForm<T, 128, kCapped ? 32 : 64, 3, false, kCapped>>();
  return key_gradient_kernel_of<KeyGradientForm<T, 256, kCapped ? 32 : 64, 2, true, kCapped>>();
}
template <class T> KeyGradientKernel key_gradient_kernel(int width, bool capped) {
  return capped ? key_gradient_kernel_for<T, true>(width) : key_gradient_kernel_for<T, false>(width);
}

template <class T> KeyGradientKernel joint_gradient_kernel(int width) {
  constexpr auto kBy = QueryGradientBy::sums;
  if (width <= 64) return key_gradient_kernel_of<KeyGradientForm<T, 64, 128, 3, false, false, kBy>>();
  return key_gradient_kernel_of<KeyGradientForm<T, 128, 64, 3, false, false, kBy>>();
}
template <class T> KeyGradientKernel storing_gradient_kernel() {
  constexpr auto kBy = QueryGradientBy::stored_scores;
  return key_gradient_kernel_of<KeyGradientForm<T, 128, kScoreStep, 3, false, false, kBy>>();
}
template <class T> void (*query_sums_kernel(int width))(const QuerySumParams) {
  return width <= 64 ? attention_query_sums<T, 1> : attention_query_sums<T, 2>;
}

}  // namespace ingot::cuda::attention_hopper
