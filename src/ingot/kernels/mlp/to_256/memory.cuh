#pragma once
// The shared memory of the backward variant up to 256 wide. The kernels of the chain and of the sums have one layout:
// the buffers of the sums take the place of the chain's tiles and weights, and barriers have places of their own.
#include "ingot/kernels/mlp/to_256/ring.cuh"

namespace ingot::cuda::to_256_backward {

constexpr int kThreads = kGroups * 128 + 128;
constexpr uint32_t kStages = 9, kHalves = 2;  // of the ring of weights; a tile is loaded and stored in halves
constexpr uint32_t kSumStages = 4;

struct ChainBuffers {
  uint8_t tile[kGroups][kPanels][kGroupRows * 128];  // h, then dz
  uint8_t w[kStages][kPanels][kStageRows * 128];
};
struct SumStage {
  uint8_t dz[kGroups][kChunk * 128];
  uint8_t h[kPanels][kChunk * 128];
};
struct Memory {
  union {
    alignas(1024) ChainBuffers chain;
    SumStage sums[kSumStages];
  };
  float db[kGroups][4][kMlpPanel];  // of each warp
  uint64_t w_full[kStages], w_empty[kStages];
  uint64_t tile_full[kGroups][kHalves], tile_done[kGroups][kHalves];
  uint64_t sum_full[kSumStages], sum_empty[kSumStages];
};
static_assert(sizeof(Memory) <= size_t(kMlpSharedBytes), "the chain and the sums must fit the shared memory");

}  // namespace ingot::cuda::to_256_backward
