#pragma once
// What atomics.cuh has for words of 32 bits, for those of 64; apart from it as few need them and all include it.
#include "ingot/gpu/ptx/atomics.cuh"
#ifndef INGOT_EMULATE
namespace ingot::ptx {

// *p += v without an answer.
__device__ inline void add_release(uint64_t* p, uint64_t v) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// *p += v; the value before.
__device__ inline uint64_t fetch_add_relaxed(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}
// *p = desired if it is `expected`; the value before.
__device__ inline uint64_t compare_exchange_relaxed(uint64_t* p, uint64_t expected, uint64_t desired) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(p), "l"(expected), "l"(desired)
               : "memory");
  return old;
}

}  // namespace ingot::ptx
#endif
