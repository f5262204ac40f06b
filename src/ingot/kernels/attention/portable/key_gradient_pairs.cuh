#pragma once
// dK and dV of heads of up to 128 columns, where two blocks of 97 KB fit into a multiprocessor: key_gradient.cuh's
// products with fewer reads of shared memory. Two warps share 32 keys. Each computes S^T and dP^T of half of a step's
// queries, writes P^T and dS^T, packed, to shared memory, and then sums over all of the step's queries for half of the
// columns of dV and dK.
//
// Q has two buffers and dO has one: dO of the next step is requested after the product of this step, and arrives during
// the product of dK and the next step's scores.
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/kernels/attention/portable/key_rows.cuh"

namespace ingot::cuda::attention_portable {

template <class T_> struct KeyPairForm {
  using T = T_;
  static constexpr int kWidth = 128, kTiles = 2, kPairs = 2, kThreads = 64 * kPairs;
  static constexpr int kKeys = 16 * kTiles * kPairs, kQueries = 64, kHalf = kQueries / 2, kColumns = kWidth / 2;
};
template <class F> struct KeyPairMemory {
  alignas(128) char keys[2][F::kKeys * F::kWidth * 2];  // K and V
  char q[2][F::kQueries * F::kWidth * 2];
  char dout[F::kQueries * F::kWidth * 2];
  uint4 operands[2][F::kPairs][F::kTiles][F::kQueries / 16][32];  // P^T and dS^T of a step, as the lanes' operands
  alignas(16) float lse[2][F::kQueries], delta[2][F::kQueries];   // beside Q
};

template <class F> struct KeyPair {
  using T = typename F::T;

  const BackwardArguments& p;
  KeyPairMemory<F>& memory;
  KeyTile tile;
  uint32_t pair, half, lane, g, t;  // half: of a step's queries, and of the columns
  Left<F::kWidth, F::kKeys, F::kTiles, false> k = {}, v = {};
  float s[F::kTiles][F::kHalf / 2], dp[F::kTiles][F::kHalf / 2];
  float dk[F::kTiles][F::kColumns / 2], dv[F::kTiles][F::kColumns / 2];

  __device__ __forceinline__ KeyRows<F::kTiles> rows() const {
    return {p, tile, tile.first + 16 * F::kTiles * int(pair), int(g), int(t)};
  }

  __device__ __forceinline__ void fetch_both_keys() {
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      const uint32_t at = ptx::shared_address(memory.keys[o]);
      fetch_keys<F>(p, tile, o, at);
      (o == 0 ? k : v).address = left_address(at + pair * 16 * F::kTiles * kRowBytes, lane);
    }
  }
  __device__ __forceinline__ void fetch_q(int head, int n, int stage) {
    fetch_queries<F>(p, tile, p.q, head, n, ptx::shared_address(memory.q[stage]));
    fetch_lse_and_delta<F>(p, tile, head, n, memory.lse[stage], memory.delta[stage]);
  }
  __device__ __forceinline__ void fetch_dout(int head, int n) {
    fetch_queries<F>(p, tile, p.dout, head, n, ptx::shared_address(memory.dout));
  }

  __device__ __forceinline__ void run() {
    clear(dk), clear(dv);
    if (tile.steps > 0) {
      const int begin = tile.begin, end = begin + tile.steps, all = p.walk.group * tile.steps;
      int head = tile.kv_head * p.walk.group, n = begin;  // of the next step
      fetch_both_keys();
      fetch_q(head, n, 0);
      ptx::cp_async_commit_group();
      fetch_dout(head, n);
      ptx::cp_async_commit_group();
      const detail::StepRange seeing = rows().steps(F::kQueries);
      for (int j = 0; j < all; ++j) {
        const int stage = j % 2, this_n = n;
        const bool sees = n >= seeing.begin && n < seeing.end;
        if (++n == end) n = begin, ++head;
        ptx::cp_async_wait_group<1>();
        __syncthreads();  // Q has arrived; the products of the preceding step are complete
        if (j + 1 < all) fetch_q(head, n, 1 - stage);
        ptx::cp_async_commit_group();
        if (sees) probabilities(this_n, stage);
        ptx::cp_async_wait_group<1>();
        __syncthreads();  // dO and P^T are complete
        if (sees) {
          gradients(stage);
          add(dv, 0, ptx::shared_address(memory.dout));
        }
        __syncthreads();  // dS^T is complete, and dO's memory is free
        if (j + 1 < all) fetch_dout(head, n);
        ptx::cp_async_commit_group();
        if (sees) add(dk, 1, ptx::shared_address(memory.q[stage]));
      }
    }
    const int column = int(half) * F::kColumns;
    rows().template store<T>(dk, p.dk, p.dk_strides, p.scores.scale, false, column);
    rows().template store<T>(dv, p.dv, p.dv_strides, 1.f, p.add_dv, column);
  }

  // d = this pair's keys by this warp's queries, whose rows begin at `queries`.
  __device__ __forceinline__ void multiply(float (&d)[F::kTiles][F::kHalf / 2],
                                           const Left<F::kWidth, F::kKeys, F::kTiles, false>& keys, uint32_t queries) {
    const uint32_t right = right_address(queries + half * F::kHalf * kRowBytes, lane);
    clear(d);
#pragma unroll
    for (int i = 0; i < F::kWidth / 16; ++i) multiply_columns<T, F::kQueries, F::kHalf>(d, keys, right, i);
  }
  __device__ __forceinline__ void share(const float (&d)[F::kTiles][F::kHalf / 2], int which) {
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
      for (int i = 0; i < F::kHalf / 16; ++i) {
        uint32_t a[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) a[r] = ptx::pack(T{}, d[m][8 * i + 2 * r], d[m][8 * i + 2 * r + 1]);
        memory.operands[which][pair][m][int(half) * (F::kHalf / 16) + i][lane] = make_uint4(a[0], a[1], a[2], a[3]);
      }
  }
  // d += P^T dO or dS^T Q over all queries of the step, for this warp's columns.
  __device__ __forceinline__ void add(float (&d)[F::kTiles][F::kColumns / 2], int which, uint32_t rows) {
    const uint32_t address = summed_address(rows + half * (F::kColumns / 64) * F::kQueries * kRowBytes, lane);
#pragma unroll
    for (int i = 0; i < F::kQueries / 16; ++i) {
      uint32_t a[F::kTiles][4];
#pragma unroll
      for (int m = 0; m < F::kTiles; ++m) {
        const uint4 x = memory.operands[which][pair][m][i][lane];
        a[m][0] = x.x, a[m][1] = x.y, a[m][2] = x.z, a[m][3] = x.w;
      }
#pragma unroll
      for (int n = 0; n < F::kColumns / 16; ++n) {
        uint32_t b[4];
        ptx::ldmatrix_trans(b, columns_at<F::kQueries>(address, n) + uint32_t(16 * i) * kRowBytes);
#pragma unroll
        for (int m = 0; m < F::kTiles; ++m) multiply_16<T>(d[m] + 8 * n, a[m], b);
      }
    }
  }

  __device__ __forceinline__ void probabilities(int n, int stage) {
    multiply(s, k, ptx::shared_address(memory.q[stage]));
    const float* const lse = memory.lse[stage] + half * F::kHalf;
#pragma unroll
    for (int j = 0; j < F::kHalf / 8; ++j) {
      const float2 of = *reinterpret_cast<const float2*>(lse + 8 * j + 2 * t);
#pragma unroll
      for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i)
          s[m][i] = probability<false>(p.scores, s[m][i], (i % 2 == 0 ? of.x : of.y) * kLog2E).value;
    }
    if (const int begin = n * F::kQueries + int(half) * F::kHalf; rows().is_masked(begin, F::kHalf))
      rows().template mask<F::kHalf>(begin, [&](int m, int i) { s[m][i] = 0; });
    share(s, 0);
  }
  __device__ __forceinline__ void gradients(int stage) {
    multiply(dp, v, ptx::shared_address(memory.dout));
    const float* const delta = memory.delta[stage] + half * F::kHalf;
#pragma unroll
    for (int j = 0; j < F::kHalf / 8; ++j) {
      const float2 of = *reinterpret_cast<const float2*>(delta + 8 * j + 2 * t);
#pragma unroll
      for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) dp[m][i] = s[m][i] * (dp[m][i] - (i % 2 == 0 ? of.x : of.y));
    }
    share(dp, 1);
  }
};

template <class F>
__global__ void __launch_bounds__(F::kThreads, 2)
    attention_portable_key_pairs(const __grid_constant__ BackwardArguments p) {
  auto& memory = *tile::dynamic_shared<KeyPairMemory<F>>();
  const KeyTile tile = find_key_tile<F>(p.walk, blockIdx.x);
  if (tile.keys == 0) return;
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  KeyPair<F>{.p = p,
             .memory = memory,
             .tile = tile,
             .pair = warp / 2,
             .half = warp % 2,
             .lane = lane,
             .g = lane / 4,
             .t = lane % 4}
      .run();
}

template <class F> BackwardKernel key_pair_kernel_of() {
  static_assert(sizeof(KeyPairMemory<F>) <= kMostMemory, "the shared memory of a block on every GPU");
  return {attention_portable_key_pairs<F>, F::kKeys, F::kThreads, int64_t(sizeof(KeyPairMemory<F>))};
}

}  // namespace ingot::cuda::attention_portable
