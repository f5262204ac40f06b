#pragma once
// The backward variant up to 512 wide for few rows on the host's side: the arguments of its kernels, and their
// launchers. few_rows_chain.cuh and few_rows_sums.cuh describe the kernels.
#include <cstdint>

#include "ingot/kernels/mlp/parts/backward_plan.h"

namespace ingot::cuda::to_512_few_rows_backward {

struct ChainLayer {
  int n = 0, k = 0;
  bool keeps_dz = false;  // its dz goes to the workspace
};
struct Chain {
  ChainLayer layer[kMlpMaxLayers];
  int layers = 0, lowest = 0;  // products with W of layers - 1, ..., lowest
  float number[3] = {};
  bool activate_last = false;
};
struct ChainLaunch {
  Slope slope = Slope::step;
  int tiles = 0, cluster = 0, device = 0;  // of 64 rows; blocks per tile
};

// A block sums kSumRows x kSumColumns of a dW over all rows.
constexpr int kSumGroups = 2, kSumRows = kSumGroups * kMlpPanel, kSumColumns = kMlpPanel;
constexpr int kChunk = 64;  // rows at a time
struct Sums {
  MlpSumLayer layer[kMlpMaxLayers];
  int first_block[kMlpMaxLayers + 1] = {};  // of each layer's
  int layers = 0, chunks = 0;
};

template <class T> void launch_chain(const MlpChainMaps& maps, const Chain& a, const ChainLaunch& at, Stream stream);
template <class T> void launch_sums(const MlpSumMaps& maps, const Sums& a, int device, Stream stream);

}  // namespace ingot::cuda::to_512_few_rows_backward
