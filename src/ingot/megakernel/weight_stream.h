#pragma once
// The parameters of a persistent kernel's weight stream (weight_stream.cuh).
#include <cstdint>

namespace ingot::megakernel {

// Three chunks in flight, 37 KB per SM, keep the memory busy; more chunks delay the grid barriers.
constexpr uint32_t kSlotBytes = 12544, kMostSlots = 16;
constexpr uint32_t kTeamWarps = 3, kTeams = 5;  // warps per chunk (a team), and the number of teams

// A reader waits for a fill of a slot by its parity alone, so the fill before must be complete when the wait begins.
// This holds where
//     ahead + teams <= slots
// because a team waiting for fill i has read fill i - teams, requested when fill i - teams - ahead was complete.
struct WeightRing {
  uint32_t slots = 0;  // of kSlotBytes each; in rings of warps (warp_ring.h) of kWarpSlotBytes
  uint32_t ahead = 3;  // the most chunks in flight
};
}  // namespace ingot::megakernel
