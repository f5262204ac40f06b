#pragma once
// The backward variant up to 512 wide on the host's side: the arguments of its kernels, and their launchers.
// to_512/chain.cuh and to_512/sums.cuh describe the kernels.
#include <cstdint>

#include "ingot/kernels/mlp/parts/backward_plan.h"

namespace ingot::cuda::to_512_backward {

using mlp_parts::ChainLaunch;
using mlp_parts::kPair;

constexpr int kWidth = kMlpTo512;
constexpr int kGroupRows = 64, kGroups = 2;  // rows of a warpgroup of the chain; multiplying warpgroups of a block
constexpr int kSlotRows = 32;                // of W
constexpr int kChunk = 64;                   // rows of a sum at a time
constexpr int kMaxTeams = 36;

// The division of layers of at most two halves.
template <int kColumns> struct Cut {
  static constexpr int kHalf = kColumns;                                   // columns of a product's sums
  static constexpr int kHalfPanels = (kHalf + kMlpPanel - 1) / kMlpPanel;  // fetched for a half
  static constexpr int kPanels = 2 * kHalf / kMlpPanel;                    // of the widest layer
  static constexpr int kSumGroups = kHalf > 192 ? 2 : 3;                   // warpgroups of a summing block
  static constexpr int kSquare = kMlpPanel * kSumGroups;                   // rows of its dW
  static constexpr int64_t kPartFloats = int64_t(kSquare) * kHalf;         // of a block's sums
  static constexpr int kTeam = kSumGroups == 2 ? 4 : 2;                    // pairs summing the widest dW together
  // A pair fetches shared data together: each block half of the panels, or half of the rows of each panel.
  static constexpr bool kSharesPanels = kHalfPanels % kPair == 0;
  static constexpr int fetched_rows(int rows) { return kSharesPanels ? rows : rows / kPair; }

  static constexpr int halves_of(int width) { return (width + kHalf - 1) / kHalf; }
  static constexpr int squares_of(int width) { return (width + kPair * kSquare - 1) / (kPair * kSquare); }  // pairs'
};

struct ChainLayer {
  int n = 0, k = 0;
  bool keeps_dz = false;  // its dz goes to the workspace
};
struct Chain {
  ChainLayer layer[kMlpMaxLayers];
  int layers = 0, lowest = 0;       // products with W of layers - 1, ..., lowest
  int groups = kGroups, units = 0;  // warpgroups with rows in a block; units of as many rows for each block of a pair
  float number[3] = {};
  bool activate_last = false;
  uint32_t* counter = nullptr;  // zero when the sums start
};
// A team takes chunks cut[team][l], ..., cut[team + 1][l] - 1 of layer l's sums.
struct Sums {
  MlpSumLayer layer[kMlpMaxLayers];
  int layers = 0, teams = 0, chunks = 0;
  int cut[kMaxTeams + 1][kMlpMaxLayers] = {};
  float *part = nullptr, *bias_part = nullptr;  // (team + layer, pair, block): Cut::kPartFloats, Cut::kSquare
  uint32_t* counter = nullptr;                  // number of blocks whose parts have been written
};

// kHalf: 192, 224 or 256.
template <class T, int kHalf>
void launch_chain(const MlpChainMaps& maps, const Chain& a, const ChainLaunch& at, Stream stream);
template <class T, int kHalf> void launch_sums(const MlpSumMaps& maps, const Sums& a, int device, Stream stream);

}  // namespace ingot::cuda::to_512_backward
