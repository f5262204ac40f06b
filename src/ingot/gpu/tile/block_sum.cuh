#pragma once
// Sums over a whole block in a fixed order; every thread gets the same bits.
#include "ingot/gpu/tile/shared.cuh"

namespace ingot::tile {

template <class V, int kThreads> struct BlockSumMemory { V of_warps[kThreads / 32]; };

// A reduction over the block by `add(a, b)`. The function may be called again with the same memory.
template <int kThreads, class V, class Add>
__device__ inline V block_reduce(V v, BlockSumMemory<V, kThreads>& memory, Add&& add) {
  for (int step = 16; step > 0; step /= 2) v = add(v, __shfl_xor_sync(~0u, v, step));
  __syncthreads();  // other threads may still read the previous sums
  if (threadIdx.x % 32 == 0) memory.of_warps[threadIdx.x / 32] = v;
  __syncthreads();
  V sum = memory.of_warps[0];
  for (int i = 1; i < kThreads / 32; ++i) sum = add(sum, memory.of_warps[i]);
  return sum;
}
template <int kThreads, class V> __device__ inline V block_sum(V v, BlockSumMemory<V, kThreads>& memory) {
  return block_reduce<kThreads>(v, memory, [](V a, V b) { return a + b; });
}

}  // namespace ingot::tile
