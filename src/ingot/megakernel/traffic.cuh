#pragma once
// Load on the memory while grid barriers and exchanges are timed.
#include "ingot/gpu/ptx/memory.cuh"

namespace ingot::megakernel {

constexpr int64_t kTraffic = int64_t(512) << 20;  // bytes read over and over: more than any L2 holds

// Threads kFirst to kThreads - 1 of every block read the `bytes` at `from` until the block's `done` is set.
template <uint32_t kFirst, uint32_t kThreads>
__device__ __forceinline__ void read_until(const uint32_t& done, const uint8_t* from, int64_t bytes, float* sink) {
  constexpr uint32_t kHeld = 6;  // 37 KB in flight per SM
  const int64_t step = int64_t(kThreads - kFirst) * 16, all = step * kHeld * gridDim.x;
  const int64_t own = (threadIdx.x - kFirst) * 16;
  uint32_t read = 0;
  for (int64_t at = blockIdx.x * step * kHeld + own; *static_cast<const volatile uint32_t*>(&done) == 0; at += all) {
    if (at + step * kHeld > bytes) at = own;
    uint32_t w[kHeld][4];
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u) ptx::load_streaming(from + at + u * step, w[u]);
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u) read ^= w[u][0] ^ w[u][1] ^ w[u][2] ^ w[u][3];
  }
  if (read == 0x12345678u) sink[0] = 1;
}

}  // namespace ingot::megakernel
