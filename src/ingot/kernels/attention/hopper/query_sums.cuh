#pragma once
// dQ from the kernel that walks over keys (key_gradient.cuh): both warpgroups write dS^T of a step to shared memory,
// each computes a part of 64 x 64 of dQ = dS K over all keys of the tile, and adds it to sums in global memory. Blocks
// add in no fixed order. A last kernel scales and rounds the sums.
//
// Sums lie in blocks of 64 queries of a head, by 64 columns, in the order of wgmma's accumulators: lanes add to
// adjacent numbers, and no transposition is needed. Segment s has the blocks from cu[s] / 64 + s on (tiles.h).
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/kernels/attention/hopper/backward.h"
#include "ingot/kernels/attention/parts/fragments.cuh"
#include "ingot/kernels/attention/parts/tiles.h"

namespace ingot::cuda::attention_hopper {

// dS^T of two steps: rows of keys, panels of 64 queries, swizzled.
template <class F, bool kAddsQueries = F::kAddsQueries> struct SharedScores {
  char panel[2][F::kQueries / 64][F::kPanelK];
};
template <class F> struct SharedScores<F, false> {};
template <class F, bool kAddsQueries = F::kAddsQueries> struct SharedScoresBarriers {
  uint64_t full[2], empty[2];
  __device__ void prepare() {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&full[i], 4 * F::kGroups);
      ptx::mbarrier_init(&empty[i], 4 * F::kGroups);
    }
  }
};
template <class F> struct SharedScoresBarriers<F, false> {
  __device__ void prepare() {}
};

// A warpgroup's part of dQ: 64 of the columns for all queries of a step of 64, or 64 of the queries of a step of 128.
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
  int head = 0, first = 0;  // the last step's head and first query
  float dq[32];

  __device__ __forceinline__ void arrive(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void await_room() {
    tile::wait_warp_or_trap(&barriers->empty[steps % 2], (steps / 2 & 1) ^ 1);
  }
  // dS^T of the warpgroup's 64 keys, packed; or zeros, for a step invisible to all of them.
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
  // Issues the product of the step shared before the step of `steps`. Without such a step, issues a product of stale
  // memory whose result is unused, because the compiler serialises products that only some paths issue.
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
  // Called when the product is complete.
  template <class Tile> __device__ __forceinline__ void add(const Tile& t, const Walk& w) {
    arrive(&barriers->empty[(steps - 1) % 2]);
    const uint32_t unit = unit_of(group, t.q_begin / 64 + t.segment, first, t.queries, head, w.heads * w.group);
    if (unit == kNone) return;
    float* const to = p->query_sums + int64_t(unit) * kUnit + threadIdx.x % 128 * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) ptx::add_relaxed(to + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  }
  // Counts the step just shared, and keeps for add() the step's head (of all heads) and first query.
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

// A block of 128 threads per block of 64 queries and head: dQ of its sums.
template <class T, int kPanels> __global__ void __launch_bounds__(128) attention_query_sums(const QuerySumParams p) {
  const int64_t place = blockIdx.x / uint32_t(p.heads);
  const int head = int(blockIdx.x % uint32_t(p.heads));
  const detail::TilePlace at = detail::tile_place(p.cu_q, p.segments, 64, place);
  const int begin = p.cu_q[at.segment], queries = p.cu_q[at.segment + 1] - begin;
  if (at.first >= queries) return;
  const uint32_t lane = threadIdx.x % 32;
  const float scale[2] = {p.scale, p.scale};
#pragma unroll
  for (int i = 0; i < kPanels; ++i) {
    float d[32];
    const float4* from = reinterpret_cast<const float4*>(p.sums) + (int64_t(blockIdx.x) * kPanels + i) * 1024;
#pragma unroll
    for (int j = 0; j < 8; ++j) *reinterpret_cast<float4*>(d + 4 * j) = from[j * 128 + threadIdx.x];
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
