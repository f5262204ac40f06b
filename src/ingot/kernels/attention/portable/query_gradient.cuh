#pragma once
// dQ: the forward kernel's walk, with dO beside Q. The products S = Q K^T and dP = dO V^T run together; dS = P (dP -
// delta) in registers is the left operand of dQ += dS K.
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/attention/parts/places.cuh"
#include "ingot/kernels/attention/portable/products.cuh"

namespace ingot::cuda::attention_portable {

// kStages: stages of K and V. kHeld: a warp keeps its rows of Q and dO in registers, and Q and dO first lie in the
// memory of the stages, if that memory is large enough.
template <class T_, int kWidth_, int kTiles_, int kKeys_, bool kHeld_, int kStages_, int kBlocks_>
struct QueryGradientForm {
  using T = T_;
  static constexpr int kWidth = kWidth_, kTiles = kTiles_, kKeys = kKeys_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr bool kHeld = kHeld_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kTiles * kWarps;
  // kShared: Q and dO first lie in the memory of the last stages. kEarly: Q and dO leave the first stage free, so the
  // copies of K and V into it can begin before Q and dO are in registers.
  static constexpr bool kShared = kHeld && kRows <= kStages * kKeys, kEarly = kRows <= (kStages - 1) * kKeys;
};
template <class F> struct QueryGradientMemory {
  static constexpr int kStage = F::kKeys * F::kWidth * 2, kOperand = F::kRows * F::kWidth * 2;
  alignas(128) char keys[F::kStages][2][kStage];  // K and V
  char own_rows[F::kShared ? 1 : 2 * kOperand];
  __device__ __forceinline__ char* rows(int o) {  // the memory of Q, or of dO
    return F::kShared ? &keys[0][0][0] + 2 * (F::kStages * kStage - kOperand) + o * kOperand : own_rows + o * kOperand;
  }
};

template <class F> struct QueryGradientTile {
  using T = typename F::T;
  using Rows = Left<F::kWidth, F::kRows, F::kTiles, F::kHeld>;

  const BackwardArguments& p;
  QueryGradientMemory<F>& memory;
  Tile tile;
  uint32_t warp, lane, g, t;
  int kv_head;
  Rows q = {}, dout = {};
  float s[F::kTiles][F::kKeys / 2], dp[F::kTiles][F::kKeys / 2], dq[F::kTiles][F::kWidth / 2];
  float lse[F::kTiles][2], delta[F::kTiles][2];  // of the thread's rows; lse in powers of two

  __device__ __forceinline__ int first_of_warp() const { return tile.first + 16 * F::kTiles * int(warp); }
  __device__ __forceinline__ int row_of(int m, int r) const { return first_of_warp() + 16 * m + int(g) + 8 * r; }

  __device__ __forceinline__ void fetch(int n, int stage) {
    const int first = n * F::kKeys;
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      const Source& from = o == 0 ? p.k : p.v;
      load_rows<F::kWidth, F::kKeys, F::kThreads>(ptx::shared_address(memory.keys[stage][o]),
                                                  row_at<T>(from, int64_t(tile.k_begin) + first, kv_head),
                                                  row_bytes<T>(from), tile.keys - first, p.scores.width);
    }
    ptx::cp_async_commit_group();
  }
  __device__ __forceinline__ void fetch_rows() {
    const Source* const from[2] = {&p.q, &p.dout};
    Rows* const to[2] = {&q, &dout};
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      const uint32_t at = ptx::shared_address(memory.rows(o));
      load_rows<F::kWidth, F::kRows, F::kThreads>(at,
                                                  row_at<T>(*from[o], int64_t(tile.q_begin) + tile.first, tile.head),
                                                  row_bytes<T>(*from[o]), tile.queries - tile.first, p.scores.width);
      to[o]->address = left_address(at + warp * 16 * F::kTiles * kRowBytes, lane);
    }
  }

  __device__ __forceinline__ void hold_rows() {
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    q.hold(), dout.hold();
  }

  __device__ __forceinline__ void run() {
    clear(dq);
    if (tile.steps > 0) {
      const int last = tile.begin + tile.steps - 1;
      fetch_rows();
      if constexpr (F::kShared && !F::kEarly) {
        hold_rows();
        __syncthreads();
        fetch(last, 0);
      } else {
        fetch(last, 0);
        if constexpr (F::kHeld) hold_rows();
      }
      begin_rows();
      const detail::StepRange seen = seen_by_warp();
      for (int j = 0; j < tile.steps; ++j) {
        const int n = last - j, stage = j % F::kStages;
        ptx::cp_async_wait_group<0>();
        __syncthreads();
        if (F::kStages == 2 && j + 1 < tile.steps) fetch(n - 1, 1 - stage);
        if (n >= seen.begin && n < seen.end) step(n, stage);
        if (F::kStages == 1 && j + 1 < tile.steps) {
          __syncthreads();
          fetch(n - 1, 0);
        }
      }
    }
    finish();
  }

  __device__ __forceinline__ detail::StepRange seen_by_warp() const {
    const int first = first_of_warp(), end = min(first + 16 * F::kTiles, tile.queries);
    return detail::within(detail::keys_seen(first, end, tile.queries, tile.keys, p.walk.causal, p.walk.window),
                          first < end, F::kKeys, tile.begin, tile.begin + tile.steps);
  }

  __device__ __forceinline__ void begin_rows() {
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool there = row_of(m, r) < tile.queries;
        const int64_t token = int64_t(tile.q_begin) + row_of(m, r);
        lse[m][r] = there ? p.scores.lse[tile.head * p.scores.lse_stride + token] * kLog2E : INFINITY;
        delta[m][r] = there ? p.scores.delta[tile.head * p.scores.delta_stride + token] : 0;
      }
  }

  __device__ __forceinline__ void step(int n, int stage) {
    const uint32_t k = ptx::shared_address(memory.keys[stage][0]), v = ptx::shared_address(memory.keys[stage][1]);
    const uint32_t right_k = right_address(k, lane), right_v = right_address(v, lane);
    clear(s), clear(dp);
#pragma unroll
    for (int i = 0; i < F::kWidth / 16; ++i) {
      multiply_columns<T, F::kKeys, F::kKeys>(s, q, right_k, i);
      multiply_columns<T, F::kKeys, F::kKeys>(dp, dout, right_v, i);
    }
    if (p.scores.cap_out != 0)
      gradients<true>();
    else
      gradients<false>();
    if (is_masked(n)) mask(n);
    multiply_rows<T, F::kWidth, F::kKeys>(dq, dp, summed_address(k, lane));
  }

  // dp becomes dS.
  template <bool kCapped> __device__ __forceinline__ void gradients() {
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
      for (int i = 0; i < F::kKeys / 2; ++i) {
        const Probability x = probability<kCapped>(p.scores, s[m][i], lse[m][i / 2 % 2]);
        dp[m][i] = x.value * (dp[m][i] - delta[m][i / 2 % 2]);
        if constexpr (kCapped) dp[m][i] *= x.slope;
      }
  }
  // Keys that a row does not see have no gradient; in rows that do not exist dS may be any number.
  __device__ __forceinline__ void mask(int n) {
    const int column = n * F::kKeys + 2 * int(t), window = window_of(p.walk);
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int seen_end = row_of(m, r) + tile.keys - tile.queries + 1 - column;  // by a causal mask
        const int end = p.walk.causal ? min(seen_end, tile.keys - column) : tile.keys - column;
        const int low = window > 0 ? seen_end - window : 0;
#pragma unroll
        for (int j = 0; j < F::kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * j + e < low || 8 * j + e >= end) dp[m][4 * j + 2 * r + e] = 0;
      }
  }
  __device__ __forceinline__ bool is_masked(int n) const {
    const int first = first_of_warp(), begin = n * F::kKeys, end = begin + F::kKeys;
    if (end > tile.keys) return true;
    if (!p.walk.causal) return false;
    const int offset = tile.keys - tile.queries + 1;
    return end > first + offset || (p.walk.window > 0 && begin < first + 16 * F::kTiles - 1 + offset - p.walk.window);
  }

  __device__ __forceinline__ void finish() {
    const float scale[2] = {p.scores.scale, p.scores.scale};
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m) {
      T* row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        row[r] = row_of(m, r) < tile.queries
                     ? static_cast<T*>(p.dq) + (int64_t(tile.q_begin) + row_of(m, r)) * p.dq_strides.token +
                           tile.head * p.dq_strides.head
                     : nullptr;
      store_rows<T>(dq[m], scale, row, p.scores.width, t);
    }
  }
};

template <class F>
__global__ void __launch_bounds__(F::kThreads, F::kBlocks)
    attention_portable_query_gradient(const __grid_constant__ BackwardArguments p) {
  auto& memory = *tile::dynamic_shared<QueryGradientMemory<F>>();
  const Tile tile = find_tile<F>(p.walk, blockIdx.x);
  if (tile.queries == 0) return;
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  QueryGradientTile<F>{.p = p,
                       .memory = memory,
                       .tile = tile,
                       .warp = warp,
                       .lane = lane,
                       .g = lane / 4,
                       .t = lane % 4,
                       .kv_head = tile.head / p.walk.group}
      .run();
}

template <class F> BackwardKernel query_gradient_kernel_of() {
  static_assert(sizeof(QueryGradientMemory<F>) <= kMostMemory, "the shared memory of a block on every GPU");
  return {attention_portable_query_gradient<F>, F::kRows, F::kThreads, int64_t(sizeof(QueryGradientMemory<F>))};
}
template <class T> BackwardKernel query_gradient_kernel(int width, const gpu::Limits& limits) {
  if (width <= 64) {
    using Large = QueryGradientForm<T, 64, 2, 64, false, 2, 2>;
    if (two_fit(sizeof(QueryGradientMemory<Large>), limits)) return query_gradient_kernel_of<Large>();
    return query_gradient_kernel_of<QueryGradientForm<T, 64, 1, 64, true, 2, 3>>();
  }
  if (width > 128) return query_gradient_kernel_of<QueryGradientForm<T, 256, 1, 32, false, 1, 2>>();
  using Large = QueryGradientForm<T, 128, 2, 32, false, 2, 2>;
  if (two_fit(sizeof(QueryGradientMemory<Large>), limits)) return query_gradient_kernel_of<Large>();
  return query_gradient_kernel_of<QueryGradientForm<T, 128, 1, 32, true, 2, 2>>();
}

}  // namespace ingot::cuda::attention_portable
