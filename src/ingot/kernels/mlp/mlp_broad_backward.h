#pragma once
// The broad backward form on the host's side: what its two kernels are given, and their launchers, one pair per type
// (mlp_broad_backward_f16.cu, ...). mlp_broad_backward_chain.cuh and mlp_broad_backward_sums.cuh tell how they work.
#include <cstdint>

#include "ingot/kernels/mlp/mlp_wide_backward.h"

namespace ingot::cuda::broad_backward {

using wide_backward::ChainLaunch;
using wide_backward::kPair;  // blocks of a cluster

constexpr int kWidth = kMlpBroadWidth, kPanels = kWidth / kMlpPanel;
constexpr int kHalf = 256, kHalfPanels = kHalf / kMlpPanel;  // columns of a product's sums
constexpr int kGroupRows = 64, kGroups = 2;                  // of a warpgroup; warpgroups of a block that multiply
constexpr int kSlotRows = 32;                                // of W

constexpr int kChunk = 64;                                 // rows of a sum at a time
constexpr int kSquare = 128;                               // rows of dW that a block sums
constexpr int64_t kPartFloats = int64_t(kSquare) * kHalf;  // of a block's sums
constexpr int kTeam = 4;                                   // pairs that have all of a dW of 512 x 512
constexpr int kMaxTeams = 18;

constexpr int halves_of(int width) { return (width + kHalf - 1) / kHalf; }

struct ChainLayer {
  int n = 0, k = 0;
  bool keeps_dz = false;  // its dz goes to the workspace
};
struct Chain {
  ChainLayer layer[kMlpMaxLayers];
  int layers = 0, lowest = 0;       // products with W of layers - 1, ..., lowest
  int groups = kGroups, units = 0;  // warpgroups of a block that have rows; of as many rows for each of a pair
  float number[3] = {};
  bool activate_last = false;
  uint32_t* counter = nullptr;  // that the sums find at zero
};
// A team takes chunks cut[team][l], ..., cut[team + 1][l] - 1 of layer l's sums.
struct Sums {
  MlpSumLayer layer[kMlpMaxLayers];
  int layers = 0, teams = 0, chunks = 0;
  int cut[kMaxTeams + 1][kMlpMaxLayers] = {};
  float *part = nullptr, *bias_part = nullptr;  // (team + layer, pair, block): kPartFloats, kSquare
  uint32_t* counter = nullptr;                  // blocks whose parts are there
};

template <class T> void launch_chain(const MlpChainMaps& maps, const Chain& a, const ChainLaunch& at, Stream stream);
template <class T> void launch_sums(const MlpSumMaps& maps, const Sums& a, int device, Stream stream);

}  // namespace ingot::cuda::broad_backward
