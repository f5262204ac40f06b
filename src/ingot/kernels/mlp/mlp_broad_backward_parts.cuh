#pragma once
// What the two kernels of the broad backward form share, much of it with the wide ones: rings whose stages a pair of
// blocks fills and empties together.
#include "ingot/kernels/mlp/mlp_broad_backward.h"
#include "ingot/kernels/mlp/mlp_wide_backward_parts.cuh"

namespace ingot::cuda::broad_backward {

using ptx::Major;
using tile::operand;
using tile::Swizzle;
using tile::wait_or_trap;
using tile::wait_warp_or_trap;
using wide_backward::add_bias;
using wide_backward::kBothBlocks;
using wide_backward::put_bias;
using wide_backward::put_rows;
using wide_backward::release_to_pair;
using wide_backward::wait_for_parts;
using wide_backward::warp_of_block;

constexpr uint32_t kGroupWarps = 4 * kGroups;

// 256 columns from `x` on, of which block `rank` of the pair fetches half, for both. A panel takes `bytes`.
__device__ __forceinline__ void load_for_pair(uint8_t* to, uint32_t bytes, const CUtensorMap& map, int x, int row,
                                              uint64_t* full, uint32_t rank) {
  constexpr uint32_t kMine = kHalfPanels / kPair;
  for (uint32_t p = rank * kMine; p < (rank + 1) * kMine; ++p)
    ptx::tensor_load_multicast(to + p * bytes, &map, x + int(p) * kMlpPanel, row, full, kBothBlocks);
}

}  // namespace ingot::cuda::broad_backward
