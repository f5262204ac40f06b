#pragma once
// dQ by the kernel that walks over keys (key_gradient.cuh): both warpgroups write dS^T of a step to shared memory, each
// forms a part of 64 x 64 of dQ = dS K over all keys of the tile, and adds it to sums in global memory. Blocks add in
// no fixed order. A last kernel scales and rounds the sums.
//
// Sums lie in blocks of 64 queries of one head, by 64 columns, as wgmma's accumulators hold them: lanes' additions are
// neighbours, and nothing is transposed. Segment s has the blocks from cu[s] / 64 + s on (tiles.h).
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/kernels/attention/hopper/backward.h"
#include "ingot/kernels/attention/hopper/fragments.cuh"
#include "ingot/kernels/attention/hopper/tiles.h"

namespace ingot::cuda::attention_hopper {

// dS^T of two steps: rows of keys, panels of 64 queries, swizzled.
template <class F, bool kAddsQueries = F::kAddsQueries> struct SharedScores {
  char panel[2][F::kQueries / 64][F::kPanelK];
  float staged[2][F::kOrdered ? 4096 : 4];  // parts on their way to the thread that adds them
};
template <class F> struct SharedScores<F, false> {};
template <class F, bool kAddsQueries = F::kAddsQueries> struct SharedScoresBarriers {
  uint64_t full[2], empty[2];
  uint64_t staged_full[2], staged_empty[2];  // of each warpgroup
  __device__ void prepare() {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&full[i], 4 * F::kGroups);
      ptx::mbarrier_init(&empty[i], 4 * F::kGroups);
      ptx::mbarrier_init(&staged_full[i], 4);
      ptx::mbarrier_init(&staged_empty[i], 1);
    }
  }
};
template <class F> struct SharedScoresBarriers<F, false> {
  __device__ void prepare() {}
};

// In a fixed order: of the tiles of keys that a step of queries sees the last comes first, which is also the one that
// reaches them first.
struct PartPlace {
  uint32_t before;  // parts that are added earlier
  bool is_last;
};
template <class F, class Tile>
__device__ __forceinline__ PartPlace part_place(const Tile& t, const Walk& w, int first) {
  const int end = min(first + F::kQueries, t.queries) + t.keys - t.queries;  // of the keys seen
  const uint32_t before = uint32_t(min(end, t.keys) - 1) / F::kKeys - uint32_t(t.first) / F::kKeys;
  const int64_t begin = int64_t(first) + t.keys - t.queries + 1 - w.window;
  return {before, t.first == 0 || (w.window > 0 && begin >= t.first)};
}
// By one thread.
__device__ inline void await_count(const uint32_t* counter, uint32_t count) {
  if (ptx::load_acquire(counter) == count) return;
  const uint32_t start = tile::coarse_timer();
  while (ptx::load_acquire(counter) != count)
    if (tile::coarse_timer() - start > tile::kTrapAfter) ptx::trap();
}

// A warpgroup's part. Of 64 queries in a step both form 64 columns of them; of 128 queries each forms 64.
template <class F> struct QuerySums {
  using T = typename F::T;
  static constexpr auto kB128 = tile::Swizzle::b128;
  static constexpr uint32_t kNone = ~0u, kUnit = 64 * 64;
  static constexpr int kBlocks = F::kQueries / 64;
  static_assert(kBlocks * F::kPanels == 2 && F::kGroups == 2, "each warpgroup forms one of two parts");

  SharedScores<F>* shared = nullptr;
  SharedScoresBarriers<F>* barriers = nullptr;
  const KeyGradientParams* p = nullptr;
  uint32_t k = 0;  // address of the keys in shared memory
  uint32_t group = 0, warp = 0;
  uint32_t steps = 0;       // shared so far
  uint32_t staged = 0;      // parity of the parts handed to the warp that adds them
  int head = 0, first = 0;  // of the last one: its head and first query
  float dq[32];

  __device__ __forceinline__ void arrive(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void await_room() {
    tile::wait_warp_or_trap(&barriers->empty[steps % 2], (steps / 2 & 1) ^ 1);
  }
  // dS^T of the warpgroup's 64 keys, packed; or zeros, of a step that none of them sees.
  __device__ __forceinline__ void share(const uint32_t (&ds)[F::kQueries / 16][4]) {
    await_room();
    const uint32_t lane = threadIdx.x % 32, row = 64 * group + 16 * warp + lane % 16;
    const uint32_t to = ptx::shared_address(shared->panel[steps % 2]) + row * 128;
#pragma unroll
    for (int i = 0; i < F::kQueries / 16; ++i)
      ptx::stmatrix(to + i / 4 * F::kPanelK + (((i % 4 * 2 + lane / 16) ^ (row & 7)) << 4), ds[i]);
    ptx::fence_proxy_async_shared();
    arrive(&barriers->full[steps % 2]);
  }
  __device__ __forceinline__ void share_zeros() {
    await_room();
#pragma unroll
    for (int i = 0; i < F::kQueries / 64; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *reinterpret_cast<uint4*>(shared->panel[steps % 2][i] + group * 8192 + threadIdx.x % 128 * 16 + j * 2048) =
            make_uint4(0, 0, 0, 0);
    ptx::fence_proxy_async_shared();
    arrive(&barriers->full[steps % 2]);
  }
  // The product of the step shared before the one of `steps`. Where there is none, of what lies there, for nothing: the
  // compiler serialises products that not all paths issue.
  __device__ __forceinline__ void issue(bool has_sums) {
    const uint32_t before = steps - 1;
    if (has_sums) tile::wait_warp_or_trap(&barriers->full[before % 2], before / 2 & 1);
    const uint32_t ds = ptx::shared_address(shared->panel[before % 2]) + (kBlocks == 2 ? group * F::kPanelK : 0);
    const uint32_t keys = k + (kBlocks == 2 ? 0 : group * F::kPanelK);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < F::kKeys / 16; ++i)
      ptx::wgmma<T, 64, ptx::Major::mn, ptx::Major::mn>(
          dq, tile::operand<ptx::Major::mn, kB128>(ds, 16 * i, F::kPanelK),
          tile::operand<ptx::Major::mn, kB128>(keys, 16 * i, F::kPanelK), i > 0);
  }
  // When it is done.
  template <class Tile> __device__ __forceinline__ void add(const Tile& t, const Walk& w) {
    arrive(&barriers->empty[(steps - 1) % 2]);
    const uint32_t unit = unit_of(group, t.q_begin / 64 + t.segment, first, t.queries, head, w.heads * w.group);
    if (unit == kNone) return;
    if constexpr (F::kInOrder) {
      if (const PartPlace place = part_place<F>(t, w, first); place.is_last) {
        finish(t, unit, place.before);
        return;
      }
    }
    if constexpr (F::kOrdered) {
      tile::wait_warp_or_trap(&barriers->staged_empty[group], staged ^ 1);
      staged ^= 1;
      stage();
      arrive(&barriers->staged_full[group]);
      return;
    }
    float* const to = p->query_sums + int64_t(unit) * kUnit + threadIdx.x % 128 * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) ptx::add_relaxed(to + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  }
  __device__ __forceinline__ void stage() {
    float* const at = shared->staged[group] + threadIdx.x % 128 * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      *reinterpret_cast<float4*>(at + j * 512) = make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    ptx::fence_proxy_async_shared();
  }
  // The last part is not added: dQ is what was added before and this part.
  template <class Tile> __device__ __forceinline__ void finish(const Tile& t, uint32_t unit, uint32_t before) {
    ptx::wgmma_wait_group<0>();  // gives the registers of the other products' operands
    const uint32_t lane = threadIdx.x % 32;
    if (before > 0) {
      if (lane == 0) await_count(p->counters + unit, before);
      __syncwarp();
      const float* const from = p->query_sums + int64_t(unit) * kUnit + threadIdx.x % 128 * 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint64_t low, high;
        ptx::load_relaxed_16(from + j * 512, low, high);
        dq[4 * j] += __uint_as_float(uint32_t(low)), dq[4 * j + 1] += __uint_as_float(uint32_t(low >> 32));
        dq[4 * j + 2] += __uint_as_float(uint32_t(high)), dq[4 * j + 3] += __uint_as_float(uint32_t(high >> 32));
        if (j % 2 == 1) ptx::fence_registers(dq);  // else all are asked for at once, into registers that are not there
      }
    }
    const float scale[2] = {p->scores.scale, p->scores.scale};
    T* row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first + (kBlocks == 2 ? 64 * int(group) : 0) + 16 * int(warp) + int(lane / 4) + 8 * r;
      row[r] = query < t.queries ? static_cast<T*>(p->dq) + (int64_t(t.q_begin) + query) * p->dq_strides.token +
                                       head * p->dq_strides.head + 64 * panel()
                                 : nullptr;
    }
    store_rows<T>(dq, scale, row, p->scores.width - 64 * panel(), lane % 4);
  }
  __device__ __forceinline__ int panel() const { return kBlocks == 2 ? 0 : int(group); }
  // Of the step of queries from `first_` on, of head `head_` of all.
  __device__ __forceinline__ void next(int head_, int first_) {
    head = head_, first = first_;
    ++steps;
  }
  static __device__ __forceinline__ uint32_t unit_of(uint32_t group, int64_t block, int first, int queries, int head,
                                                     int heads) {
    const int mine = kBlocks == 2 ? first + 64 * int(group) : first;
    if (mine >= queries) return kNone;
    return uint32_t(((block + mine / 64) * heads + head) * F::kPanels + (kBlocks == 2 ? 0 : group));
  }
};

struct NoQuerySums {};

// A thread that adds a warpgroup's parts to the sums of their queries in their order, except for the last one, which
// the warpgroup takes. Each part's counter tells how many have been added; the first part is stored, so that nobody has
// to clear the sums. Items are claimed in an order in which nobody waits for one that comes later.
template <class F, class Tile> struct PartAdder {
  SharedScores<F>& shared;
  SharedScoresBarriers<F>& barriers;
  float* sums;
  uint32_t* counters;
  uint32_t group;
  uint32_t parts = 0, before = QuerySums<F>::kNone, before_order = 0;

  __device__ void take_tile(const Tile& t, const Walk& w) {
    const int64_t block = t.q_begin / 64 + t.segment;
    for (int head = t.kv_head * w.group; head < (t.kv_head + 1) * w.group; ++head)
      for (int n = t.begin; n < t.begin + t.steps; ++n) {
        const int first = n * F::kQueries;
        const uint32_t unit = QuerySums<F>::unit_of(group, block, first, t.queries, head, w.heads * w.group);
        if (unit == QuerySums<F>::kNone) continue;
        const PartPlace place = part_place<F>(t, w, first);
        if (!F::kInOrder || !place.is_last) add(unit, F::kInOrder ? place.before : 1);
      }
    tell();
  }
  __device__ void add(uint32_t unit, uint32_t order) {
    uint32_t* const counter = counters + unit;
    const bool waits = F::kInOrder && order > 0;
    const uint32_t seen = waits ? ptx::load_relaxed(counter) : 0;  // on its way while the part before is told of
    const bool fenced = tell();
    if (waits && !(fenced && seen == order)) await_count(counter, order);
    tile::wait_or_trap(&barriers.staged_full[group], parts & 1);
    ++parts;
    float* const to = sums + int64_t(unit) * QuerySums<F>::kUnit;
    if (order == 0)
      ptx::bulk_store(to, shared.staged[group], QuerySums<F>::kUnit * 4);
    else
      ptx::bulk_add_f32(to, shared.staged[group], QuerySums<F>::kUnit * 4);
    ptx::bulk_commit_group();
    ptx::bulk_wait_group_read<0>();
    ptx::mbarrier_arrive(&barriers.staged_empty[group]);
    if constexpr (F::kInOrder) before = unit, before_order = order;
  }
  // Others may add to what the last part was added to. Whether there was one: then what was seen of a counter before
  // counts as acquired.
  __device__ bool tell() {
    if (before == QuerySums<F>::kNone) return false;
    ptx::bulk_wait_group<0>();
    ptx::fence_acq_rel_gpu();
    ptx::store_relaxed(counters + before, before_order + 1);
    before = QuerySums<F>::kNone;
    return true;
  }
};

// A block of 128 threads per block of 64 queries and head: of sums in any order dQ, of those in order zeros where no
// key is seen.
template <class T, int kPanels> __global__ void __launch_bounds__(128) attention_query_sums(const QuerySumParams p) {
  const int64_t place = blockIdx.x / uint32_t(p.heads);
  const int head = int(blockIdx.x % uint32_t(p.heads));
  const detail::TilePlace at = detail::tile_place(p.cu_q, p.segments, 64, place);
  const int begin = p.cu_q[at.segment], queries = p.cu_q[at.segment + 1] - begin;
  if (at.first >= queries) return;
  if (p.sums == nullptr) {
    const int64_t first = at.first / p.step * p.step, end = min(first + p.step, int64_t(queries));
    const detail::KeyRange seen =
        detail::keys_seen(first, end, queries, p.cu_k[at.segment + 1] - p.cu_k[at.segment], true, p.window);
    if (seen.end > seen.begin) return;
  }
  const uint32_t lane = threadIdx.x % 32;
  const float scale[2] = {p.scale, p.scale};
#pragma unroll
  for (int i = 0; i < kPanels; ++i) {
    float d[32] = {};
    if (p.sums != nullptr) {
      const float4* from = reinterpret_cast<const float4*>(p.sums) + (int64_t(blockIdx.x) * kPanels + i) * 1024;
#pragma unroll
      for (int j = 0; j < 8; ++j) *reinterpret_cast<float4*>(d + 4 * j) = from[j * 128 + threadIdx.x];
    }
    T* row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t query = at.first + threadIdx.x / 32 * 16 + lane / 4 + 8 * r;
      row[r] = query < queries
                   ? static_cast<T*>(p.dq) + (begin + query) * p.dq_strides.token + head * p.dq_strides.head + 64 * i
                   : nullptr;
    }
    store_rows<T>(d, scale, row, p.width - 64 * i, lane % 4);
  }
}

}  // namespace ingot::cuda::attention_hopper
