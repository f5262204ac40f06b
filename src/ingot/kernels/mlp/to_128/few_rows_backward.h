#pragma once
// The backward pass of a whole MLP for few rows, where only latency counts: the arguments of its two kernels, and their
// launchers. few_rows_chain.cuh computes every dz and dx, few_rows_sums.cuh the gradients of the parameters.
#include <cstdint>

#include "ingot/kernels/mlp/parts/backward_plan.h"
#include "ingot/kernels/mlp/to_128/few_rows.h"

namespace ingot::cuda::to_128_few_rows_backward {

constexpr int kBlocks = 8;   // blocks of a cluster, which share the rows of a sum
constexpr int kChunk = 128;  // rows of a sum at a time
constexpr int kMaxSumStages = 3;

struct ChainLayer {
  const void* g = nullptr;  // weight norm
  int n = 0;
  bool keeps_dz = false;  // its dz goes to the workspace
};
struct Chain {
  ChainLayer layer[kMlpMaxLayers];
  int layers = 0, lowest = 0;  // products with W of layers - 1, ..., lowest
  int stages = 1;
  Act act = Act::identity;
  bool activate_last = false, has_gain = false;
};
struct ChainLaunch {
  int64_t rows = 0;
  int block_rows = 0, panels = 0, device = 0;
};

struct SumLayer : MlpSumLayer {
  int tiles = 0;  // 0: no gradient of this layer is needed
  bool dz_is_late = false;
};
struct Sums {
  SumLayer layer[kMlpMaxLayers];
  int chunks = 0, stages = 1;
  bool want_db = false, after_chain = false;
};
struct SumLaunch {
  int64_t tiles = 0;
  int tile = 0, panels = 0, device = 0;
};

template <class T> void launch_chain(const MlpChainMaps& maps, const Chain& a, const ChainLaunch& at, Stream stream);
template <class T> void launch_sums(const MlpSumMaps& maps, const Sums& a, const SumLaunch& at, Stream stream);

}  // namespace ingot::cuda::to_128_few_rows_backward
