#pragma once
// Makes the compiler compute the value by this point, neither later nor again: for values that must not be computed
// behind a wait or repeatedly in a loop. Emits no instruction.
#include <cstdint>

#ifdef INGOT_EMULATE
namespace ingot::ptx {

template <class T> inline void settle(T&) {}

}  // namespace ingot::ptx
#else
namespace ingot::ptx {

template <class T> __device__ __forceinline__ void settle(T*& p) { asm volatile("" : "+l"(p)); }
__device__ __forceinline__ void settle(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void settle(uint32_t& v) { asm volatile("" : "+r"(v)); }

// The same, and the compiler keeps the order of these calls among each other and relative to memory accesses.
__device__ __forceinline__ void settle_in_turn(float& v) { asm volatile("" : "+f"(v)::"memory"); }

}  // namespace ingot::ptx
#endif
