#pragma once
// The limits of the GPU that holds a tensor, for host code that tests also run on the emulator.
#include "ingot/core/tensor.h"
#include "ingot/gpu/limits.h"

namespace ingot::gpu {

inline const Limits& device_limits([[maybe_unused]] Device device) {
#if defined(INGOT_EMULATE) && !defined(INGOT_EMULATED_DEVICE)
  return current_limits();  // a test on the emulator, in a build without any GPU
#else
  return limits(device.index);
#endif
}

}  // namespace ingot::gpu
