#pragma once
// The fetching warp of the kernel that walks over keys: K and V of a tile of keys once, then Q, dO, lse and delta of a
// step of queries at a time, for each query head of the group.
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/ring.cuh"
#include "ingot/kernels/attention/hopper/key_gradient_form.cuh"
#include "ingot/kernels/attention/parts/fragments.cuh"

namespace ingot::cuda::attention_hopper {

template <class F> struct QueryFetcher {
  KeyMemory<F>& memory;
  const KeyGradientMaps& maps;
  const KeyGradientParams& p;
  uint32_t lane;
  static constexpr int kPerLane = (F::kQueries + 31) / 32;
  tile::RingCursor<F::kStages> ring = {};
  uint32_t tiles = 0, raw = 0;
  int pending_stage = 0, pending_rows = 0;  // a step whose rows behind the end are not zeroed yet
  uint32_t pending_raw = 0;

  __device__ void run() {
    Claims claims(p.walk, lane);
    for (int64_t place = claims.first(); place < claims.all; place = claims.take())
      fetch_tile(find_key_tile<F>(p.walk, place), claims);
    publish({.steps = -1});
  }
  __device__ __forceinline__ void fetch_tile(const KeyTile& t, Claims& claims) {
    const int heads_end = (t.kv_head + 1) * p.walk.group;
    if (t.keys == 0 || t.steps == 0) claims.ask();
    if (t.keys == 0) return;
    publish(t);
    for (int head = t.kv_head * p.walk.group; head < heads_end; ++head) {
      if constexpr (F::kStoresScores) begin_head(t, head);
      for (int n = t.begin; n < t.begin + t.steps; ++n) {
        if (head == heads_end - 1 && n == max(t.begin, t.begin + t.steps - 1 - kAskAhead)) claims.ask();
        fetch_step(t, head, n);
      }
    }
  }

  __device__ void begin_head(const KeyTile& t, int head) {
    if (lane == 0) memory.score_places.of_head = panels_of_head(p.stored, p.walk, t, head);
  }

  __device__ void publish(const KeyTile& t) {
    zero_pending();
    tile::wait_warp_or_trap(&memory.kv_empty, (tiles & 1) ^ 1);
    ++tiles;
    const int rows = t.keys - t.first;
    const bool others_follow = F::kMasksKeys && rows < F::kKeys && t.k_begin + t.keys < p.walk.key_rows && t.steps >= 0;
    uint64_t* const barrier = others_follow ? &memory.raw[raw % 2] : &memory.kv_full;
    if (lane == 0) copy_keys(t, barrier);
    if (others_follow) zero_keys(rows);
  }
  __device__ void copy_keys(const KeyTile& t, uint64_t* barrier) {
    memory.tile = t;
    if (t.steps < 0) {
      ptx::mbarrier_arrive(&memory.kv_full);
      return;
    }
    ptx::mbarrier_arrive_expect_tx(barrier, 2 * F::kPanels * F::kPanelK);
    for (int i = 0; i < F::kPanels; ++i) {
      ptx::tensor_load_3d(memory.k[i], &maps.k, 64 * i, t.kv_head, t.k_begin + t.first, barrier);
      ptx::tensor_load_3d(memory.v[i], &maps.v, 64 * i, t.kv_head, t.k_begin + t.first, barrier);
    }
  }
  // dQ sums over keys, so rows behind the segment's end are zeroed where these rows belong to the next segment.
  __device__ void zero_keys(int rows) {
    tile::wait_warp_or_trap(&memory.raw[raw % 2], raw / 2 & 1);
    ++raw;
    for (int i = 0; i < F::kPanels; ++i) {
      zero_rows<F::kPanelK>(memory.k[i], rows, lane);
      zero_rows<F::kPanelK>(memory.v[i], rows, lane);
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&memory.kv_full);
  }

  // Rows behind the segment's end are zero, and so is their P, because their lse is infinite. The rows are zeroed after
  // the request of the next step, which does not depend on this step.
  __device__ void fetch_step(const KeyTile& t, int head, int n) {
    const int first = n * F::kQueries, rows = t.queries - first, stage = int(ring.stage);
    const int64_t token = int64_t(t.q_begin) + first;
    float lse[kPerLane], delta[kPerLane];  // requested before the wait
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int row = int(lane) + 32 * i;
      lse[i] = row < rows ? p.scores.lse[head * p.scores.lse_stride + token + row] * kLog2E : INFINITY;
      delta[i] = row < rows ? p.scores.delta[head * p.scores.delta_stride + token + row] : 0.f;
    }
    tile::wait_warp_or_trap(&memory.q_empty[stage], ring.phase ^ 1);
    const bool others_follow = rows < F::kQueries && t.q_begin + t.queries < p.query_rows;
    uint64_t* barrier = others_follow ? &memory.raw[raw % 2] : &memory.q_full[stage];
    if (lane == 0) {
      if constexpr (F::kStoresScores)
        memory.score_places.panels[stage] = memory.score_places.of_head + n * (F::kQueries / 8 * kPanelBytes);
      ptx::mbarrier_expect_tx(barrier, 2 * F::kPanels * F::kPanelQ);  // the arrival follows
      for (int i = 0; i < F::kPanels; ++i) {
        ptx::tensor_load_3d(memory.q[stage][i], &maps.q, 64 * i, head, int(token), barrier);
        ptx::tensor_load_3d(memory.dout[stage][i], &maps.dout, 64 * i, head, int(token), barrier);
      }
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (F::kQueries % 32 == 0 || int(lane) + 32 * i < F::kQueries)
        memory.lse[stage][lane + 32 * i] = lse[i], memory.delta[stage][lane + 32 * i] = delta[i];
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
    zero_pending();
    if (others_follow) pending_stage = stage, pending_rows = rows, pending_raw = raw++;
    if (F::kStages < 3) zero_pending();  // otherwise the next step would wait for room freed by this step
    ring.advance();
  }
  __device__ void zero_pending() {
    if (pending_rows == 0) return;
    tile::wait_warp_or_trap(&memory.raw[pending_raw % 2], pending_raw / 2 & 1);
    for (int i = 0; i < F::kPanels; ++i) {
      zero_rows<F::kPanelQ>(memory.q[pending_stage][i], pending_rows, lane);
      zero_rows<F::kPanelQ>(memory.dout[pending_stage][i], pending_rows, lane);
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&memory.q_full[pending_stage]);
    pending_rows = 0;
  }
};

}  // namespace ingot::cuda::attention_hopper
