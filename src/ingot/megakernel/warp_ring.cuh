#pragma once
// The weight stream without the copy engine, from compute capability 8.0 on: each warp of a block copies the weights
// that it multiplies into a ring of its own, step by step in the order of their use, and reads them from there. A lane
// reads the 16 bytes that the lane itself has copied, so the warps and lanes share no barrier: a wait for the lane's
// own copies is enough. The ring keeps running across grid barriers, because no block writes weights.
#include <cstdint>

#include "ingot/megakernel/ptx/ring_copies.cuh"
#include "ingot/megakernel/warp_ring.h"

namespace ingot::megakernel {

// A step of a warp: 16 bytes for each lane, and in formats with block scales 32 further bytes behind them.
struct WarpStep {
  uint4 words;
  uint32_t scales;
};

// A warp's view of its ring. Each step is one group of copies. A wait counts the groups after the awaited step, so a
// slot without a step still gets an empty group.
class WarpRing {
 public:
  __device__ __forceinline__ WarpRing(uint32_t slots, char* memory)
      : has_many_(slots == kManyWarpSlots),
        at_(ptx::shared_address(memory)),
        begin_(at_),
        end_(at_ + slots * kWarpSlotBytes) {}

  // Requests steps until every slot has a step or no further step is known: copy(slot) requests the warp's next step
  // into the slot at a shared address, and returns whether there was such a step. Call before take(), and whenever
  // further steps have become known.
  template <class Copy> __device__ __forceinline__ void fill(Copy&& copy) {
    uint32_t missing = missing_;
#pragma unroll 1
    for (; missing > 0; missing -= kWarpSlotBytes) {
      // The free slots are those just before the slot of the oldest step.
      const uint32_t slot = at_ - missing;
      if (!copy(slot < begin_ ? slot + (end_ - begin_) : slot)) break;
      ptx::cp_async_commit_group();
    }
    missing_ = missing;
#pragma unroll 1
    for (; missing > 0; missing -= kWarpSlotBytes) ptx::cp_async_commit_group();
  }
  // Waits for the oldest step, which must have been requested, and returns the step. Afterwards request a further step
  // into slot(), or none, and call advance().
  template <bool kScales> __device__ __forceinline__ WarpStep take() const {
    const uint32_t lane = threadIdx.x % 32;
    wait();
    if constexpr (kScales) __syncwarp();  // other lanes have copied the scales
    uint32_t words[4], scales[1] = {};
    ptx::load_shared(words, at_ + lane * 16);
    if constexpr (kScales) {
      ptx::load_shared(scales, at_ + 512 + lane / 4 * 4);
      __syncwarp();  // the next copy overwrites the scales
    }
    return {{words[0], words[1], words[2], words[3]}, scales[0]};
  }
  // The slot of the oldest step.
  __device__ __forceinline__ uint32_t slot() const { return at_; }
  __device__ __forceinline__ void advance() {
    ptx::cp_async_commit_group();
    at_ += kWarpSlotBytes;
    if (at_ == end_) at_ = begin_;
  }
  // Records that no step was requested into the slots of the last `count` steps taken.
  __device__ __forceinline__ void shrink(uint32_t count) { missing_ += count * kWarpSlotBytes; }

 private:
  // Waits until the oldest step has arrived.
  __device__ __forceinline__ void wait() const {
    if (has_many_)
      ptx::cp_async_wait_group<kManyWarpSlots - 1>();
    else
      ptx::cp_async_wait_group<kFewWarpSlots - 1>();
  }

  const bool has_many_;
  uint32_t at_;  // of the oldest step
  const uint32_t begin_, end_;
  uint32_t missing_ = end_ - begin_;  // bytes of the slots without a step
};

}  // namespace ingot::megakernel
