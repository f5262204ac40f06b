#pragma once
// dK and dV. A block takes a tile of keys of one key head and walks over the steps of queries of all heads of its
// group. Products are transposed, keys by queries: P^T and dS^T in registers are the left operands of dV += P^T dO and
// dK += dS^T Q. All heads of the group add to the same registers. (key_gradient_pairs.cuh has another form for 128
// columns.)
//
// Above 128 columns registers hold only one of the sums: of two groups of four warps with the same keys, one computes
// dV and the other dK.
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/kernels/attention/portable/key_gradient_pairs.cuh"
#include "ingot/kernels/attention/portable/key_rows.cuh"

namespace ingot::cuda::attention_portable {

// kHeldK, kHeldV: a warp keeps its rows of K, of V in registers. With both, K and V first lie in the memory of the
// stages of Q and dO, if that memory is large enough. kApart: a group of warps for dV and one for dK.
template <class T_, int kWidth_, int kTiles_, int kQueries_, bool kHeldK_, bool kHeldV_, int kStages_, bool kApart_,
          int kBlocks_>
struct KeyGradientForm {
  using T = T_;
  static constexpr int kWidth = kWidth_, kTiles = kTiles_, kQueries = kQueries_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr bool kHeldK = kHeldK_, kHeldV = kHeldV_, kApart = kApart_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps * (kApart ? 2 : 1), kKeys = 16 * kTiles * kWarps;
  // kShared: K and V first lie in the memory of the last stages. kEarly: K and V leave the first stage free, so the
  // copies of Q and dO into it can begin before K and V are in registers.
  static constexpr bool kShared = kHeldK && kHeldV && kKeys <= kStages * kQueries;
  static constexpr bool kEarly = kKeys <= (kStages - 1) * kQueries;
};
template <class F> struct KeyGradientMemory {
  static constexpr int kStage = F::kQueries * F::kWidth * 2, kOperand = F::kKeys * F::kWidth * 2;
  alignas(128) char queries[F::kStages][2][kStage];  // Q and dO
  char own_rows[F::kShared ? 1 : 2 * kOperand];
  alignas(16) float lse[F::kStages][F::kQueries], delta[F::kStages][F::kQueries];
  __device__ __forceinline__ char* keys(int o) {  // of K, of V
    return F::kShared ? &queries[0][0][0] + 2 * (F::kStages * kStage - kOperand) + o * kOperand
                      : own_rows + o * kOperand;
  }
};

// kDv, kDk: whether this warp computes dV, and whether it computes dK.
template <class F, bool kDv, bool kDk> struct KeyGradientTile {
  using T = typename F::T;

  const BackwardArguments& p;
  KeyGradientMemory<F>& memory;
  KeyTile tile;
  uint32_t warp, lane, g, t;  // warp: of its group
  Left<F::kWidth, F::kKeys, F::kTiles, F::kHeldK> k = {};
  Left<F::kWidth, F::kKeys, F::kTiles, F::kHeldV> v = {};
  float s[F::kTiles][F::kQueries / 2], dp[F::kTiles][kDk ? F::kQueries / 2 : 1];
  float dk[F::kTiles][kDk ? F::kWidth / 2 : 1], dv[F::kTiles][kDv ? F::kWidth / 2 : 1];

  __device__ __forceinline__ KeyRows<F::kTiles> rows() const {
    return {p, tile, tile.first + 16 * F::kTiles * int(warp), int(g), int(t)};
  }

  __device__ __forceinline__ void fetch_both_keys() {
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      const uint32_t at = ptx::shared_address(memory.keys(o));
      fetch_keys<F>(p, tile, o, at);
      (o == 0 ? k.address : v.address) = left_address(at + warp * 16 * F::kTiles * kRowBytes, lane);
    }
  }
  __device__ __forceinline__ void fetch(int head, int n, int stage) {
#pragma unroll
    for (int o = 0; o < 2; ++o)
      fetch_queries<F>(p, tile, o == 0 ? p.q : p.dout, head, n, ptx::shared_address(memory.queries[stage][o]));
    fetch_lse_and_delta<F>(p, tile, head, n, memory.lse[stage], memory.delta[stage]);
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void hold_keys() {
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    k.hold(), v.hold();
  }

  __device__ __forceinline__ void run() {
    clear(dk), clear(dv);
    if (tile.steps > 0) {
      const int begin = tile.begin, end = begin + tile.steps, all = p.walk.group * tile.steps;
      int head = tile.kv_head * p.walk.group, n = begin;  // of this step
      fetch_both_keys();
      if constexpr (F::kShared && !F::kEarly) {
        hold_keys();
        __syncthreads();
        fetch(head, n, 0);
      } else {
        fetch(head, n, 0);
        if constexpr (F::kHeldK || F::kHeldV) hold_keys();
      }
      const detail::StepRange seeing = rows().steps(F::kQueries);
      for (int j = 0; j < all; ++j) {
        const int stage = j % F::kStages, this_n = n;
        if (++n == end) n = begin, ++head;
        ptx::cp_async_wait_group<0>();
        __syncthreads();
        if (F::kStages == 2 && j + 1 < all) fetch(head, n, 1 - stage);
        if (this_n >= seeing.begin && this_n < seeing.end) step(this_n, stage);
        if (F::kStages == 1 && j + 1 < all) {
          __syncthreads();
          fetch(head, n, 0);
        }
      }
    }
    finish();
  }

  __device__ __forceinline__ void step(int n, int stage) {
    const uint32_t q = ptx::shared_address(memory.queries[stage][0]);
    const uint32_t dout = ptx::shared_address(memory.queries[stage][1]);
    const uint32_t right_q = right_address(q, lane), right_dout = right_address(dout, lane);
    clear(s), clear(dp);
#pragma unroll
    for (int i = 0; i < F::kWidth / 16; ++i) {
      multiply_columns<T, F::kQueries, F::kQueries>(s, k, right_q, i);
      if constexpr (kDk && F::kTiles == 1) multiply_columns<T, F::kQueries, F::kQueries>(dp, v, right_dout, i);
    }
    if constexpr (kDk && F::kTiles > 1) {  // in turn, because there are no registers for the operands of both
#pragma unroll
      for (int i = 0; i < F::kWidth / 16; ++i) multiply_columns<T, F::kQueries, F::kQueries>(dp, v, right_dout, i);
    }
    if (p.scores.cap_out != 0)
      gradients<true>(stage);
    else
      gradients<false>(stage);
    if (const int begin = n * F::kQueries; rows().is_masked(begin, F::kQueries))
      rows().template mask<F::kQueries>(begin, [&](int m, int i) {
        s[m][i] = 0;
        if constexpr (kDk) dp[m][i] = 0;
      });
    if constexpr (kDv) multiply_rows<T, F::kWidth, F::kQueries>(dv, s, summed_address(dout, lane));
    if constexpr (kDk) multiply_rows<T, F::kWidth, F::kQueries>(dk, dp, summed_address(q, lane));
  }

  // s becomes P^T, dp becomes dS^T.
  template <bool kCapped> __device__ __forceinline__ void gradients(int stage) {
#pragma unroll
    for (int j = 0; j < F::kQueries / 8; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(memory.lse[stage] + 8 * j + 2 * t);
      const float2 delta = *reinterpret_cast<const float2*>(memory.delta[stage] + 8 * j + 2 * t);
#pragma unroll
      for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
          const Probability x = probability<kCapped>(p.scores, s[m][i], (i % 2 == 0 ? lse.x : lse.y) * kLog2E);
          s[m][i] = x.value;
          if constexpr (kDk) {
            dp[m][i] = x.value * (dp[m][i] - (i % 2 == 0 ? delta.x : delta.y));
            if constexpr (kCapped) dp[m][i] *= x.slope;
          }
        }
    }
  }
  __device__ __forceinline__ void finish() {
    if constexpr (kDk) rows().template store<T>(dk, p.dk, p.dk_strides, p.scores.scale, false);
    if constexpr (kDv) rows().template store<T>(dv, p.dv, p.dv_strides, 1.f, p.add_dv);
  }
};

template <class Tile, class F>
__device__ __forceinline__ void run_key_gradient(const BackwardArguments& p, KeyGradientMemory<F>& memory,
                                                 const KeyTile& tile, uint32_t warp, uint32_t lane) {
  Tile{.p = p, .memory = memory, .tile = tile, .warp = warp, .lane = lane, .g = lane / 4, .t = lane % 4}.run();
}

template <class F>
__global__ void __launch_bounds__(F::kThreads, F::kBlocks)
    attention_portable_key_gradient(const __grid_constant__ BackwardArguments p) {
  auto& memory = *tile::dynamic_shared<KeyGradientMemory<F>>();
  const KeyTile tile = find_key_tile<F>(p.walk, blockIdx.x);
  if (tile.keys == 0) return;
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if constexpr (F::kApart) {
    if (warp < 4)
      run_key_gradient<KeyGradientTile<F, true, false>>(p, memory, tile, warp, lane);
    else
      run_key_gradient<KeyGradientTile<F, false, true>>(p, memory, tile, warp - 4, lane);
  } else {
    run_key_gradient<KeyGradientTile<F, true, true>>(p, memory, tile, warp, lane);
  }
}

template <class F> BackwardKernel key_gradient_kernel_of() {
  static_assert(sizeof(KeyGradientMemory<F>) <= kMostMemory, "the shared memory of a block on every GPU");
  return {attention_portable_key_gradient<F>, F::kKeys, F::kThreads, int64_t(sizeof(KeyGradientMemory<F>))};
}
template <class T> BackwardKernel key_gradient_kernel(int width, bool capped, const gpu::Limits& limits) {
  if (width <= 64) return key_gradient_kernel_of<KeyGradientForm<T, 64, 1, 64, true, true, 2, false, 2>>();
  if (width > 128) return key_gradient_kernel_of<KeyGradientForm<T, 256, 1, 32, false, false, 1, true, 1>>();
  if (!capped && two_fit(sizeof(KeyPairMemory<KeyPairForm<T>>), limits)) return key_pair_kernel_of<KeyPairForm<T>>();
  // with two stages, the next step's copies arrive during the products
  using Large = KeyGradientForm<T, 128, 1, 32, false, false, 2, false, 2>;
  if (two_fit(sizeof(KeyGradientMemory<Large>), limits)) return key_gradient_kernel_of<Large>();
  return key_gradient_kernel_of<KeyGradientForm<T, 128, 1, 32, false, false, 1, false, 2>>();
}

}  // namespace ingot::cuda::attention_portable
