#pragma once
// How many blocks a row with filters takes on a GPU with clusters: a pure function of sizes, tested without a GPU.
#include <algorithm>
#include <array>
#include <cstdint>

namespace ingot::cuda {

constexpr int kMostCluster = 16;  // blocks of a row
// The number of clusters of n blocks that run at once, at index n; 0 where the GPU runs none.
using ResidentClusters = std::array<int, kMostCluster + 1>;

// `turns`: of a row with a single block; `cached`: the turns of a block whose logits fit into shared memory. The
// barriers and searches of a row take as long as kFixedTurns turns, however many blocks it has, and a turn that is read
// from L2 again in each pass as long as kTurnsOfUncached. Rows that find no free cluster must wait for all of this
// time, so a small number of waves matters most. An H200 runs 15 clusters of eight blocks, or 17 clusters of six, at
// once: sixteen rows take 1.4 to 1.7 times as long in clusters of eight as in clusters of six.
inline int pick_filter_cluster(int64_t rows, int64_t turns, int64_t cached, const ResidentClusters& resident) {
  constexpr double kFixedTurns = 10, kTurnsOfUncached = 2.5;
  int best = 1;
  double best_time = 0;
  for (int cluster = 1; cluster <= kMostCluster; ++cluster) {
    const int64_t at_once = resident[size_t(cluster)];
    if (at_once == 0) continue;
    const double of_block = double(turns) / cluster, uncached = std::max(of_block - double(cached), 0.);
    const double waves = double((rows + at_once - 1) / at_once);
    const double time = waves * (kFixedTurns + of_block + (kTurnsOfUncached - 1) * uncached);
    if (best_time == 0 || time < best_time) best = cluster, best_time = time;
  }
  return best;
}

}  // namespace ingot::cuda
