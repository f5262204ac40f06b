#pragma once
// Shared by the two kernels: rings whose stages a pair of blocks fills and empties together.
#include "ingot/kernels/mlp/parts/block_pair.cuh"
#include "ingot/kernels/mlp/to_512/backward.h"

namespace ingot::cuda::to_512_backward {

using ptx::Major;
using tile::operand;
using tile::Swizzle;
using tile::wait_or_trap;
using tile::wait_warp_or_trap;
using namespace mlp_parts;

// kRows rows of a half's columns, from `x` on, where block `rank` of the pair fetches a part for both blocks.
template <class Cut, int kRows>
__device__ __forceinline__ void load_for_pair(uint8_t* to, const CUtensorMap& map, int x, int row, uint64_t* full,
                                              uint32_t rank) {
  constexpr uint32_t kBytes = kRows * 128, kMine = Cut::kSharesPanels ? Cut::kHalfPanels / kPair : Cut::kHalfPanels;
  const uint32_t first = Cut::kSharesPanels ? rank * kMine : 0;
  const int lower = Cut::kSharesPanels ? 0 : int(rank) * Cut::fetched_rows(kRows);
  for (uint32_t p = first; p < first + kMine; ++p)
    ptx::tensor_load_multicast(to + p * kBytes + lower * 128, &map, x + int(p) * kMlpPanel, row + lower, full,
                               kBothBlocks);
}

}  // namespace ingot::cuda::to_512_backward
