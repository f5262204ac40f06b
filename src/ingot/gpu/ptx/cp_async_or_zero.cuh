#pragma once
// cp_async<16> for a source whose 16 bytes all exist or do not exist. The form of cp.async that takes the number of
// valid bytes from a register needs five more instructions, which move the address.
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
