#pragma once
// The two ways in which a warp brings a chunk into a slot of the ring (weight_stream.cuh), each with the barriers that
// it needs.
//
//   EngineCopies   one lane asks the copy engine for the whole chunk: compute capability 9.0 and later
//   LaneCopies     all lanes copy 16 bytes at a time with cp.async, and no instruction is newer than compute capability
//                  8.0. The slots are half as large, so that the ring fits into the 99 KB of small multiprocessors.
#include <cstdint>

#include "ingot/gpu/tile/flag.cuh"
#include "ingot/megakernel/ptx/lane_copies.cuh"
#include "ingot/megakernel/weight_stream.h"
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#endif

namespace ingot::megakernel {

// Only a bug can keep these barriers from completing, because every wait of the arriving threads is bounded.
__device__ __forceinline__ void wait_for_slot(uint64_t* barrier, uint32_t parity) {
#ifdef INGOT_EMULATE
  while (!ptx::mbarrier_try_wait(barrier, parity)) {}
#else
  tile::wait_or_trap(barrier, parity);
#endif
}

struct EngineCopies {
  static constexpr uint32_t kSlotBytes = megakernel::kSlotBytes;
  static constexpr uint32_t kFillArrivals = 1;  // arrivals on a slot's full barrier

  // After the initialisation of barriers, by the same thread.
  __device__ __forceinline__ static void fence_barriers() { ptx::fence_mbarrier_init(); }
  __device__ __forceinline__ static void arrive(uint64_t* barrier) { ptx::mbarrier_arrive(barrier); }
  __device__ __forceinline__ static void wait(uint64_t* barrier, uint32_t parity) { wait_for_slot(barrier, parity); }
};

struct LaneCopies {
  static constexpr uint32_t kSlotBytes = kLaneSlotBytes;
  // Every lane arrives when its copies are done, and the lane that writes the note arrives once more: the arrival of
  // copies does not order the lane's ordinary stores.
  static constexpr uint32_t kFillArrivals = 33;

  // The barrier of the block that follows the initialisation is enough for threads of the same block.
  __device__ __forceinline__ static void fence_barriers() {}
  __device__ __forceinline__ static void arrive(uint64_t* barrier) { ptx::mbarrier_arrive_80(barrier); }
  __device__ __forceinline__ static bool has_completed(uint64_t* barrier, uint32_t parity) {
    return ptx::mbarrier_test_wait(barrier, parity);
  }
  // Counts its polls, because a test does not suspend the thread, and reading a clock after each test takes longer than
  // a copy.
  __device__ __forceinline__ static void wait(uint64_t* barrier, uint32_t parity) {
    constexpr uint32_t kMostPolls = 1u << 28;  // seconds
#pragma unroll 1
    for (uint32_t polls = 0; !has_completed(barrier, parity); ++polls)
      if (polls == kMostPolls) ptx::trap();
  }
};

}  // namespace ingot::megakernel
