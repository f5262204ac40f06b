#pragma once
// What a persistent kernel is told of its hand-offs (handoff.cuh).
#include "ingot/gpu/watch.h"

namespace ingot::megakernel {

struct Grid {
  uint32_t* counter = nullptr;  // zero before its first use and after a wait gave up
  gpu::Watch watch;
  uint64_t* times = nullptr;  // (hand-offs, 2) ns: when block 0 arrived and when it went on; null: not kept
  uint32_t missing = ~0u;     // for tests: the last block stays away from the hand-off of this number
};

}  // namespace ingot::megakernel
