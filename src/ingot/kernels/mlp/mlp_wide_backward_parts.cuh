#pragma once
// What the two kernels of the wide backward form share, and the broad ones with them: rings whose stages a pair of
// blocks fills and empties together, and parts of sums that all blocks wait for.
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
#include "ingot/kernels/mlp/mlp_weights.cuh"
#include "ingot/kernels/mlp/mlp_wide_backward.h"

namespace ingot::cuda::wide_backward {

using ptx::Major;
using tile::operand;
using tile::Swizzle;
using tile::wait_or_trap;
using tile::wait_warp_or_trap;

constexpr uint32_t kGroupWarps = 4 * kGroups, kBothBlocks = 3;
constexpr uint32_t kReaders = kGroupWarps * kPair;  // warps that read a stage, of both blocks

__device__ __forceinline__ uint32_t warp_of_block() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }  // known uniform

// A warp has read a stage: both blocks hear of it, as each fills a part of both blocks' stages.
__device__ __forceinline__ void release_to_pair(uint64_t* empty, uint32_t lane) {
  __syncwarp();  // all lanes have what they read by ordinary loads
  if (lane < kPair) ptx::mbarrier_arrive_remote_relaxed(ptx::cluster_address(empty, lane));
}
// Where the panels begin that block `rank` of a pair fetches, for both.
__device__ __forceinline__ constexpr uint32_t first_panel(uint32_t rank) { return rank * (kPanels / kPair); }
template <uint32_t kBytes>
__device__ __forceinline__ void load_for_pair(uint8_t (&to)[kPanels][kBytes], const CUtensorMap& map, int row,
                                              uint64_t* full, uint32_t rank) {
  for (uint32_t p = first_panel(rank); p < first_panel(rank + 1); ++p)
    ptx::tensor_load_multicast(to[p], &map, int(p) * kMlpPanel, row, full, kBothBlocks);
}

// dw = dz^T h of a chunk of kRows rows, panels of 64 columns that lie one behind the other; added, or in place of what
// is there.
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
// A warpgroup's 64 rows of dW, kColumns wide, to the block's part: of a row, columns 16 j + 2 t, + 1, + 8, + 9 lie
// together at 4 (4 j + t).
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
// The warps' sums of db, by a warpgroup, to its place in the block's part.
__device__ __forceinline__ void put_bias(float* parts, int64_t at, float (&of)[4][kMlpPanel], const float (&db)[2],
                                         uint32_t group, uint32_t warp, uint32_t lane) {
  of[warp % 4][lane * 2] = db[0], of[warp % 4][lane * 2 + 1] = db[1];
  ptx::barrier_sync(1 + group, 128);
  const uint32_t n = threadIdx.x % 128;
  if (n < uint32_t(kMlpPanel)) parts[at + group * kMlpPanel + n] = (of[0][n] + of[1][n]) + (of[2][n] + of[3][n]);
}

}  // namespace ingot::cuda::wide_backward
