#pragma once
// Sizes of tensors relative to the L2 of a GPU. Kernels choose their cache hints and the order of their accesses by
// these sizes.
#include <algorithm>
#include <cstdint>

#include "ingot/gpu/limits.h"

namespace ingot::gpu {

// From this size on, L2 holds none of a kernel's written data at the next read. Hopper GPUs have 50 or 60 MB of L2, and
// their size was measured; elsewhere the size is in the same proportion to 50 MB.
constexpr int64_t beyond_l2_bytes(const Limits& limits) {
  return limits.hopper ? int64_t(64) << 20 : limits.l2_bytes + limits.l2_bytes / 4;
}
// From this size on, a reader finds little of the written data in L2.
constexpr int64_t half_l2_bytes(const Limits& limits) {
  return limits.hopper ? int64_t(25) << 20 : limits.l2_bytes / 2;
}
// The bytes that stay in L2 while many tiles read them. The rest of L2 is left to data that is used once.
constexpr int64_t kept_in_l2_bytes(const Limits& limits) { return std::min(int64_t(24) << 20, limits.l2_bytes / 2); }

}  // namespace ingot::gpu
