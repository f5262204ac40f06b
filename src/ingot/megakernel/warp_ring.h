#pragma once
// The sizes of the rings of warps (warp_ring.cuh).
#include <cstdint>

namespace ingot::megakernel {

// Bytes of a slot, and the two numbers of slots of a warp's ring. Five slots of fifteen warps are 38 KB in flight per
// SM, which keep the memory busy; twelve also hold weights that have arrived ahead of their use.
constexpr uint32_t kWarpSlotBytes = 544, kManyWarpSlots = 12, kFewWarpSlots = 5;

// The slots of each ring, where the rings of `warps` warps fit into `bytes`; 0 if none fit.
constexpr uint32_t warp_slots(int64_t bytes, uint32_t warps) {
  for (const uint32_t slots : {kManyWarpSlots, kFewWarpSlots})
    if (int64_t(slots) * warps * kWarpSlotBytes <= bytes) return slots;
  return 0;
}

}  // namespace ingot::megakernel
