#pragma once
// Sums in global memory with additions from several blocks. A word of 64 bits holds a sum in fixed point and, in its
// lowest bits, the number of additions so far. A reader sees both at once, so neither side needs a fence, and sums of
// integers do not depend on the order of the additions. A word is zero before its first addition.
#include <cstdint>

#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/tile/flag.cuh"

namespace ingot::megakernel {

// The sum has steps of 2^-kPlaces and at most 512 terms, or two terms with 28 places. A term that is a NaN or at least
// kMost in magnitude makes the sum NaN.
template <int kPlaces> struct FixedSum {
  static constexpr int kCountBits = 10;
  static constexpr float kMost = 0x1p22f;
  static_assert(kPlaces + 23 + 9 + kCountBits < 64 || kPlaces == 28,
                "the sum fits into the word; sums of 28 places have two terms");

  __device__ __forceinline__ static void add(uint64_t* word, float term, uint32_t count) {
    const int64_t fixed = fabsf(term) < kMost ? __float2ll_rn(term * kOne)
                                              : int64_t(1) << (kPlaces + 23);  // comparisons with a NaN are false
    ptx::add_relaxed(word, (uint64_t(fixed) << kCountBits) + count);
  }
  __device__ __forceinline__ static uint32_t count(uint64_t word) { return uint32_t(word) & ((1u << kCountBits) - 1); }
  __device__ __forceinline__ static float value(uint64_t word) {
    const float v = __ll2float_rn(int64_t(word) >> kCountBits) * (1 / kOne);
    return fabsf(v) < kMost ? v : NAN;
  }

 private:
  static constexpr float kOne = float(int64_t(1) << kPlaces);
};

// Called after a grid barrier (grid_barrier.cuh) and a first load(): loads again until the word is complete(). All
// blocks have added by then, so the first word is nearly always complete. Where a wait of the grid gave up, the word
// may never become complete.
template <class Load, class Complete>
__device__ __forceinline__ void read_again(Load&& load, Complete&& complete, const gpu::Watch& watch) {
  constexpr uint32_t kMost = 1u << 26;  // only a bug needs so many polls
#pragma unroll 1
  for (uint32_t polls = 1; !complete(); ++polls) {
    if (polls % 32 == 0 && tile::stopped(watch)) return;
    if (polls == kMost) ptx::trap();
    load();
  }
}

// Waits without a grid barrier until the words that load() reads are complete(); `number` names the wait in the record
// of the watch. This wait gives up earlier than the waits of the blocks that depend on this block, so that the record
// names the wait that failed first.
template <class Load, class Complete>
__device__ __forceinline__ void wait_for_words(Load&& load, Complete&& complete, const gpu::Watch& watch,
                                               uint32_t number) {
  if (complete()) return;
  gpu::Watch sooner = watch;
  sooner.limit_ns = sooner.limit_ns / 4 * 3;
  tile::wait_until(
      [&] {
        load();
        return complete();
      },
      [] { return 0u; }, 1, sooner, number);
}

}  // namespace ingot::megakernel
