#pragma once
// Rings whose stages a pair of blocks fills and empties together.
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
#include "ingot/kernels/mlp/parts/block_pair.cuh"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"
#include "ingot/kernels/mlp/to_256/backward.h"

namespace ingot::cuda::to_256_backward {

using namespace mlp_parts;

using ptx::Major;
using tile::operand;
using tile::Swizzle;
using tile::wait_or_trap;
using tile::wait_warp_or_trap;

constexpr uint32_t kGroupWarps = 4 * kGroups;
constexpr uint32_t kReaders = kGroupWarps * kPair;  // reading warps of a stage, of both blocks

// The first panel fetched by block `rank` of a pair for both blocks.
__device__ __forceinline__ constexpr uint32_t first_panel(uint32_t rank) { return rank * (kPanels / kPair); }
template <uint32_t kBytes>
__device__ __forceinline__ void load_for_pair(uint8_t (&to)[kPanels][kBytes], const CUtensorMap& map, int row,
                                              uint64_t* full, uint32_t rank) {
  for (uint32_t p = first_panel(rank); p < first_panel(rank + 1); ++p)
    ptx::tensor_load_multicast(to[p], &map, int(p) * kMlpPanel, row, full, kBothBlocks);
}

}  // namespace ingot::cuda::to_256_backward
