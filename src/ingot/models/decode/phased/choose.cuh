#pragma once
// The choice of experts in two halves, which together compute routing::choose(): first the chosen experts, so that
// their weights can be requested; then the weights of the choices, which only the second product needs.
#include "ingot/kernels/moe/route.cuh"

namespace ingot::decode {

constexpr uint32_t kLogitsOfLane = 4;

// By a warp: chooses the k largest of E logits in shared memory. Lane i holds the logits i, i + 32, ... in registers,
// as far as `held` goes. A NaN counts as the smallest; of equal logits the first wins.
__device__ __forceinline__ void choose_held(const float* logits, const float (&held)[kLogitsOfLane], uint32_t E,
                                            uint32_t k, uint32_t* chosen) {
  const uint32_t lane = threadIdx.x % 32;
  const auto key_of = [](float v) {
    const uint32_t key = routing::ordered(v == 0 ? 0 : v);
    return v == v ? key : routing::ordered(-INFINITY);
  };
  uint32_t key[kLogitsOfLane];
#pragma unroll
  for (uint32_t u = 0; u < kLogitsOfLane; ++u) {
    key[u] = key_of(held[u]);
    if (lane + 32 * u >= E) key[u] = 0;  // no such expert, or already chosen
  }
#pragma unroll 1
  for (uint32_t i = 0; i < k; ++i) {
    uint32_t best = 0, not_expert = 0;
#pragma unroll
    for (uint32_t u = 0; u < kLogitsOfLane; ++u)
      if (key[u] > best) best = key[u], not_expert = ~(lane + 32 * u);
#pragma unroll 1
    for (uint32_t e = lane + 32 * kLogitsOfLane; e < E; e += 32) {
      uint32_t other = key_of(logits[e]);
#pragma unroll 1
      for (uint32_t j = 0; j < i; ++j)
        if (chosen[j] == e) other = 0;
      if (other > best) best = other, not_expert = ~e;
    }
    const uint32_t top = __reduce_max_sync(~0u, best), expert = ~__reduce_max_sync(~0u, best == top ? not_expert : 0);
#pragma unroll
    for (uint32_t u = 0; u < kLogitsOfLane; ++u)
      if (expert == lane + 32 * u) key[u] = 0;
    if (lane == 0) chosen[i] = expert;
    __syncwarp();
  }
}

// By a warp: the softmax over the chosen logits. All operands are in shared memory.
__device__ __forceinline__ void weigh(const float* logits, uint32_t k, const uint32_t* chosen, float* weights) {
  const uint32_t lane = threadIdx.x % 32;
  const float top = logits[chosen[0]];
  float sum = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < k; ++i) sum += expf(logits[chosen[i]] - top);
#pragma unroll 1
  for (uint32_t i = lane; i < k; i += 32) weights[i] = expf(logits[chosen[i]] - top) / sum;
}

}  // namespace ingot::decode
