#pragma once
// The configuration of the AMX tile registers, for *_tiles.simd.cpp files. All of them use the same configuration.
#include "ingot/core/cpu/simd.h"
#if defined(__AMX_BF16__)
#include <immintrin.h>

namespace ingot::INGOT_SIMD {

// Configures eight tiles of 16 rows of 64 bytes, and clears them. _tile_release() ends the use of the tiles.
INGOT_SIMD_INLINE void configure_tiles() {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  // g++ 12 does not know that the instruction reads `config`, and could otherwise omit the stores to it.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

}  // namespace ingot::INGOT_SIMD
#endif
