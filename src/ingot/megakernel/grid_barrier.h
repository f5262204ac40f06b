#pragma once
// What a persistent kernel is told of its grid barriers (grid_barrier.cuh).
#include "ingot/core/hd.h"
#include "ingot/gpu/watch.h"

namespace ingot::megakernel {

// What a traced kernel writes, a row of words a block: when it began, of each grid barrier when it arrived and when it
// went on, when it ended (ns, one clock for all SMs), then what the kernel's program adds. Kernels that are not
// instantiated for it have no code for it and refuse it.
struct Trace {
  uint64_t* words = nullptr;  // (blocks, words_of_block)
  uint32_t blocks = 0;        // later blocks of the grid write nothing
  uint32_t grid_barriers = 0, extra = 0;

  INGOT_HD uint32_t stamps() const { return 2 * grid_barriers + 2; }
  INGOT_HD uint32_t words_of_block() const { return stamps() + extra; }
};

struct Grid {
  uint32_t* counter = nullptr;  // zero before its first use and after a wait gave up
  gpu::Watch watch;
  Trace trace;
  uint32_t missing = ~0u;  // for tests: the last block stays away from the grid barrier of this number
};

}  // namespace ingot::megakernel
