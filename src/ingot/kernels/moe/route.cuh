#pragma once
// The routing of a few tokens by one block: the k largest logits of each token, their softmax, and the list of all
// chosen experts.
//    slot i: expert[i]; weight[i][t] of token t, 0 if the token did not choose the expert;
//            row[i][t] = t k + the expert's place in the choice of token t, or -1
#include "ingot/kernels/moe/route_lists.h"

#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/cuda.h"
#endif

namespace ingot::routing {

struct Choice {
  float value;
  uint32_t expert;
};
__device__ __forceinline__ bool better(Choice a, Choice b) {
  return a.value != b.value ? a.value > b.value : a.expert < b.expert;
}
// Maps floats to unsigned integers of the same order.
__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits ^ (int32_t(bits) < 0 ? 0xffffffffu : 0x80000000u);
}
// The best choice among the lanes of a warp, in every lane. A NaN never wins against a number, but the result is always
// a valid expert.
__device__ __forceinline__ uint32_t best_of_lanes(Choice c) {
  const uint32_t key = ordered(c.value == 0 ? 0 : c.value), top = __reduce_max_sync(~0u, key);
  return ~__reduce_max_sync(~0u, key == top ? ~c.expert : 0);
}

// Chooses the experts of a token, by a warp: the k largest of `logits` (E) go to chosen[0 .. k), their softmax to
// weights[0 .. k). All are in shared memory.
__device__ __forceinline__ void choose(const float* logits, uint32_t E, uint32_t k, uint32_t* chosen, float* weights) {
  constexpr uint32_t kHeld = 4;  // logits of a lane in registers; more are read again for every choice
  const uint32_t lane = threadIdx.x % 32;
  const auto number = [&](uint32_t e) { return e < E && logits[e] == logits[e] ? logits[e] : -INFINITY; };
  float held[kHeld];
#pragma unroll
  for (uint32_t u = 0; u < kHeld; ++u) held[u] = number(lane + 32 * u);
  uint32_t taken = 0;  // a bit for each chosen expert of the lane
  float top = 0, sum = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < k; ++i) {
    Choice best{-INFINITY, 0xffffffffu};
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u) {
      const Choice c{held[u], lane + 32 * u};
      if (c.expert < E && (taken >> u & 1) == 0 && better(c, best)) best = c;
    }
#pragma unroll 1
    for (uint32_t e = lane + 32 * kHeld; e < E; e += 32) {
      bool before = false;
      for (uint32_t j = 0; j < i; ++j) before |= chosen[j] == e;
      if (!before && better({number(e), e}, best)) best = {number(e), e};
    }
    const uint32_t expert = best_of_lanes(best);
    if (expert % 32 == lane && expert < 32 * kHeld) taken |= 1u << expert / 32;
    const float value = logits[expert];  // a NaN appears in the weights
    if (i == 0) top = value;
    const float share = expf(value - top);
    sum += share;
    if (lane == 0) chosen[i] = expert, weights[i] = share;
    __syncwarp();
  }
  for (uint32_t i = lane; i < k; i += 32) weights[i] /= sum;
  __syncwarp();
}

// Makes the lists of a single token: each choice is a slot. Called by all threads of the block, after a barrier.
__device__ __forceinline__ void make_lists(const uint32_t* chosen, const float* weights, uint32_t k,
                                           const Lists& lists) {
  for (uint32_t i = threadIdx.x; i < k; i += blockDim.x) {
    lists.expert[i] = int32_t(chosen[i]);
    lists.weight[i * kTokens] = weights[i];
    lists.row[i * kTokens] = int32_t(i);
  }
  if (threadIdx.x == 0) *lists.count = k;
}

// A block's copy in shared memory of the lists of up to `most` expert slots, so that loads do not wait for each other.
// If a single block writes the lists, this struct holds the lists themselves.
struct Copy {
  int32_t *expert, *row;  // (most), (most, kCols)
  float* weight;          // (most, kCols)
};
inline constexpr int64_t copy_bytes(int64_t most, int64_t columns) { return 4 * most * (1 + 2 * columns); }
template <int kCols> __device__ __forceinline__ Copy copy_lists(char* memory, const Lists& lists, uint32_t most) {
  Copy c;
  c.expert = reinterpret_cast<int32_t*>(memory);
  c.row = c.expert + most;
  c.weight = reinterpret_cast<float*>(c.row + most * kCols);
  for (uint32_t i = threadIdx.x; i < most; i += blockDim.x) c.expert[i] = __ldcg(lists.expert + i);
  for (uint32_t i = threadIdx.x; i < most * kCols; i += blockDim.x) {
    const uint32_t at = i / kCols * kTokens + i % kCols;
    c.row[i] = __ldcg(lists.row + at);
    c.weight[i] = __ldcg(lists.weight + at);
  }
  return c;
}

}  // namespace ingot::routing
