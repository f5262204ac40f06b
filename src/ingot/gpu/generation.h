#pragma once
// The oldest GPU of most operations. Operations over rows also run on compute capability 7.5 (docs/gpu-layer.md).
#include "ingot/core/check.h"
#include "ingot/gpu/limits.h"

namespace ingot::gpu {

constexpr int kOldestCapability = 80;  // compute capability times 10

// Refuses an operation on an older GPU, for which the build has no code of the operation's kernels.
inline void check_generation(const char* op, const Limits& limits) {
  if (limits.capability < kOldestCapability)
    fail(ErrorCode::unsupported, op, ": found a GPU of compute capability ", limits.capability / 10, ".",
         limits.capability % 10, ", expected ", kOldestCapability / 10, ".", kOldestCapability % 10, " or later");
}

}  // namespace ingot::gpu
