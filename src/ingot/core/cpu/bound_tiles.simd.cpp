// Tile products on registers and nothing else: the bound for products of bf16 where the CPU has AMX.
#include "ingot/core/cpu/tiles.simd.h"

namespace ingot::INGOT_SIMD {

// Four chains cover the latency. Returns the operations done; 0 at a level without tiles.
double tile_loop_bf16([[maybe_unused]] int64_t rounds) {
#if defined(__AMX_BF16__)
  configure_tiles();
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return double(rounds) * 4 * 16 * 16 * 32 * 2;
#else
  return 0;
#endif
}

}  // namespace ingot::INGOT_SIMD
