#pragma once
// cp_async<16> of a source that is there as a whole or not at all. cp.async with a number of valid bytes in a register
// takes five more instructions, which move the address.
#include "ingot/gpu/ptx/cp_async.cuh"

namespace ingot::ptx {

__device__ inline void cp_async_or_zero(uint32_t to, const void* from, bool there) {
#ifdef INGOT_EMULATE
  cp_async<16>(to, from, there ? 16 : 0);
#else
  asm volatile(
      "{.reg .pred absent; setp.eq.u32 absent, %2, 0;"
      " cp.async.cg.shared.global [%0], [%1], 16, absent;}" ::"r"(to),
      "l"(from), "r"(uint32_t(there))
      : "memory");
#endif
}

}  // namespace ingot::ptx
