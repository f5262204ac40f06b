#pragma once
// The choice between the core (gpu/gemm) and cuBLASLt on a GPU. Pure functions of sizes.
#include "ingot/gpu/gemm/config.h"

namespace ingot::cuda {

constexpr gemm::Tile kLinearTiles[] = {gemm::kTurns128, gemm::kTurns192};

// The core's kernels: one variant for each tile, and one variant whose epilogue reads a bias or an addend
// (core_combines() in core_product.h).
struct CoreForm {
  gemm::Tile tile;
  bool combines;
};
constexpr CoreForm kCoreForms[] = {{kLinearTiles[0], false}, {kLinearTiles[1], false}, {kLinearTiles[0], true}};
inline int pick_core_form(const gemm::Problem& p, bool combines, int64_t sms) {
  return combines ? 2 : gemm::pick_tile(p, kLinearTiles, sms);
}

// The core is as fast as cuBLASLt or faster where the core's tiles fill the GPU. With few rows cuBLASLt has smaller
// tiles and divides K. Reading an addend slows the core's epilogue. Additions to a result far larger than L2 are slow,
// too: 128,256 x 4,096 sums in fp32 over 4,096 rows take 9.8 ms, with cuBLASLt 6.6 ms (H100).
constexpr int64_t kMostAddedBytes = int64_t(1) << 29;
// If K is as long as a vocabulary, the core's blocks drift apart and share less data in L2: a result of 4,096 x 4,096
// with K = 128,256 takes 6.2 to 8.5 ms, with cuBLASLt 5.9 ms (H100). `memory`: gpu::memory_bandwidth.
constexpr int64_t kMostCoreK = 65536;
// With fewer waves of tiles, the wait for the first operands and the epilogue of the last tile take a noticeable part
// of the time: a result of 1,024 x 4,096 with K = 4,096, two waves, takes 45.5 us, with cuBLASLt 44.3 us (H200).
constexpr int64_t kFewestWaves = 3;
inline bool core_is_faster(const gemm::Problem& p, bool combines, int64_t added_bytes, int64_t sms, double memory) {
  const gemm::Tile best = kLinearTiles[gemm::pick_tile(p, kLinearTiles, sms)];
  const bool is_few = p.batch * p.m * p.n < kFewestWaves * sms * gemm::kTileM * 128;
  return !combines && !is_few && added_bytes <= kMostAddedBytes && p.k >= 128 && p.k <= kMostCoreK &&
         !gemm::waits_for_memory(p, memory) && gemm::efficiency(p, best, sms) >= 0.95;
}

}  // namespace ingot::cuda
