#pragma once
// For *_tiles.simd.cpp files, after core/cpu/simd.h: the configuration of AMX tiles in use.
#include "ingot/core/cpu/simd.h"
#if defined(__AMX_BF16__)
#include <immintrin.h>

namespace ingot::INGOT_SIMD {

// Eight tiles of 16 rows of 64 bytes. Loading the configuration also clears the tiles; _tile_release() releases them.
INGOT_SIMD_INLINE void configure_tiles() {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  asm volatile("" ::"r"(&config) : "memory");  // g++ 12 does not know: the load reads memory
  _tile_loadconfig(&config);
}

}  // namespace ingot::INGOT_SIMD
#endif
