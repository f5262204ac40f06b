#pragma once
// Grid barriers between the stages of a persistent kernel, whose blocks are all under way at once (launched
// `cooperative`). A grid barrier has two halves: after the first this block's results are on their way to the others,
// after the second everybody's are here. In between a block asks for what its next stage reads and nobody writes.
//     const megakernel::Handoffs<Team> grid barriers(grid, memory);
//     grid_barriers.begin();
//     stage_one(...);
//     grid_barriers.arrive();
//     ... ask for weights ...
//     grid_barriers.wait();
//     stage_two(...);
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/megakernel/grid_barrier.h"

namespace ingot::megakernel {

struct GridBarrierMemory {  // shared, of the block's first thread
  uint32_t phase, number;
};
// A counter that is zero before its first use serves any number of grid barriers, launches and grid sizes: block 0 adds
// what makes the top bit flip when all have come.
// `Team`: the threads of a block that take part, its first among them: a sync() of theirs.
// `kTraced`: keeps the times of Grid::trace.
template <class Team, bool kTraced = false> class GridBarriers {
 public:
  using Memory = GridBarrierMemory;
  __device__ __forceinline__ GridBarriers(const Grid& grid, Memory& memory) : grid_(grid), m_(memory) {}

  // Once, by all threads. The counter's phase cannot change before this block has arrived.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) m_ = {ptx::load_relaxed(grid_.counter) & kTop, 0};
    stamp([&] { return 0u; });
  }
  // Once, by all threads, after the last grid barrier's stage.
  __device__ __forceinline__ void end() const {
    if constexpr (kTraced) Team::sync();
    stamp([&] { return grid_.trace.stamps() - 1; });
  }
  // Each is a barrier of the team. With `fence` false what the block has stored may come later than its arrival: for
  // words that say by themselves whether they are complete (sums.cuh).
  __device__ __forceinline__ void arrive(bool fence = true) const {
    end_stage();
    announce(fence);
  }
  // The same in two: where all that a block hands over says by itself that it is there, and its threads have read
  // what was handed to them, it may be announced before it is there.
  __device__ __forceinline__ void end_stage(bool sync = true) const {
    if (sync) Team::sync();
    stamp([&] { return 1 + 2 * m_.number; });
  }
  // Where each reader waits for what it reads, all that is left of a grid barrier is its number.
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
  // Returns early, like all later ones, where a wait of the grid gave up. With `fence` false what the others have
  // stored before may still be on its way.
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
  // False where what was computed may be nonsense.
  __device__ __forceinline__ bool all_came() const { return !tile::stopped(grid_.watch); }

 private:
  static constexpr uint32_t kTop = 0x80000000u;
  __device__ __forceinline__ uint32_t blocks_that_came() const {
    const uint32_t seen = ptx::load_relaxed(grid_.counter) & ~kTop;
    return seen < gridDim.x ? seen : seen - (kTop - gridDim.x);
  }

  // The present time as the word `at()` of this block's row.
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
