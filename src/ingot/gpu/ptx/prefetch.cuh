#pragma once
// Prefetches into L2 for later loads with the hint to keep the data (memory.cuh). No result changes: the bytes may
// still be written before the read.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include "ingot/gpu/ptx/memory.cuh"

namespace ingot::ptx {

// As prefetch_to_l2, with the same hint to keep the lines; lines without the hint would be evicted first. Address and
// size are multiples of 16.
__device__ inline void prefetch_to_l2_keeping(const void* p, uint32_t bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b64 stay; createpolicy.fractional.L2::evict_last.b64 stay, 1.0;"
      " cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, stay;}" ::"l"(p),
      "r"(bytes)
      : "memory");
#endif
}

}  // namespace ingot::ptx
#endif
