#pragma once
// dQ = dS K of the stored dS (score_panels.h): tiles of 128 queries, steps of 128 keys in ascending order. A warp
// fetches dS and K of a step; each of two warpgroups multiplies 64 queries. The order of all sums is fixed.
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/attention/hopper/stored_scores.cuh"
#include "ingot/kernels/attention/hopper/walk.cuh"
#include "ingot/kernels/attention/parts/fragments.cuh"

namespace ingot::cuda::attention_hopper {

template <class T_> struct QueryProductForm {
  using T = T_;
  static constexpr int kWidth = 128, kRows = kScoreRows, kKeys = kScoreKeys, kGroups = 2, kStages = 3, kPanels = 2;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr uint32_t kPanelK = kKeys * 128, kScoreBytes = kRows / 8 * uint32_t(kPanelBytes);
};

template <class F> struct ProductMemory {
  char scores[F::kStages][F::kScoreBytes], k[F::kStages][F::kPanels][F::kPanelK];
  uint64_t full[F::kStages], empty[F::kStages];
  uint64_t raw;  // counts a copy whose last rows must be zeroed
  uint64_t tile_full, tile_empty;
  Tile tile;
};

template <class F> struct ScoreFetcher {
  ProductMemory<F>& memory;
  const CUtensorMap& keys;
  const QueryProductParams& p;
  uint32_t lane;
  tile::RingCursor<F::kStages> ring = {};
  uint32_t tiles = 0, raw = 0;

  __device__ void run() {
    Claims claims(p.walk, lane);
    for (int64_t place = claims.first(); place < claims.all; place = claims.take()) {
      const Tile t = find_tile<F>(p.walk, place);
      if (t.queries == 0 || t.steps == 0) claims.ask();
      if (t.queries > 0) fetch(t, claims);
    }
    publish({.steps = -1});
  }
  __device__ void publish(const Tile& t) {
    tile::wait_warp_or_trap(&memory.tile_empty, (tiles & 1) ^ 1);
    ++tiles;
    if (lane != 0) return;
    memory.tile = t;
    ptx::mbarrier_arrive(&memory.tile_full);
  }
  __device__ void fetch(const Tile& t, Claims& claims) {
    publish(t);
    const int kv_head = t.head / p.walk.group;
    const int64_t head = int64_t(t.head) * p.stored.first[p.key_places];
    const int32_t* const first = p.stored.first + t.k_begin / F::kKeys + segment_of(t);
    const int last = t.begin + t.steps - 1;
    for (int n = t.begin; n <= last; ++n) {
      if (n == max(t.begin, last - kAskAhead)) claims.ask();
      const uint32_t stage = ring.stage;
      const int token = t.k_begin + n * F::kKeys, rows = t.keys - n * F::kKeys;
      const bool others_follow = rows < F::kKeys && t.k_begin + t.keys < p.walk.key_rows;
      const int64_t panel = head + first[n] + t.first / 8;
      tile::wait_warp_or_trap(&memory.empty[stage], ring.phase ^ 1);
      if (lane == 0) {
        uint64_t* const barrier = others_follow ? &memory.raw : &memory.full[stage];
        ptx::mbarrier_arrive_expect_tx(barrier, F::kScoreBytes + F::kPanels * F::kPanelK);
        ptx::bulk_load(memory.scores[stage], p.stored.panels + panel * kPanelBytes, F::kScoreBytes, barrier,
                       ptx::kEvictFirst);
        for (int i = 0; i < F::kPanels; ++i)
          ptx::tensor_load_3d(memory.k[stage][i], &keys, 64 * i, kv_head, token, barrier);
      }
      if (others_follow) {
        tile::wait_warp_or_trap(&memory.raw, raw++ & 1);
        for (int i = 0; i < F::kPanels; ++i) zero_rows<F::kPanelK>(memory.k[stage][i], rows, lane);
        ptx::fence_proxy_async_shared();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&memory.full[stage]);
      }
      ring.advance();
    }
  }
  // The segment of a tile: the last one that begins at or before the tile's first query, of those with queries.
  __device__ int segment_of(const Tile& t) const {
    int low = 0, high = p.walk.segments - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (p.walk.cu_q[middle] <= t.q_begin)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }
};

template <class F> struct QueryProduct {
  using T = typename F::T;

  ProductMemory<F>& memory;
  const QueryProductParams& p;
  uint32_t group, warp, g, t;
  tile::RingCursor<F::kStages> ring = {};
  float dq[F::kWidth / 2];

  __device__ __forceinline__ void run() {
    for (uint32_t tiles = 0;; ++tiles) {
      tile::wait_warp_or_trap(&memory.tile_full, tiles & 1);
      const Tile now = memory.tile;
      release(&memory.tile_empty);
      if (now.steps < 0) break;
      take_tile(now);
    }
  }
  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void take_tile(const Tile& now) {
#pragma unroll
    for (float& x : dq) x = 0;
    uint32_t before = 0;
    for (int i = 0; i < now.steps; ++i) {
      const uint32_t stage = ring.stage;
      tile::wait_warp_or_trap(&memory.full[stage], ring.phase);
      multiply(stage);
      if (i > 0) {
        ptx::wgmma_wait_group<1>();
        release(&memory.empty[before]);
      }
      before = stage;
      ring.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(dq);
    if (now.steps > 0) release(&memory.empty[before]);
    finish(now);
  }
  __device__ __forceinline__ void multiply(uint32_t stage) {
    const uint32_t scores = ptx::shared_address(memory.scores[stage]) + group * 8 * uint32_t(kPanelBytes);
    const uint32_t keys = ptx::shared_address(memory.k[stage]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < F::kKeys / 16; ++i)
      ptx::wgmma<T, F::kWidth, ptx::Major::mn, ptx::Major::mn>(
          dq, tile::operand<ptx::Major::mn, tile::Swizzle::none>(scores, 16 * i, uint32_t(kPanelBytes)),
          tile::operand<ptx::Major::mn, tile::Swizzle::b128>(keys, 16 * i, F::kPanelK), true);
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void finish(const Tile& now) {
    const float scale[2] = {p.scale, p.scale};
    T* row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = now.first + 64 * int(group) + 16 * int(warp) + int(g) + 8 * r;
      row[r] = query < now.queries ? static_cast<T*>(p.dq) + (int64_t(now.q_begin) + query) * p.dq_strides.token +
                                         now.head * p.dq_strides.head
                                   : nullptr;
    }
    store_rows<T>(dq, scale, row, p.width, t);
  }
};

template <class F>
__global__ void __launch_bounds__(F::kThreads, 1)
    attention_query_product(const __grid_constant__ CUtensorMap keys, const __grid_constant__ QueryProductParams p) {
  auto& memory = *tile::dynamic_shared<ProductMemory<F>>();
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&memory.raw, 1);
    ptx::mbarrier_init(&memory.tile_full, 1);
    ptx::mbarrier_init(&memory.tile_empty, 4 * F::kGroups);
    for (int i = 0; i < F::kStages; ++i) {
      ptx::mbarrier_init(&memory.full[i], 1);
      ptx::mbarrier_init(&memory.empty[i], 4 * F::kGroups);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (warp < 4) {
    ptx::decrease_registers<24>();
    if (warp == 0) ScoreFetcher<F>{.memory = memory, .keys = keys, .p = p, .lane = lane}.run();
  } else {
    ptx::increase_registers<240>();
    QueryProduct<F>{.memory = memory, .p = p, .group = warp / 4 - 1, .warp = warp % 4, .g = lane / 4, .t = lane % 4}
        .run();
  }
}

template <class T> QueryProductKernel query_product_kernel() {
  using F = QueryProductForm<T>;
  return {attention_query_product<F>, F::kRows, F::kKeys, F::kThreads, int64_t(sizeof(ProductMemory<F>))};
}

}  // namespace ingot::cuda::attention_hopper
