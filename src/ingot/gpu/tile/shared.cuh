#pragma once
// Shared memory, one variable per type and slot: `auto& memory = tile::shared<Memory>();`. Two calls with the same type
// name the same memory, unless the slots differ. Kernels with emulation use this function in place of __shared__.
#include <cstdint>

#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/cuda.h"
#endif

namespace ingot::tile {

#ifdef INGOT_EMULATE
template <class T, int kSlot> inline char shared_key = 0;
template <class T, int kSlot = 0> T& shared() {
  return *static_cast<T*>(emulation::shared_memory(&shared_key<T, kSlot>, sizeof(T)));
}
template <class T> T* dynamic_shared() { return static_cast<T*>(emulation::shared_memory(nullptr, sizeof(T))); }
#else
template <class T, int kSlot = 0> __device__ __forceinline__ T& shared() {
  __shared__ T memory;
  return memory;
}
// The launch's dynamic shared memory (Launch::smem), aligned for swizzled tiles.
template <class T> __device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(1024) char ingot_dynamic_shared[];
  return reinterpret_cast<T*>(ingot_dynamic_shared);
}
#endif

}  // namespace ingot::tile
