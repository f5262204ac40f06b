#pragma once
// Who goes where, for a few tokens, by one block: the k largest of each token's logits, their softmax, and the list of
// experts that anybody chose.
//   entry i: expert[i]; weight[i][t] of token t, 0 where it chose others; row[i][t] = t k + its place in t's choice, or
//   -1
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
// The best of a warp's lanes, in every lane. NaN never wins against a number; the result is an expert all the same.
__device__ __forceinline__ Choice best_of_lanes(Choice c) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const Choice other{__shfl_xor_sync(~0u, c.value, mask), __shfl_xor_sync(~0u, c.expert, mask)};
    if (better(other, c)) c = other;
  }
  return c;
}

// The choice of one token, by a warp. `logits` (E) are used up; what is chosen is left in chosen[0 .. k) and, with its
// share, weights[0 .. k), both in shared memory.
__device__ __forceinline__ void choose(float* logits, uint32_t E, uint32_t k, uint32_t* chosen, float* weights) {
  const uint32_t lane = threadIdx.x % 32;
  float top = 0, sum = 0;
  for (uint32_t i = 0; i < k; ++i) {
    Choice best{-INFINITY, 0xffffffffu};
    for (uint32_t e = lane; e < E; e += 32) {
      bool taken = false;
      for (uint32_t j = 0; j < i; ++j) taken |= chosen[j] == e;
      const float v = logits[e] == logits[e] ? logits[e] : -INFINITY;
      if (!taken && better({v, e}, best)) best = {v, e};
    }
    best = best_of_lanes(best);
    const float value = logits[best.expert];
    if (i == 0) top = value;
    const float share = expf(value - top);
    sum += share;
    if (lane == 0) chosen[i] = best.expert, weights[i] = share;
    __syncwarp();
  }
  for (uint32_t i = lane; i < k; i += 32) weights[i] /= sum;
  __syncwarp();
}

// By all threads of the block, after a barrier. `first` (E + 1) in shared memory.
__device__ __forceinline__ void make_lists(const uint32_t* chosen, const float* weights, uint32_t T, uint32_t E,
                                           uint32_t k, uint32_t* first, const Lists& lists) {
  for (uint32_t e = threadIdx.x; e < E; e += blockDim.x) {
    bool used = false;
    for (uint32_t s = 0; s < T * k; ++s) used |= chosen[s] == e;
    first[e] = used;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t n = 0;
    for (uint32_t e = 0; e < E; ++e) {
      const uint32_t used = first[e];
      first[e] = used != 0 ? n : 0xffffffffu;
      n += used;
    }
    *lists.count = n;
  }
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < E; e += blockDim.x) {
    const uint32_t i = first[e];
    if (i == 0xffffffffu) continue;
    lists.expert[i] = int32_t(e);
    for (uint32_t t = 0; t < kTokens; ++t) {
      float weight = 0;
      int32_t row = -1;
      for (uint32_t s = 0; t < T && s < k; ++s)
        if (chosen[t * k + s] == e) weight = weights[t * k + s], row = int32_t(t * k + s);
      lists.weight[i * kTokens + t] = weight;
      lists.row[i * kTokens + t] = row;
    }
  }
}

}  // namespace ingot::routing
