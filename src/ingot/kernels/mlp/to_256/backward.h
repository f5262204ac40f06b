#pragma once
// The backward variant up to 256 wide on the host's side: the arguments of its kernels, and their launchers.
// to_256/chain.cuh and to_256/sums.cuh describe the kernels.
#include <cstdint>

#include "ingot/kernels/mlp/parts/backward_plan.h"

namespace ingot::cuda::to_256_backward {

using mlp_parts::ChainLaunch;
using mlp_parts::kPair;

constexpr int kWidth = kMlpTo256, kPanels = kWidth / kMlpPanel;
constexpr int kGroupRows = 64, kGroups = 2;                 // of a warpgroup; multiplying warpgroups of a block
constexpr int kUnitRows = kPair * kGroups * kGroupRows;     // rows of a cluster per pass through the chain
constexpr uint32_t kStageRows = 32;                         // of W
constexpr int kChunk = 64;                                  // rows of a sum at a time
constexpr int kSquare = 128;                                // rows of a block's dW; the pair sums all rows
constexpr int64_t kPartFloats = int64_t(kSquare) * kWidth;  // of a block's sums

// The operands of all blocks: boxes of 64 rows and columns, of w kStageRows rows. Slopes follow from `h`.
struct Maps : MlpChainMaps {
  CUtensorMap input[kMlpMaxLayers];  // the input of a layer
};
struct Layer : MlpSumLayer {
  bool keeps_dz = false;  // its dz goes to the workspace
};
struct Arguments {
  Layer layer[kMlpMaxLayers];
  int layers = 0, lowest = 0;  // products with W of layers - 1, ..., lowest
  int units = 0;
  float number[3] = {};
  bool activate_last = false;
  int chunks = 0, splits = 0;                   // parts of the rows, for the sums
  float *part = nullptr, *bias_part = nullptr;  // (layer, split, block of the pair): kPartFloats, kSquare
  // From the second on, for each layer and block of the pair, a counter of the blocks whose parts have been written.
  // The first counter is not used.
  uint64_t* counter = nullptr;
};
struct LaunchAt : ChainLaunch {
  bool has_sums = false;  // a dW or db is needed
};

template <class T> void launch(const Maps& maps, const Arguments& a, const LaunchAt& at, Stream stream);

}  // namespace ingot::cuda::to_256_backward
