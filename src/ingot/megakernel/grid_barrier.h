#pragma once
// The parameters of a persistent kernel's grid barriers (grid_barrier.cuh).
#include "ingot/core/hd.h"
#include "ingot/gpu/watch.h"

namespace ingot::megakernel {

// A traced kernel writes one row of words per block: the time when the block began; for each grid barrier the times of
// the block's arrival and continuation; the time when the block ended (ns, one clock for all SMs); then words of the
// kernel's own program. Kernels that are not instantiated for tracing contain no code for it and refuse a trace.
struct Trace {
  uint64_t* words = nullptr;  // (blocks, words_of_block)
  uint32_t blocks = 0;        // later blocks of the grid write no row
  uint32_t grid_barriers = 0, extra = 0;

  INGOT_HD uint32_t stamps() const { return 2 * grid_barriers + 2; }
  INGOT_HD uint32_t words_of_block() const { return stamps() + extra; }
};

struct Grid {
  uint32_t* counter = nullptr;  // zero before its first use and after a wait gave up
  gpu::Watch watch;
  Trace trace;
  uint32_t missing = ~0u;  // for tests: the last block does not arrive at the grid barrier of this number
};

}  // namespace ingot::megakernel
