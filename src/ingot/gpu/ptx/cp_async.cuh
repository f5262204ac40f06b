#pragma once
// Copies of 4, 8 or 16 bytes from global to shared memory. From compute capability 8.0 on the copies do not go through
// registers; older GPUs use loads and stores of 4 bytes. `valid` bytes (on older GPUs a multiple of 4) are read, and
// the rest of the destination becomes zeros; with valid = 0 the source is not read. Both addresses are aligned to the
// size.
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include <cstdint>

#include "ingot/gpu/ptx/address.cuh"

namespace ingot::ptx {

template <int kBytes> __device__ inline void cp_async(uint32_t to, const void* from, uint32_t valid = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async moves 4, 8 or 16 bytes");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // the copy goes through registers, and is complete at once
#pragma unroll
  for (uint32_t i = 0; i < kBytes; i += 4) {
    const uint32_t w = i < valid ? *reinterpret_cast<const uint32_t*>(static_cast<const char*>(from) + i) : 0;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + i), "r"(w) : "memory");
  }
#else
  if constexpr (kBytes == 16)  // past L1
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(valid)
                 : "memory");
#endif
}
// Copies 16 bytes with the hint to keep the lines in L2.
__device__ inline void cp_async_keeping(uint32_t to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  cp_async<16>(to, from);
#else
  asm volatile(
      "{.reg .b64 stay; createpolicy.fractional.L2::evict_last.b64 stay, 1.0;"
      " cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, stay;}" ::"r"(to),
      "l"(from)
      : "memory");
#endif
}
__device__ inline void cp_async_commit_group() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most N of this thread's groups are left; further threads see the bytes after a barrier.
template <int N> __device__ inline void cp_async_wait_group() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
// Arrives on the barrier when all of this thread's copies so far are done; counts as an arrival of this thread.
__device__ inline void cp_async_mbarrier_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

}  // namespace ingot::ptx
#endif
