#pragma once
// A ring of kStages buffers, each with a full and an empty mbarrier. A single counter i, the number of the fill,
// determines the stage and the parity of the phase that fill i completes. The consumer of fill i waits for
// full[stage(i)] with phase(i); the producer, before it overwrites, for empty[stage(i)] with phase(i) ^ 1; this wait
// passes at once on fresh barriers.
#include <cstdint>

namespace ingot::tile {

template <uint32_t kStages> struct Ring {
  static constexpr uint32_t stage(uint32_t i) { return i % kStages; }
  static constexpr uint32_t phase(uint32_t i) { return i / kStages & 1; }
};

// The same stage and parity, kept in variables and advanced from fill to fill. This avoids a division where kStages is
// not a power of two.
template <uint32_t kStages> struct RingCursor {
  uint32_t stage = 0, phase = 0;
  constexpr void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  // Advances by the given number of fills, which other groups of warps handle.
  constexpr void advance(uint32_t fills) {
    stage += fills;
    phase ^= stage / kStages & 1;
    stage %= kStages;
  }
};

}  // namespace ingot::tile
