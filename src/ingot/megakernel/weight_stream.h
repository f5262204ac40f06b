#pragma once
// The parameters of a persistent kernel's weight stream (weight_stream.cuh).
#include <cstdint>

namespace ingot::megakernel {

// Three pieces in flight are the 37 KB per SM that keep the memory busy; more pieces delay the grid barriers.
constexpr uint32_t kSlotBytes = 12544, kMostSlots = 16;
constexpr uint32_t kTeamWarps = 3, kTeams = 5;  // warps that share a piece (a team), and the number of teams

// A reader waits for a fill of a slot by its parity alone, so the fill before must be complete when the wait begins.
// This holds where
//     ahead + teams <= slots
// because a team that begins to wait for fill i has read fill i - teams, which was requested when fill i - teams -
// ahead was complete.
struct WeightRing {
  uint32_t slots = 0;  // of kSlotBytes each
  uint32_t ahead = 3;  // pieces that may be in flight at once
};

}  // namespace ingot::megakernel
