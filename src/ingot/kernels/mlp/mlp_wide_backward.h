#pragma once
// The wide backward form on the host's side: what its two kernels are given, and their launchers, one pair per type
// (mlp_wide_backward_f16.cu, ...). mlp_wide_backward_chain.cuh and mlp_wide_backward_sums.cuh tell how they work.
#include <cstdint>

#include "ingot/kernels/mlp/mlp_backward.h"

namespace ingot::cuda::wide_backward {

constexpr int kWidth = kMlpWideWidth, kPanels = kWidth / kMlpPanel;
constexpr int kGroupRows = 64, kGroups = 2;                 // of a warpgroup; warpgroups of a block that multiply
constexpr int kPair = 2;                                    // blocks of a cluster
constexpr int kUnitRows = kPair * kGroups * kGroupRows;     // rows that a cluster takes through the chain at a time
constexpr uint32_t kStageRows = 32;                         // of W
constexpr int kChunk = 64;                                  // rows of a sum at a time
constexpr int kSquare = 128;                                // rows of a dW that a block sums; the pair has all
constexpr int64_t kPartFloats = int64_t(kSquare) * kWidth;  // of a block's sums

struct ChainLayer {
  const void *v = nullptr, *g = nullptr;  // g: of a weight-normalised layer
  int n = 0, k = 0;
  bool keeps_dz = false;  // its dz goes to the workspace
};
struct Chain {
  ChainLayer layer[kMlpMaxLayers];
  int layers = 0, lowest = 0;  // products with W of layers - 1, ..., lowest
  int units = 0;
  float number[3] = {};
  bool activate_last = false, has_gain = false;
  uint32_t* counters = nullptr;  // that the sums find at zero
  int counter_count = 0;
};
struct ChainLaunch {
  Slope slope = Slope::step;
  int clusters = 0, device = 0;
};

struct Sums {
  MlpSumLayer layer[kMlpMaxLayers];
  int chunks = 0, splits = 0;                   // of the rows
  float *part = nullptr, *bias_part = nullptr;  // (layer, split, block of the pair): kPartFloats, kSquare
  uint32_t* counters = nullptr;                 // of each layer and block of the pair
};
struct SumLaunch {
  int layers = 0, device = 0;
};

template <class T> void launch_chain(const MlpChainMaps& maps, const Chain& a, const ChainLaunch& at, Stream stream);
template <class T> void launch_sums(const MlpSumMaps& maps, const Sums& a, const SumLaunch& at, Stream stream);

}  // namespace ingot::cuda::wide_backward
