#pragma once
// Shared memory is addressed by pointer where a whole object is meant (a barrier, a tile), and by its 32-bit address
// where offsets are computed (ldmatrix, stmatrix, cp.async).
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include <cstdint>

namespace ingot::ptx {

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

}  // namespace ingot::ptx
#endif
