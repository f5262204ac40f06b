#pragma once
// Shared code of backward forms in which pairs of blocks process chunks of rows together: rings that both blocks fill
// and empty, sums of dW and db.
#include <cuda.h>

#include <cstdint>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/cluster.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/ring.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/mlp/parts/backward_plan.h"

namespace ingot::cuda::mlp_parts {

using ptx::Major;
using tile::operand;
using tile::Swizzle;

constexpr uint32_t kBothBlocks = 3;

__device__ __forceinline__ uint32_t warp_of_block() {
  return __shfl_sync(~0u, threadIdx.x / 32, 0);
}  // known to be uniform

// A warp has read a stage. Both blocks are notified, because each fills a part of both blocks' stages.
__device__ __forceinline__ void release_to_pair(uint64_t* empty, uint32_t lane) {
  __syncwarp();  // all lanes have completed their ordinary loads
  if (lane < kPair) ptx::mbarrier_arrive_remote_relaxed(ptx::cluster_address(empty, lane));
}
// dw = dz^T h over a chunk of kRows rows, with contiguous panels of 64 columns; added to dw or written.
template <class T, int kColumns, uint32_t kRows>
__device__ __forceinline__ void multiply_chunk(float (&dw)[kColumns / 2], uint32_t dz, uint32_t h, bool adds) {
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < kRows; k += 16)
    ptx::wgmma<T, kColumns, Major::mn, Major::mn>(dw, operand<Major::mn, Swizzle::b128>(dz, k),
                                                  operand<Major::mn, Swizzle::b128>(h, k, kRows * 128), adds || k > 0);
  ptx::wgmma_commit_group();
}
// db += columns of dz: a warp's rows of a chunk of kRows, a lane's two columns.
template <class T, uint32_t kRows>
__device__ __forceinline__ void add_bias(float (&db)[2], uint32_t dz, uint32_t warp, uint32_t lane) {
#pragma unroll
  for (uint32_t i = 0; i < kRows / 4; ++i) {
    uint32_t v[1];
    float low, high;
    ptx::load_shared(v, dz + tile::swizzled<Swizzle::b128>(warp % 4 * (kRows / 4) + i, lane * 4));
    ptx::unpack(T{}, v[0], low, high);
    db[0] += low, db[1] += high;
  }
}
// Stores a warpgroup's 64 rows of dW, kColumns wide, in the block's part: columns 16 j + 2 t, + 1, + 8, + 9 of a row
// lie together at 4 (4 j + t).
template <int kColumns>
__device__ __forceinline__ void put_rows(float* part, const float (&dw)[kColumns / 2], uint32_t warp, uint32_t lane) {
  float* const to = part + (warp * 16 + lane / 4) * kColumns + lane % 4 * 4;
#pragma unroll
  for (int j = 0; j < kColumns / 16; ++j)
#pragma unroll
    for (int low = 0; low < 2; ++low)
      *reinterpret_cast<float4*>(to + low * 8 * kColumns + j * 16) =
          make_float4(dw[8 * j + 2 * low], dw[8 * j + 2 * low + 1], dw[8 * j + 4 + 2 * low], dw[8 * j + 5 + 2 * low]);
}
// A warpgroup stores its warps' sums of db at their place in the block's part.
__device__ __forceinline__ void put_bias(float* parts, int64_t at, float (&of)[4][kMlpPanel], const float (&db)[2],
                                         uint32_t group, uint32_t warp, uint32_t lane) {
  of[warp % 4][lane * 2] = db[0], of[warp % 4][lane * 2 + 1] = db[1];
  ptx::barrier_sync(1 + group, 128);
  const uint32_t n = threadIdx.x % 128;
  if (n < uint32_t(kMlpPanel)) parts[at + group * kMlpPanel + n] = (of[0][n] + of[1][n]) + (of[2][n] + of[3][n]);
}

}  // namespace ingot::cuda::mlp_parts
