#pragma once
// How a persistent kernel's weights travel (weight_stream.cuh).
#include <cstdint>

namespace ingot::megakernel {

// Three under way are the 37 KB an SM that memory needs to be busy; more delay the grid barriers.
constexpr uint32_t kSlotBytes = 12544, kMostSlots = 16;
constexpr uint32_t kTeamWarps = 3, kTeams = 5;  // warps that share a piece, and how many times so many there are

// A reader waits for a slot's fill by its parity alone, so the fill before must have come when it begins to: it has
// where
//     ahead + teams <= slots
// for a team begins to wait for fill i when it has read i - teams, which was asked for when i - teams - ahead had come.
struct WeightRing {
  uint32_t slots = 0;  // of kSlotBytes each
  uint32_t ahead = 3;  // pieces that may be under way at once
};

}  // namespace ingot::megakernel
