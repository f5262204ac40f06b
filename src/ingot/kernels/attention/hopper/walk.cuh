#pragma once
// The walk of a block over tiles of queries, and for each tile over its visible steps of keys: the fetching warp, and
// its messages to the multiplying warpgroups. Forward and dQ use this walk.
//
// Rows of K and V behind a segment's end belong to other segments. Where a product sums over keys, 0 * NaN would reach
// the sums, so these rows are zeroed before the product reads them.
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/ring.cuh"
#include "ingot/kernels/attention/hopper/walk.h"
#include "ingot/kernels/attention/parts/places.cuh"

namespace ingot::cuda::attention_hopper {

// Warpgroups that issue their products in turns, so that the exponentials of a warpgroup run during the products of the
// rest. Each takes a turn for every step of a tile, also for steps invisible to its queries.
template <class F> struct Turn {
  uint32_t group;
  __device__ __forceinline__ void await() const {
    if constexpr (F::kTurns) ptx::barrier_sync_unaligned(1 + group, 256);
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (F::kTurns) ptx::barrier_arrive(1 + (group + 1) % F::kGroups, 256);
  }
  __device__ __forceinline__ void begin() const {
    if (group == F::kGroups - 1) pass();  // the last warpgroup passes the turn to the first
  }
  __device__ __forceinline__ void end() const {
    if (group == 0) await();  // no warpgroup may end while another one still arrives at its barrier
  }
};

// F: kRows, kKeys, kPanels, kPanelQ, kPanelK, kStages, kGroups; kRowOperands: 1 (Q) or 2 (and dO); kZeroKeys,
// kZeroValues: whether rows of K or of V behind the end are zeroed, at most one of the two.
template <class F> struct WalkMemory {
  char rows[F::kRowOperands][F::kPanels][F::kPanelQ];  // panels of 64 columns, swizzled
  char k[F::kStages][F::kPanels][F::kPanelK];
  char v[F::kStages][F::kPanels][F::kPanelK];
  uint64_t q_full, q_empty, k_full[F::kStages], k_empty[F::kStages], v_full[F::kStages], v_empty[F::kStages];
  uint64_t raw;  // counts a copy whose last rows must be zeroed
  Tile tile;
};

// Zeroes a panel's rows from `rows` on. These are whole rows, so the swizzle does not matter. Called by all lanes.
template <uint32_t kBytes> __device__ inline void zero_rows(char* panel, int rows, uint32_t lane) {
  for (uint32_t at = uint32_t(rows) * 128 + lane * 16; at < kBytes; at += 512)
    *reinterpret_cast<uint4*>(panel + at) = make_uint4(0, 0, 0, 0);
}

// A block's first item is the item of its number. The block claims a further item shortly before requesting the last
// steps of an item. Results do not depend on the assignment of items to blocks.
constexpr int kAskAhead = 1;                        // steps: the time that the counter takes to answer
static __device__ uint32_t claim_counters[kSlots];  // zero between launches, but for kNoCounter's

struct Claims {
  int64_t all;
  uint32_t *counter, lane;
  uint32_t given;        // items without a claim
  uint32_t claimed = 0;  // in lane 0; the claim may still be in flight

  __device__ Claims(const Walk& w, uint32_t lane_)
      : all(w.places * w.heads), counter(&claim_counters[w.slot]), lane(lane_), given(gridDim.x) {}
  __device__ int64_t first() const { return blockIdx.x; }
  __device__ void ask() {
    if (lane == 0) claimed = ptx::fetch_add_relaxed(counter, 1);
  }
  // The claimed item, or a number beyond the last item.
  __device__ int64_t take() {
    const int64_t item = int64_t(__shfl_sync(~0u, claimed, 0)) + given;
    if (lane == 0 && item == all + gridDim.x - 1) ptx::store_relaxed(counter, 0);  // all blocks have found no item
    return item;
  }
};

template <class F> struct KeyFetcher {
  WalkMemory<F>& memory;
  const WalkMaps& maps;
  const Walk& w;
  uint32_t lane;
  tile::RingCursor<F::kStages> ring = {};
  uint32_t tiles = 0, raw = 0, pending_stage = 0;
  int pending_rows = 0;  // a step whose rows behind the end are not zeroed yet

  __device__ void run() {
    Claims claims(w, lane);
    for (int64_t place = claims.first(); place < claims.all; place = claims.take())
      if (const Tile t = find_tile<F>(w, place); t.queries > 0)
        fetch(t, claims);
      else
        claims.ask();
    publish({.steps = -1});
  }

  // Waits until Q's memory is free: the last tile's products with Q are complete, and all warpgroups have read `tile`.
  __device__ void publish(const Tile& t) {
    tile::wait_warp_or_trap(&memory.q_empty, (tiles & 1) ^ 1);
    ++tiles;
    if (lane != 0) return;
    memory.tile = t;
    if (t.steps < 0) {
      ptx::mbarrier_arrive(&memory.q_full);
      return;
    }
    ptx::mbarrier_arrive_expect_tx(&memory.q_full, F::kRowOperands * F::kPanels * F::kPanelQ);
    for (int o = 0; o < F::kRowOperands; ++o)
      for (int i = 0; i < F::kPanels; ++i)
        ptx::tensor_load_3d(memory.rows[o][i], &maps.rows[o], 64 * i, t.head, t.q_begin + t.first, &memory.q_full);
  }

  // The first step's K does not wait for Q's memory. Rows are zeroed after the following copies have been requested.
  __device__ void fetch(const Tile& t, Claims& claims) {
    const int kv_head = t.head / w.group, last = t.begin + t.steps - 1;
    for (int n = last; n >= t.begin; --n) {
      const int token = t.k_begin + n * F::kKeys, rows = t.keys - n * F::kKeys;
      const bool others_follow = rows < F::kKeys && t.k_begin + t.keys < w.key_rows;  // otherwise the copy brings zeros
      const uint32_t stage = ring.stage;
      if (n == min(last, t.begin + kAskAhead)) claims.ask();
      tile::wait_warp_or_trap(&memory.k_empty[stage], ring.phase ^ 1);
      copy(memory.k[stage], maps.k, kv_head, token,
           F::kZeroKeys && others_follow ? &memory.raw : &memory.k_full[stage]);
      if (n == last) publish(t);
      zero_pending();
      tile::wait_warp_or_trap(&memory.v_empty[stage], ring.phase ^ 1);
      copy(memory.v[stage], maps.v, kv_head, token,
           F::kZeroValues && others_follow ? &memory.raw : &memory.v_full[stage]);
      if (others_follow) pending_stage = stage, pending_rows = rows;
      if (F::kZeroKeys) zero_pending();  // the next K may wait for this V
      ring.advance();
    }
    zero_pending();
    if (t.steps == 0) publish(t), claims.ask();
  }

  __device__ void copy(char (*to)[F::kPanelK], const CUtensorMap& map, int kv_head, int token, uint64_t* barrier) {
    if (lane != 0) return;
    ptx::mbarrier_arrive_expect_tx(barrier, F::kPanels * F::kPanelK);
    for (int i = 0; i < F::kPanels; ++i) ptx::tensor_load_3d(to[i], &map, 64 * i, kv_head, token, barrier);
  }
  __device__ void zero_pending() {
    if (pending_rows == 0) return;
    tile::wait_warp_or_trap(&memory.raw, raw++ & 1);
    auto& rows = F::kZeroKeys ? memory.k[pending_stage] : memory.v[pending_stage];
    for (int i = 0; i < F::kPanels; ++i) zero_rows<F::kPanelK>(rows[i], pending_rows, lane);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(F::kZeroKeys ? &memory.k_full[pending_stage] : &memory.v_full[pending_stage]);
    pending_rows = 0;
  }
};

template <class F> __device__ inline void prepare_barriers(WalkMemory<F>& memory) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&memory.q_full, 1);
    ptx::mbarrier_init(&memory.q_empty, 4 * F::kGroups);
    ptx::mbarrier_init(&memory.raw, 1);
    for (int i = 0; i < F::kStages; ++i) {
      ptx::mbarrier_init(&memory.k_full[i], 1);
      ptx::mbarrier_init(&memory.v_full[i], 1);
      ptx::mbarrier_init(&memory.k_empty[i], 4 * F::kGroups);
      ptx::mbarrier_init(&memory.v_empty[i], 4 * F::kGroups);
    }
    ptx::fence_mbarrier_init();
  }
}

}  // namespace ingot::cuda::attention_hopper
