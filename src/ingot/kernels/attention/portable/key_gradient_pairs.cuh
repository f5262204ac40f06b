#pragma once
// dK and dV of heads of up to 128 columns, where two blocks of 97 KB fit into a multiprocessor: key_gradient.cuh's
// products with fewer reads of shared memory. Two warps share 32 keys. Each computes S^T and dP^T of half of a step's
// queries, writes P^T and dS^T, packed, to shared memory, and then sums over all of the step's queries for half of the
// columns of dV and dK.
//
// Q has two buffers and dO has one: dO of the next step is requested after the product of this one, and arrives during
// the product of dK and that of the next step's scores.
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/attention/parts/places.cuh"
#include "ingot/kernels/attention/portable/products.cuh"

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
  uint4 operands[2][F::kPairs][F::kTiles][F::kQueries / 16][32];  // P^T and dS^T of a step: what each lane multiplies
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

  __device__ __forceinline__ int first_of_pair() const { return tile.first + 16 * F::kTiles * int(pair); }
  __device__ __forceinline__ int key_of(int m, int r) const { return first_of_pair() + 16 * m + int(g) + 8 * r; }

  __device__ __forceinline__ void fetch_keys() {
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      const Source& from = o == 0 ? p.k : p.v;
      const uint32_t at = ptx::shared_address(memory.keys[o]);
      load_rows<F::kWidth, F::kKeys, F::kThreads>(at, row_at<T>(from, int64_t(tile.k_begin) + tile.first, tile.kv_head),
                                                  row_bytes<T>(from), tile.keys - tile.first, p.scores.width);
      (o == 0 ? k : v).address = left_address(at + pair * 16 * F::kTiles * kRowBytes, lane);
    }
  }
  // Queries behind the segment's end become zeros, and so do their lse and delta: they add zeros to both sums.
  __device__ __forceinline__ void fetch_queries(int head, int n, int stage) {
    const int first = n * F::kQueries, rows = tile.queries - first;
    const int64_t token = int64_t(tile.q_begin) + first;
    load_rows<F::kWidth, F::kQueries, F::kThreads>(ptx::shared_address(memory.q[stage]), row_at<T>(p.q, token, head),
                                                   row_bytes<T>(p.q), rows, p.scores.width);
    static_assert(2 * F::kQueries == F::kThreads, "a thread loads one number");
    const int i = int(threadIdx.x) % F::kQueries;
    if (threadIdx.x < F::kQueries)
      ptx::cp_async<4>(ptx::shared_address(&memory.lse[stage][i]),
                       p.scores.lse + head * p.scores.lse_stride + token + i, i < rows ? 4 : 0);
    else
      ptx::cp_async<4>(ptx::shared_address(&memory.delta[stage][i]),
                       p.scores.delta + head * p.scores.delta_stride + token + i, i < rows ? 4 : 0);
  }
  __device__ __forceinline__ void fetch_dout(int head, int n) {
    const int first = n * F::kQueries;
    load_rows<F::kWidth, F::kQueries, F::kThreads>(ptx::shared_address(memory.dout),
                                                   row_at<T>(p.dout, int64_t(tile.q_begin) + first, head),
                                                   row_bytes<T>(p.dout), tile.queries - first, p.scores.width);
  }

  __device__ __forceinline__ void run() {
    clear(dk), clear(dv);
    if (tile.steps > 0) {
      const int begin = tile.begin, end = begin + tile.steps, all = p.walk.group * tile.steps;
      int head = tile.kv_head * p.walk.group, n = begin;  // of the next step
      fetch_keys();
      fetch_queries(head, n, 0);
      ptx::cp_async_commit_group();
      fetch_dout(head, n);
      ptx::cp_async_commit_group();
      const detail::StepRange seeing = seeing_pair();
      for (int j = 0; j < all; ++j) {
        const int stage = j % 2, this_n = n;
        const bool sees = n >= seeing.begin && n < seeing.end;
        if (++n == end) n = begin, ++head;
        ptx::cp_async_wait_group<1>();
        __syncthreads();  // Q has arrived; the products of the preceding step are complete
        if (j + 1 < all) fetch_queries(head, n, 1 - stage);
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
    store(dk, p.dk, p.dk_strides, p.scores.scale, false);
    store(dv, p.dv, p.dv_strides, 1.f, p.add_dv);
  }

  __device__ __forceinline__ detail::StepRange seeing_pair() const {
    const int first = first_of_pair(), end = min(first + 16 * F::kTiles, tile.keys);
    return detail::within(detail::queries_seeing(first, end, tile.queries, tile.keys, p.walk.causal, p.walk.window),
                          first < end, F::kQueries, tile.begin, tile.begin + tile.steps);
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
    if (is_masked(n)) mask(n);
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

  // Rows are keys here, columns queries. Query i sees key j where j - offset <= i < j - offset + window.
  __device__ __forceinline__ void mask(int n) {
    const int window = window_of(p.walk);
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int low = key_of(m, r) - (tile.keys - tile.queries) - first_query(n) - 2 * int(t);
        const int end = window > 0 ? low + window : F::kHalf;
#pragma unroll
        for (int j = 0; j < F::kHalf / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * j + e < low || 8 * j + e >= end) s[m][4 * j + 2 * r + e] = 0;
      }
  }
  __device__ __forceinline__ bool is_masked(int n) const {
    if (!p.walk.causal) return false;
    const int first = first_of_pair() - (tile.keys - tile.queries), begin = first_query(n);
    return begin < first + 16 * F::kTiles - 1 || (p.walk.window > 0 && begin + F::kHalf > first + p.walk.window);
  }
  __device__ __forceinline__ int first_query(int n) const { return n * F::kQueries + int(half) * F::kHalf; }

  __device__ __forceinline__ void store(const float (&d)[F::kTiles][F::kColumns / 2], void* to, const Strides& strides,
                                        float by, bool adds) {
    const float scale[2] = {by, by};
    const int column = int(half) * F::kColumns;
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m) {
      T* row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        row[r] = key_of(m, r) < tile.keys
                     ? static_cast<T*>(to) + (int64_t(tile.k_begin) + key_of(m, r)) * strides.token +
                           tile.kv_head * strides.head + column
                     : nullptr;
      store_rows<T>(d[m], scale, row, p.scores.width - column, t, adds);
    }
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
