#pragma once
// Twelve bytes of data and an epoch in one access of 16 bytes: a reader that sees the awaited epoch has the data as
// well, without a fence on either side. An epoch must not be reused in a place that may still hold an old word of the
// same epoch.
#include <cstdint>

#include "ingot/gpu/ptx/atomics.cuh"

namespace ingot::tile {

struct alignas(16) EpochWords {
  uint32_t word[3] = {}, epoch = 0;

  __device__ __forceinline__ static EpochWords load(const EpochWords* p) {
    EpochWords s;
    uint64_t low, high;
    ptx::load_relaxed_16(p, low, high);
    s.word[0] = uint32_t(low), s.word[1] = uint32_t(low >> 32), s.word[2] = uint32_t(high);
    s.epoch = uint32_t(high >> 32);
    return s;
  }
  __device__ __forceinline__ void store(EpochWords* p) const {
    ptx::store_relaxed_16(p, word[0] | uint64_t(word[1]) << 32, word[2] | uint64_t(epoch) << 32);
  }
};

}  // namespace ingot::tile
