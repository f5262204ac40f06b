#pragma once
// What a grid barrier within a GPU costs, in the surroundings it has in a persistent kernel: every block publishes its
// share of the numbers, then every block reads all of them.
#include <cstdint>

namespace ingot::megakernel {

struct GridBarrierTimes {  // microseconds a grid barrier
  double barrier = 0;      // of all blocks, nothing handed over
  double fenced = 0;       // plain stores, a fence, the barrier, reads
  double stamped = 0;      // words that carry a stamp, the barrier without a fence, reads that look at the stamps
  double polled = 0;       // the same words without a barrier: reads until all stamps are there
};
// Of `numbers` numbers, by a block an SM of the current GPU; `loaded`: while the other warps of all SMs read memory as
// fast as they can. Waits are bounded: Error(interrupted).
GridBarrierTimes measure_grid_barriers(uint32_t numbers, bool loaded);

}  // namespace ingot::megakernel
