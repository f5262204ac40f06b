#pragma once
// Tests on the emulated GPU with the limits of another GPU.
#ifdef INGOT_EMULATED_DEVICE
#include <string_view>

#include "ingot/gpu/emulation/grid.h"
#include "ingot/gpu/limits.h"

namespace ingot::testing {

// The emulated GPUs have at most the limits `wanted` as long as the object lives, and then those from before, which
// INGOT_GPU_AS may have chosen.
class EmulatedLimits {
 public:
  explicit EmulatedLimits(const gpu::Limits& wanted) { emulation::set_device_limits(wanted); }
  explicit EmulatedLimits(std::string_view capability) : EmulatedLimits(gpu::limits_of(capability)) {}
  ~EmulatedLimits() { emulation::set_device_limits(before_); }
  EmulatedLimits(const EmulatedLimits&) = delete;
  EmulatedLimits& operator=(const EmulatedLimits&) = delete;

 private:
  const gpu::Limits before_ = gpu::limits(0);
};

}  // namespace ingot::testing
#endif
