#pragma once
// The memory of dS between two kernels (score_panels.h), and the kernels that prepare this memory.
#include "ingot/kernels/attention/hopper/score_panels.h"
#include "ingot/kernels/attention/hopper/walk.h"

namespace ingot::cuda::attention_hopper {

struct StoredScores {
  char* panels;
  const int32_t* first;  // of each place of a tile of keys; then the number of panels of a head
};

constexpr int kPlaceThreads = 256, kZeroThreads = 128;
struct ScoreKernels {
  void (*places)(const Walk, int32_t*, int64_t);
  void (*zeros)(const Walk, const StoredScores);
};
ScoreKernels score_kernels();

}  // namespace ingot::cuda::attention_hopper
