#pragma once
// Who multiplies on a GPU: the core (gpu/gemm) or cuBLASLt. Pure functions of sizes.
#include "ingot/gpu/gemm/config.h"

namespace ingot::cuda {

constexpr gemm::Tile kLinearTiles[] = {gemm::kTurns128, gemm::kTurns192};

// Where the core's tiles fill the GPU it is as fast as cuBLASLt or faster; where they do not, as with few rows,
// cuBLASLt has smaller tiles and divides K (bench/results/h200/linear.json).
inline bool core_is_faster(const gemm::Problem& p, int64_t sms) {
  const gemm::Tile best = kLinearTiles[gemm::pick_tile(p, kLinearTiles, sms)];
  return p.k >= 128 && gemm::efficiency(p, best, sms) >= 0.9;
}

}  // namespace ingot::cuda
