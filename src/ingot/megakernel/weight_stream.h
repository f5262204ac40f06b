#pragma once
// The parameters of a persistent kernel's weight stream (weight_stream.cuh).
#include <cstdint>

namespace ingot::megakernel {

// Three chunks in flight, 37 KB per SM, keep the memory busy; more chunks delay the grid barriers.
constexpr uint32_t kSlotBytes = 12544, kMostSlots = 16;
// Slots without the copy engine (weight_copies.cuh): three weight tiles of bf16, one for each warp of a team.
constexpr uint32_t kLaneSlotBytes = 6272;
constexpr uint32_t kTeamWarps = 3, kTeams = 5;  // warps per chunk (a team), and the number of teams

// A reader waits for a fill of a slot by its parity alone, so the fill before must be complete when the wait begins.
// This holds where
//     ahead + teams <= slots
// because a team waiting for fill i has read fill i - teams, requested when fill i - teams - ahead was complete. It
// also holds where the number of slots is a multiple of the teams, because then one team reads all fills of a slot, and
// has read the fill before.
struct WeightRing {
  uint32_t slots = 0;  // of kSlotBytes or kLaneSlotBytes each
  uint32_t ahead = 3;  // the most chunks in flight
};
// The ring of small slots that fits into `bytes`: some multiple of the teams, or no slots.
constexpr WeightRing ring_of_small_slots(int64_t bytes) {
  constexpr uint32_t kAhead = 6;  // as many bytes in flight as three large slots
  const int64_t fit = bytes < 0 ? 0 : bytes / kLaneSlotBytes, most = fit < kMostSlots ? fit : kMostSlots;
  const uint32_t slots = uint32_t(most) / kTeams * kTeams;
  return {slots, kAhead < slots ? kAhead : slots};
}

}  // namespace ingot::megakernel
