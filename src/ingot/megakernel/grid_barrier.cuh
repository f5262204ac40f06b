#pragma once
// Grid barriers between the stages of a persistent kernel, whose blocks all run at the same time (launched
// `cooperative`). A grid barrier has two halves: after arrive() this block's results are on their way to all blocks,
// after wait() the results of all blocks can be read. Between the two halves a block requests read-only data of its
// next stage, such as weights.
//     const megakernel::GridBarriers<Team> grid_barriers(grid, memory);
//     grid_barriers.begin();
//     stage_one(...);
//     grid_barriers.arrive();
//     ... request weights ...
//     grid_barriers.wait();
//     stage_two(...);
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/megakernel/grid_barrier.h"

namespace ingot::megakernel {

struct GridBarrierMemory {  // in shared memory, used by the block's first thread
  uint32_t phase, number;
};
// A counter, zero before its first use, serves any number of grid barriers, launches and grid sizes: block 0 adds a
// number that makes the top bit flip when all blocks have arrived. `Team`: the participating threads of a block,
// including the first thread; sync() is a barrier of the team. `kTraced`: records the times of Grid::trace.
template <class Team, bool kTraced = false> class GridBarriers {
 public:
  using Memory = GridBarrierMemory;
  __device__ __forceinline__ GridBarriers(const Grid& grid, Memory& memory) : grid_(grid), m_(memory) {}

  // Once, by all threads. The counter's phase cannot change before this block has arrived, so this read is safe.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) m_ = {ptx::load_relaxed(grid_.counter) & kTop, 0};
    stamp([&] { return 0u; });
  }
  // Once, by all threads, after the last grid barrier's stage.
  __device__ __forceinline__ void end() const {
    if constexpr (kTraced) Team::sync();
    stamp([&] { return grid_.trace.stamps() - 1; });
  }
  // arrive() and wait() are also barriers of the team. With `fence` false the block's stores may become visible after
  // its arrival: for words with their own ready flags (sums.cuh).
  __device__ __forceinline__ void arrive(bool fence = true) const {
    end_stage();
    announce(fence);
  }
  // end_stage() and announce() are arrive() in two calls, for blocks whose results all carry their own ready flags. The
  // arrival may then be announced before the results are written, once the block's threads have read their own inputs.
  __device__ __forceinline__ void end_stage(bool sync = true) const {
    if (sync) Team::sync();
    stamp([&] { return 1 + 2 * m_.number; });
  }
  // In place of wait(), where the readers of a stage wait for their own words: only counts the grid barrier.
  __device__ __forceinline__ void pass() const {
    if (threadIdx.x != 0) return;
    stamp([&] { return 2 + 2 * m_.number; });
    m_.number += 1;
  }
  __device__ __forceinline__ void announce(bool fence = false) const {
    if (threadIdx.x != 0 || (m_.number == grid_.missing && blockIdx.x == gridDim.x - 1)) return;
    const uint32_t one = blockIdx.x == 0 ? kTop - (gridDim.x - 1) : 1;
    if (fence)
      ptx::add_release(grid_.counter, one);
    else
      ptx::add_relaxed(grid_.counter, one);
  }
  // After a failed wait of the grid, this wait and all later waits return early. With `fence` false, earlier stores of
  // other blocks may still be in flight.
  __device__ __forceinline__ void wait(bool fence = true) const {
    if (threadIdx.x == 0) {
      tile::wait_until(
          [&] {
            return ((fence ? ptx::load_acquire(grid_.counter) : ptx::load_relaxed(grid_.counter)) & kTop) != m_.phase;
          },
          [&] { return blocks_that_came(); }, gridDim.x, grid_.watch, m_.number);
      stamp([&] { return 2 + 2 * m_.number; });
      m_ = {m_.phase ^ kTop, m_.number + 1};
    }
    Team::sync();
  }
  // False after a failed wait: the results may be meaningless.
  __device__ __forceinline__ bool all_came() const { return !tile::stopped(grid_.watch); }

 private:
  static constexpr uint32_t kTop = 0x80000000u;
  __device__ __forceinline__ uint32_t blocks_that_came() const {
    const uint32_t seen = ptx::load_relaxed(grid_.counter) & ~kTop;
    return seen < gridDim.x ? seen : seen - (kTop - gridDim.x);
  }

  // Writes the present time to the word `at()` of this block's row.
  template <class At> __device__ __forceinline__ void stamp(At&& at) const {
    if constexpr (kTraced) {
      const Trace& t = grid_.trace;
      if (threadIdx.x == 0 && blockIdx.x < t.blocks && at() < t.stamps())
        t.words[int64_t(blockIdx.x) * t.words_of_block() + at()] = ptx::global_timer();
    }
  }

  const Grid& grid_;
  Memory& m_;
};

}  // namespace ingot::megakernel
