#pragma once
// Threads that keep their place in a head and walk from token to token, and the sums for dgain that they collect: a
// block stores a sum for each head and slice of the tokens, and a second kernel adds up the slices.
#include <cstdint>

#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/rope/rope_config.h"
#include "ingot/kernels/rope/rope_params.cuh"

namespace ingot::cuda::rope_kernels {

constexpr int kSumThreads = 128;

// What a thread walks over: its place in one head, for `count` tokens that are p.rows apart.
struct Walk {
  uint32_t group;  // the group of lanes in the block
  uint32_t lane, slice, head, count;
  int64_t token;  // the first one
};
__device__ inline Walk walk_of(const RopeParams& p) {
  const tile::Division lane = tile::divide(threadIdx.x, p.by_lanes), row = tile::divide(lane.quotient, p.by_slots);
  const tile::Division slice = tile::divide(blockIdx.x, p.by_chunks);
  Walk w{.group = lane.quotient, .lane = lane.remainder, .slice = slice.quotient};
  w.head = slice.remainder * p.by_slots.value + row.remainder;
  const int64_t begin = slice.quotient * p.slice_tokens, end = min(begin + p.slice_tokens, p.tokens);
  w.token = begin + row.quotient;
  const bool here = row.quotient < p.rows && w.head < p.heads && w.token < end;
  w.count = here ? uint32_t(tile::divide(uint32_t(end - w.token + p.rows - 1), p.by_rows).quotient) : 0;
  return w;
}

// Stores the block's sums for dgain. The sums of the groups of a head are added in the order of their tokens.
__device__ inline void store_dgain(const RopeParams& p, const Walk& w, float dgain) {
  auto& found = tile::shared<float[kRopeThreads]>();
  const uint32_t slots = p.by_slots.value, first = blockIdx.x - w.slice * p.by_chunks.value;
  if (w.lane == 0) found[w.group] = dgain;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < slots; i += blockDim.x) {
    const uint32_t head = first * slots + i;
    if (head >= p.heads) continue;
    float sum = 0;
    for (uint32_t r = 0; r < p.rows; ++r) sum += found[r * slots + i];
    p.partial[int64_t(head) * p.slices + w.slice] = sum;
  }
}

// dgain += the sums of all slices of a head, in an order that depends only on the number of slices. The blocks are
// small, so that they fit beside the blocks of the kernel whose sums they await. A thread issues all of its loads at
// once.
__global__ void __launch_bounds__(kSumThreads, 16) add_slices(float* dgain, const float* partial, uint32_t slices) {
  constexpr int kLoads = kRopeMaxSlices / kSumThreads;
  auto& memory = tile::shared<tile::GroupSumMemory<1, kSumThreads>>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const float before = threadIdx.x == 0 ? dgain[blockIdx.x] : 0;
  const float* const mine = partial + int64_t(blockIdx.x) * slices + threadIdx.x;
  float slice[kLoads], sum[1] = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) slice[i] = threadIdx.x + i * kSumThreads < slices ? mine[i * kSumThreads] : 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) sum[0] += slice[i];
  tile::group_sum(sum, kSumThreads, memory);
  if (threadIdx.x == 0) dgain[blockIdx.x] = before + sum[0];
}

}  // namespace ingot::cuda::rope_kernels
