#pragma once
// The forward kernel. A block takes a tile of queries of a head. Each of its four warps has 16 or 32 queries: S = Q K^T
// in registers, softmax in place, and P, packed, is the left operand of O += P V. Steps of keys go from the last step
// that the tile sees to the first. Tiles of K and V are requested before they are needed. While a block waits or
// computes powers, another block of the multiprocessor multiplies.
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/attention/parts/places.cuh"
#include "ingot/kernels/attention/portable/products.cuh"

namespace ingot::cuda::attention_portable {

constexpr float kLn2 = 0.69314718f;

// kTiles: tiles of 16 queries of a warp. kHeld: a warp's queries are kept in registers. kBuffers: tiles of K or V in
// shared memory. kBlocks: blocks that run on a multiprocessor at once, for which registers suffice.
template <class T_, int kWidth_, int kTiles_, int kKeys_, bool kHeld_, int kBuffers_, int kBlocks_> struct ForwardForm {
  using T = T_;
  static constexpr int kWidth = kWidth_, kTiles = kTiles_, kKeys = kKeys_, kBuffers = kBuffers_, kBlocks = kBlocks_;
  static constexpr bool kHeld = kHeld_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kTiles * kWarps;
  static_assert(kBuffers >= 2, "one is read while another is filled");
};
template <class F> struct ForwardMemory {
  alignas(128) char q[F::kRows * F::kWidth * 2];
  char keys[F::kBuffers][F::kKeys * F::kWidth * 2];  // K and V of a step alternate
};

template <class F> struct ForwardTile {
  using T = typename F::T;

  const ForwardArguments& p;
  ForwardMemory<F>& memory;
  Tile tile;
  uint32_t warp, lane, g, t;
  int kv_head;
  Left<F::kWidth, F::kRows, F::kTiles, F::kHeld> q = {};
  float s[F::kTiles][F::kKeys / 2], o[F::kTiles][F::kWidth / 2];
  // for each of the thread's rows: the reference of the powers, and the sum of the powers
  float high[F::kTiles][2], sum[F::kTiles][2];
  float unit = 1;  // converts a score to an exponent of two

  __device__ __forceinline__ int first_of_warp() const { return tile.first + 16 * F::kTiles * int(warp); }
  __device__ __forceinline__ int row_of(int m, int r) const { return first_of_warp() + 16 * m + int(g) + 8 * r; }
  __device__ __forceinline__ uint32_t buffer(int item) const {
    return ptx::shared_address(memory.keys[item % F::kBuffers]);
  }

  // Loads an item: item 2 j is K and item 2 j + 1 is V of the step j places before the last one.
  __device__ __forceinline__ void fetch(int item) {
    if (item < 2 * tile.steps) {
      const Source& from = item % 2 == 0 ? p.k : p.v;
      const int first = (tile.begin + tile.steps - 1 - item / 2) * F::kKeys;
      load_rows<F::kWidth, F::kKeys, F::kThreads>(buffer(item), row_at<T>(from, int64_t(tile.k_begin) + first, kv_head),
                                                  row_bytes<T>(from), tile.keys - first, p.common.width);
    }
    ptx::cp_async_commit_group();
  }
  // Waits for the item, and requests the next item into the buffer of the preceding one.
  __device__ __forceinline__ void await(int item) {
    ptx::cp_async_wait_group<F::kBuffers - 2>();
    __syncthreads();
    fetch(item + F::kBuffers - 1);
  }

  __device__ __forceinline__ void run() {
    begin_rows();
    if (tile.steps > 0) {
      load_rows<F::kWidth, F::kRows, F::kThreads>(ptx::shared_address(memory.q),
                                                  row_at<T>(p.q, int64_t(tile.q_begin) + tile.first, tile.head),
                                                  row_bytes<T>(p.q), tile.queries - tile.first, p.common.width);
      for (int i = 0; i < F::kBuffers - 1; ++i) fetch(i);
      q.address = left_address(ptx::shared_address(memory.q) + warp * 16 * F::kTiles * kRowBytes, lane);
    }
    const int last = tile.begin + tile.steps - 1;
    const detail::StepRange seen = seen_by_warp();
    for (int j = 0; j < tile.steps; ++j) {
      const int n = last - j;
      const bool sees = n >= seen.begin && n < seen.end;
      await(2 * j);
      if (j == 0) q.hold();
      if (sees) score(buffer(2 * j));
      await(2 * j + 1);
      if (sees) {
        softmax(n);
        multiply_rows<T, F::kWidth, F::kKeys>(o, s, summed_address(buffer(2 * j + 1), lane));
      }
    }
    finish();
  }

  __device__ __forceinline__ detail::StepRange seen_by_warp() const {
    const int first = first_of_warp(), end = min(first + 16 * F::kTiles, tile.queries);
    const Walk& w = p.common.walk;
    return detail::within(detail::keys_seen(first, end, tile.queries, tile.keys, w.causal, w.window), first < end,
                          F::kKeys, tile.begin, tile.begin + tile.steps);
  }

  // A sink acts as a first key with value zero, visible to all queries.
  __device__ __forceinline__ void begin_rows() {
    clear(o);
    const ForwardParams& f = p.common;
    unit = is_capped() ? 1.f : f.scale_log2;
    const float sink = f.sinks == nullptr ? -INFINITY
                       : f.sinks_f32      ? static_cast<const float*>(f.sinks)[tile.head]
                                          : tile::to_float(static_cast<const T*>(f.sinks)[tile.head]);
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        high[m][r] = sink * kLog2E / unit;
        sum[m][r] = f.sinks != nullptr && t == 0 ? 1.f : 0.f;
      }
  }
  // Scores are compared before they are scaled, which only a positive scale allows.
  __device__ __forceinline__ bool is_capped() const { return p.common.cap_out != 0 || !(p.common.scale_log2 > 0); }

  __device__ __forceinline__ void score(uint32_t keys) {
    const uint32_t right = right_address(keys, lane);
    clear(s);
#pragma unroll
    for (int i = 0; i < F::kWidth / 16; ++i) multiply_columns<T, F::kKeys, F::kKeys>(s, q, right, i);
  }

  // Turns the scores of step n into powers relative to each row's reference. The reference is raised only where a power
  // would exceed 2^kSlack: until then neither the sums nor O need another factor.
  static constexpr float kSlack = 8;
  __device__ __forceinline__ void softmax(int n) {
    if (is_capped()) {
#pragma unroll
      for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
        for (float& x : s[m]) x = capped(x, p.common.cap_in, p.common.cap_out);
    }
    if (is_masked(n)) mask(n);
    float shrink[F::kTiles][2];
    bool raised = false;
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = high[m][r];
#pragma unroll
        for (int j = 0; j < F::kKeys / 8; ++j) top = fmaxf(top, fmaxf(s[m][4 * j + 2 * r], s[m][4 * j + 2 * r + 1]));
        top = quad_max(top);
        if (!((top - high[m][r]) * unit > kSlack)) top = high[m][r];
        raised |= top != high[m][r];
        const float base = (top == -INFINITY ? 0.f : top) * unit;  // no key seen so far: all powers are 0
        shrink[m][r] = top != high[m][r] ? ptx::exp2_approx(high[m][r] * unit - base) : 1.f;
        high[m][r] = top;
        float added = 0;
#pragma unroll
        for (int j = 0; j < F::kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][4 * j + 2 * r + e];
            x = ptx::exp2_approx(x * unit - base);
            added += x;
          }
        sum[m][r] = sum[m][r] * shrink[m][r] + added;
      }
    if (!__any_sync(~0u, raised)) return;
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
      for (int i = 0; i < F::kWidth / 2; ++i) o[m][i] *= shrink[m][i / 2 % 2];
  }

  // Whether some row of the warp does not see some key of step n.
  __device__ __forceinline__ bool is_masked(int n) const {
    const int first = first_of_warp(), begin = n * F::kKeys, end = begin + F::kKeys;
    if (end > tile.keys) return true;
    if (!p.common.walk.causal) return false;
    const int offset = tile.keys - tile.queries + 1;
    return end > first + offset ||
           (p.common.walk.window > 0 && begin < first + 16 * F::kTiles - 1 + offset - p.common.walk.window);
  }
  __device__ __forceinline__ void mask(int n) {
    const int column = n * F::kKeys + 2 * int(t), window = window_of(p.common.walk);
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int seen_end = row_of(m, r) + tile.keys - tile.queries + 1 - column;  // by a causal mask
        const int end = p.common.walk.causal ? min(seen_end, tile.keys - column) : tile.keys - column;
        const int low = window > 0 ? seen_end - window : 0;
#pragma unroll
        for (int j = 0; j < F::kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * j + e < low || 8 * j + e >= end) s[m][4 * j + 2 * r + e] = -INFINITY;
      }
  }

  __device__ __forceinline__ void finish() {
    const ForwardParams& f = p.common;
#pragma unroll
    for (int m = 0; m < F::kTiles; ++m) {
      float scale[2];
      T* row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = row_of(m, r);
        const int64_t token = int64_t(tile.q_begin) + i;
        const float all = quad_sum(sum[m][r]);
        scale[r] = all == 0 ? 0.f : 1 / all;
        row[r] = i < tile.queries
                     ? static_cast<T*>(f.out) + token * f.out_strides.token + tile.head * f.out_strides.head
                     : nullptr;
        if (f.lse != nullptr && i < tile.queries && t == 0)
          f.lse[tile.head * f.lse_stride + token] = all == 0 ? -INFINITY : high[m][r] * unit * kLn2 + logf(all);
      }
      store_rows<T>(o[m], scale, row, f.width, t);
    }
  }
};

template <class F>
__global__ void __launch_bounds__(F::kThreads, F::kBlocks)
    attention_portable_forward(const __grid_constant__ ForwardArguments p) {
  auto& memory = *tile::dynamic_shared<ForwardMemory<F>>();
  const Tile tile = find_tile<F>(p.common.walk, blockIdx.x);
  if (tile.queries == 0) return;
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  ForwardTile<F>{.p = p,
                 .memory = memory,
                 .tile = tile,
                 .warp = warp,
                 .lane = lane,
                 .g = lane / 4,
                 .t = lane % 4,
                 .kv_head = tile.head / p.common.walk.group}
      .run();
}

template <class F> ForwardKernel forward_kernel_of() {
  static_assert(sizeof(ForwardMemory<F>) <= kMostMemory, "the shared memory of a block on every GPU");
  return {attention_portable_forward<F>, F::kRows, F::kThreads, int64_t(sizeof(ForwardMemory<F>))};
}
template <class T> ForwardKernel forward_kernel(int width, const gpu::Limits& limits) {
  if (width <= 64) return forward_kernel_of<ForwardForm<T, 64, 1, 64, false, 2, 4>>();
  if (width > 128) return forward_kernel_of<ForwardForm<T, 256, 1, 64, false, 2, 2>>();
  // with 32 queries per warp, each read of K and V is used twice
  using Large = ForwardForm<T, 128, 2, 64, false, 3, 2>;
  if (two_fit(sizeof(ForwardMemory<Large>), limits)) return forward_kernel_of<Large>();
  return forward_kernel_of<ForwardForm<T, 128, 1, 64, true, 2, 2>>();
}

}  // namespace ingot::cuda::attention_portable
