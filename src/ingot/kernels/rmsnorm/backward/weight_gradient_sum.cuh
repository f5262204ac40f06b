#pragma once
// The last kernel of the backward pass: adds the sums of dw that the blocks of rmsnorm_backward.cuh have written, in
// the order of the blocks.
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"

namespace ingot::cuda {

// dw += scale * (the sum of the partial rows). A block takes 32 columns, two a thread; thread group `i` of 8 sums rows
// i, i + 8, ... A block is small enough to run beside the blocks whose sums are awaited.
struct PartialSum {
  const float* partial;
  float* dw;
  int64_t cols;
  uint32_t count;
  float scale;
  int64_t stride;
};
constexpr int kPartialSumColumns = 32, kPartialSumGroups = 8, kPartialSumThreads = kPartialSumGroups * 16;
constexpr int kPartialSumBatch = 9;  // loads at once; two batches read a row of sums per SM

__device__ inline float2 sum_of_partials(const PartialSum& p, int64_t c, uint32_t group) {
  float2 sum = make_float2(0, 0);
  if (c >= p.cols) return sum;
  const float* at = p.partial + group * p.stride + c;
  for (uint32_t row = group; row < p.count;) {
    float2 x[kPartialSumBatch];
#pragma unroll
    for (int k = 0; k < kPartialSumBatch; ++k, row += kPartialSumGroups, at += kPartialSumGroups * p.stride)
      x[k] = row < p.count ? *reinterpret_cast<const float2*>(at) : make_float2(0, 0);
#pragma unroll
    for (int k = 0; k < kPartialSumBatch; ++k) sum.x += x[k].x, sum.y += x[k].y;
  }
  return sum;
}

__device__ inline void sum_partials(const PartialSum& p, float (&memory)[kPartialSumGroups][kPartialSumColumns]) {
  const uint32_t lane = threadIdx.x % 16, group = threadIdx.x / 16;
  const int64_t first = int64_t(blockIdx.x) * kPartialSumColumns, mine = first + threadIdx.x;
  const bool writes = threadIdx.x < kPartialSumColumns && mine < p.cols;
  const float before = writes ? p.dw[mine] : 0;  // requested together with the sums
  const float2 sum = sum_of_partials(p, first + lane * 2, group);
  memory[group][lane * 2] = sum.x;
  memory[group][lane * 2 + 1] = sum.y;
  __syncthreads();
  if (!writes) return;
  float total = 0;
#pragma unroll
  for (uint32_t i = 0; i < kPartialSumGroups; ++i) total += memory[i][threadIdx.x];
  p.dw[mine] = before + p.scale * total;
}

}  // namespace ingot::cuda
