#pragma once
// Measures a grid barrier within one GPU in the pattern of a persistent kernel: every block publishes its share of the
// numbers, then every block reads all numbers.
#include <cstdint>

namespace ingot::megakernel {

struct GridBarrierTimes {  // microseconds per grid barrier
  double barrier = 0;      // the barrier alone, without data
  double fenced = 0;       // plain stores, a fence, the barrier, reads
  double stamped = 0;      // words with an epoch, the barrier without a fence, reads with a check of the epochs
  double polled = 0;       // the same words without a barrier: the reads repeat until all epochs have arrived
};
// With `numbers` numbers, one block per SM of the current GPU. `loaded`: the remaining warps of all SMs read memory at
// full speed. Waits are bounded: Error(interrupted).
GridBarrierTimes measure_grid_barriers(uint32_t numbers, bool loaded);

}  // namespace ingot::megakernel
