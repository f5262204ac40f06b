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

// The same, in order with all further calls and with memory accesses: the compiler does not interleave these.
__device__ __forceinline__ void settle_in_turn(float& v) { asm volatile("" : "+f"(v)::"memory"); }

}  // namespace ingot::ptx
#endif
