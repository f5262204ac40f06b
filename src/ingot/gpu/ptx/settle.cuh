#pragma once
// The compiler forms the value by this point, neither later nor anew: for what must not be formed behind a wait, or
// over and over in a loop. No instruction.
#include <cstdint>

namespace ingot::ptx {

template <class T> __device__ __forceinline__ void settle(T*& p) { asm volatile("" : "+l"(p)); }
__device__ __forceinline__ void settle(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void settle(uint32_t& v) { asm volatile("" : "+r"(v)); }

// The same, and in its turn with all others and with whatever touches memory: the compiler weaves no two together.
__device__ __forceinline__ void settle_in_turn(float& v) { asm volatile("" : "+f"(v)::"memory"); }

}  // namespace ingot::ptx
