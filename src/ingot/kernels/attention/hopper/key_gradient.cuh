#pragma once
// dK and dV. A block takes tiles of keys of a key head in turn. A warp fetches K and V once, then for each query head
// of the group a step of queries at a time: Q, dO, lse and delta. Products are transposed, keys by queries: P^T and
// dS^T are the register operands of dV += P^T dO and dK += dS^T Q, and run during the next step's products. All heads
// of the group add to the same registers.
//
// Up to 128 wide each of two warpgroups has 64 of the keys. Above this width, registers hold only one of the two sums:
// both warpgroups have the same 64 keys; the first computes dV, the second dK.
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/attention/hopper/backward.h"
#include "ingot/kernels/attention/hopper/query_sums.cuh"
#include "ingot/kernels/attention/hopper/stored_scores.cuh"
#include "ingot/kernels/attention/hopper/walk.cuh"
#include "ingot/kernels/attention/parts/fragments.cuh"

namespace ingot::cuda::attention_hopper {

// What computes dQ: a kernel that forms the scores again (query_gradient.cuh), this kernel by adding to sums
// (query_sums.cuh), or a kernel that reads the stored dS (query_product.cuh).
enum class QueryGradientBy { scores, sums, stored_scores };

template <class T_, int kWidth_, int kGroups_, int kQueries_, int kStages_, bool kApart_, bool kCapped_, bool kTurns_,
          QueryGradientBy kBy = QueryGradientBy::scores>
struct KeyGradientForm {
  using T = T_;
  static constexpr int kWidth = kWidth_, kGroups = kGroups_, kQueries = kQueries_, kStages = kStages_;
  static constexpr int kPanels = kWidth / 64;
  static_assert(kQueries % 16 == 0, "products sum over 16 queries at a time");
  static constexpr bool kApart = kApart_, kCapped = kCapped_;  // apart: a warpgroup for dV, a second for dK
  static_assert(!kApart || kGroups == 2);
  static constexpr bool kTurns = kTurns_;
  static constexpr bool kAddsQueries = kBy == QueryGradientBy::sums;
  static constexpr bool kStoresScores = kBy == QueryGradientBy::stored_scores;
  // dQ sums over keys, so dS of keys behind the segment's end must be zero.
  static constexpr bool kMasksKeys = kAddsQueries || kStoresScores;
  static constexpr int kKeys = kApart ? 64 : 64 * kGroups, kThreads = 128 * (kGroups + 1);
  // Launched with 168 registers per thread, or 128 with four warpgroups. The warpgroups share this total; with a larger
  // sum setmaxnreg would wait forever.
  static constexpr int kFetcherRegisters = kGroups == 3 ? 32 : 24, kMultiplierRegisters = kGroups == 3 ? 160 : 240;
  static_assert(kFetcherRegisters + kGroups * kMultiplierRegisters <= (kGroups == 3 ? 4 * 128 : 3 * 168));
  static constexpr uint32_t kPanelK = kKeys * 128, kPanelQ = kQueries * 128;
  static_assert(!kStoresScores || (kKeys == kScoreKeys && kQueries == kScoreStep), "score_panels.h has these sizes");
};

template <class F> struct KeyMemory {
  char k[F::kPanels][F::kPanelK], v[F::kPanels][F::kPanelK];
  char q[F::kStages][F::kPanels][F::kPanelQ], dout[F::kStages][F::kPanels][F::kPanelQ];
  [[no_unique_address]] SharedScores<F> scores;  // empty where dQ is computed by a kernel of its own
  alignas(16) float lse[F::kStages][F::kQueries], delta[F::kStages][F::kQueries];  // lse in powers of two
  uint64_t kv_full, kv_empty, q_full[F::kStages], q_empty[F::kStages];
  uint64_t raw[2];  // counts copies whose last rows must be zeroed
  [[no_unique_address]] SharedScoresBarriers<F> scores_barriers;
  [[no_unique_address]] ScorePlaces<F> score_places;
  KeyTile tile;
};

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
      take(find_key_tile<F>(p.walk, place), claims);
    publish({.steps = -1});
  }
  __device__ __forceinline__ void take(const KeyTile& t, Claims& claims) {
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

// kDv, kDk: this warpgroup's sums.
template <class F, bool kDv, bool kDk> struct KeyGradient {
  using T = typename F::T;
  static constexpr auto kB128 = tile::Swizzle::b128;

  KeyMemory<F>& memory;
  const KeyGradientParams& p;
  uint32_t group, warp, g, t;  // group: selects 64 of the keys
  std::conditional_t<F::kAddsQueries, QuerySums<F>, NoQuerySums> sums = {};
  tile::RingCursor<F::kStages> ring = {};
  KeyTile tile_ = {};
  float s[F::kQueries / 2], dp[kDk ? F::kQueries / 2 : 2];
  float dk[kDk ? F::kWidth / 2 : 4], dv[kDv ? F::kWidth / 2 : 4];
  uint32_t a[F::kQueries / 16][4], b[F::kQueries / 16][4];  // P^T, dS^T
  float slope[F::kCapped ? F::kQueries / 2 : 1];

  __device__ __forceinline__ void run() {
    const Turn<F> turn{group};
    turn.begin();
    if constexpr (F::kAddsQueries) {
      sums.shared = &memory.scores, sums.barriers = &memory.scores_barriers, sums.p = &p;
      sums.k = ptx::shared_address(memory.k), sums.group = group, sums.warp = warp;
    }
    for (uint32_t tiles = 0;; ++tiles) {
      tile::wait_warp_or_trap(&memory.kv_full, tiles & 1);
      tile_ = memory.tile;
      if (tile_.steps < 0) break;
      take_tile(turn);
    }
    turn.end();
  }

  __device__ __forceinline__ int key_of(int r) const {
    return tile_.first + 64 * int(group) + 16 * int(warp) + int(g) + 8 * r;
  }
  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ uint32_t stage_before() const { return (ring.stage == 0 ? F::kStages : ring.stage) - 1; }

  // Skips a step whose queries see none of these 64 keys.
  __device__ __forceinline__ void pass_over(const Turn<F>& turn) {
    turn.await();
    turn.pass();
    tile::wait_warp_or_trap(&memory.q_full[ring.stage], ring.phase);
    release(&memory.q_empty[ring.stage]);
    ring.advance();
  }
  __device__ __forceinline__ void end_sums() {
    ptx::wgmma_wait_group<0>();
    if constexpr (kDk) ptx::fence_registers(dk);
    if constexpr (kDv) ptx::fence_registers(dv);
  }

  __device__ __forceinline__ void take_tile(const Turn<F>& turn) {
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;
    const int end = tile_.begin + tile_.steps;
    const detail::StepRange seeing = detail::steps_seeing(tile_.first + 64 * int(group), tile_.queries, tile_.keys,
                                                          p.walk.causal, p.walk.window, F::kQueries, tile_.begin, end);
    bool has_before = false;
    for (int head = 0; head < p.walk.group; ++head)
      for (int n = tile_.begin; n < end; ++n) {
        const bool has_sums = head > 0 || n > tile_.begin;
        if (n >= seeing.begin && n < seeing.end) {
          step(turn, n, has_before, has_sums);
          has_before = true;
          ring.advance();
          if constexpr (F::kAddsQueries) next_sums(head, n);
          continue;
        }
        if constexpr (F::kAddsQueries) end_sums();
        if (has_before) {  // released early: a held stage would fill the ring while the remaining warpgroups go on
          end_sums();
          release(&memory.q_empty[stage_before()]);
          has_before = false;
        }
        pass_over(turn);
        if constexpr (F::kAddsQueries) {
          sums.share_zeros();
          if (has_sums) form_sums();
          next_sums(head, n);
        }
      }
    if constexpr (F::kAddsQueries) {
      end_sums();
      if (tile_.steps > 0) form_sums();
    }
    if constexpr (F::kAddsQueries) tile_ = memory.tile;  // registers hold the parts needed by the steps
    release(&memory.kv_empty);
    end_sums();
    if (has_before) release(&memory.q_empty[stage_before()]);
    finish();
  }
  // Computes dQ of the step before the last shared step, at once.
  __device__ __forceinline__ void form_sums() {
    sums.issue(true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(sums.dq);
    sums.add(memory.tile, p.walk);
  }
  __device__ __forceinline__ void next_sums(int head, int n) {
    sums.next(tile_.kv_head * p.walk.group + head, n * F::kQueries);
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

  __device__ __forceinline__ void step(const Turn<F>& turn, int n, bool has_before, bool has_sums) {
    const uint32_t stage = ring.stage;
    const uint32_t q = ptx::shared_address(memory.q[stage]), dout = ptx::shared_address(memory.dout[stage]);
    tile::wait_warp_or_trap(&memory.q_full[stage], ring.phase);
    turn.await();
    issue_scores(s, ptx::shared_address(memory.k), q);
    ptx::wgmma_wait_group<1>();  // the sums of the step before: their operands' registers take dP
    if (has_before) release(&memory.q_empty[stage_before()]);
    if constexpr (kDk) {
      issue_scores(dp, ptx::shared_address(memory.v), dout);
      turn.pass();
      ptx::wgmma_wait_group<1>();
    } else {
      turn.pass();
      ptx::wgmma_wait_group<0>();
    }
    ptx::fence_registers(s);
    probabilities(n);
    if constexpr (kDk) {
      ptx::wgmma_wait_group<0>();
      ptx::fence_registers(dp);
      score_gradients();
    }
    if constexpr (F::kAddsQueries) {
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
      return;
    }
    // Packed only now, because registers hold the sums and either scores or operands, but not both.
    if constexpr (kDv) {
      pack_operand<T>(a, s);
      issue_sum(dv, a, dout);
    }
    if constexpr (kDk) {
      pack_operand<T>(b, dp);
      if constexpr (F::kStoresScores) {
        // A copy, because b may not be read while the product runs; the stores take a while to leave.
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
      int low = p.walk.causal ? key_of(r) - (tile_.keys - tile_.queries) - n * F::kQueries - 2 * int(t) : 0;
      if (F::kMasksKeys && key_of(r) >= tile_.keys)
        low = F::kQueries;  // rows of no segment, or of a different
                            // segment
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
    if (F::kMasksKeys && tile_.first + 64 * int(group) + 64 > tile_.keys) return true;
    if (!p.walk.causal) return false;
    const int first = tile_.first + 64 * int(group) - (tile_.keys - tile_.queries), begin = n * F::kQueries;
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
      row[r] = key_of(r) < tile_.keys ? static_cast<T*>(to) + (int64_t(tile_.k_begin) + key_of(r)) * strides.token +
                                            tile_.kv_head * strides.head
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
    if constexpr (F::kApart) {
      if (group == 0)
        KeyGradient<F, true, false>{
            .memory = memory, .p = p, .group = 0, .warp = warp % 4, .g = lane / 4, .t = lane % 4}
            .run();
      else
        KeyGradient<F, false, true>{
            .memory = memory, .p = p, .group = 0, .warp = warp % 4, .g = lane / 4, .t = lane % 4}
            .run();
    } else {
      KeyGradient<F, true, true>{
          .memory = memory, .p = p, .group = group, .warp = warp % 4, .g = lane / 4, .t = lane % 4}
          .run();
    }
  }
}

template <class F> KeyGradientKernel key_gradient_kernel_of() {
  return {attention_key_gradient<F>, F::kKeys, F::kQueries, F::kThreads, int64_t(sizeof(KeyMemory<F>))};
}
template <class T, bool kCapped> KeyGradientKernel key_gradient_kernel_for(int width) {
  if (width <= 64)
    return key_gradient_kernel_of<KeyGradientForm<T, 64, 2, kCapped ? 64 : 96, 4, false, kCapped, false>>();
  if (width <= 128)
    return key_gradient_kernel_of<KeyGradientForm<T, 128, 2, kCapped ? 32 : 64, 3, false, kCapped, false>>();
  return key_gradient_kernel_of<KeyGradientForm<T, 256, 2, kCapped ? 32 : 64, 2, true, kCapped, false>>();
}
template <class T> KeyGradientKernel key_gradient_kernel(int width, bool capped) {
  return capped ? key_gradient_kernel_for<T, true>(width) : key_gradient_kernel_for<T, false>(width);
}

template <class T> KeyGradientKernel joint_gradient_kernel(int width) {
  constexpr auto kBy = QueryGradientBy::sums;
  if (width <= 64) return key_gradient_kernel_of<KeyGradientForm<T, 64, 2, 128, 3, false, false, false, kBy>>();
  return key_gradient_kernel_of<KeyGradientForm<T, 128, 2, 64, 3, false, false, false, kBy>>();
}
template <class T> KeyGradientKernel storing_gradient_kernel() {
  constexpr auto kBy = QueryGradientBy::stored_scores;
  return key_gradient_kernel_of<KeyGradientForm<T, 128, 2, kScoreStep, 3, false, false, false, kBy>>();
}
template <class T> void (*query_sums_kernel(int width))(const QuerySumParams) {
  return width <= 64 ? attention_query_sums<T, 1> : attention_query_sums<T, 2>;
}

}  // namespace ingot::cuda::attention_hopper
