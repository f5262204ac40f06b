#pragma once
// The 64-bit matrix descriptor through which wgmma finds a 16-bit operand in shared memory.
//     bits  0-13 start address / 16      16-29 leading offset / 16      32-45 stride offset / 16
//     bits 49-51 base offset: 0, as panels are aligned (swizzle.cuh)    62-63 swizzle: 0 none, 1 b128, 2 b64, 3 b32
// For a tile in panels (swizzle.cuh), with W = row_bytes and panels that lie `panel_bytes` apart:
//     K-major    a panel's rows are M (or N), its bytes K.    stride  = 8 * W: the next 8 rows
//                                                             leading = panel_bytes for none (its panels hold 8 k, an
//                                                                       instruction reads two); not read otherwise
//     MN-major   a panel's rows are K, its bytes M (or N).    b32, b64, b128: leading = panel_bytes: the next W bytes
//                                                                       of M or N; stride = 8 * W: the next 8 k
//                                                             none: leading and stride change places
// An instruction reads 16 k. K-major panels hold W / 2 k, so the loop over k steps inside a panel, then to the next; in
// MN-major panels k runs down the rows.
#include <cstdint>

#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/swizzle.cuh"

namespace ingot::tile {

using ptx::Major;

constexpr uint64_t make_descriptor(uint32_t address, uint32_t leading, uint32_t stride, Swizzle s) {
  constexpr uint64_t kCode[] = {0, 3, 2, 1};
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t((leading & 0x3ffff) >> 4) << 16 |
         uint64_t((stride & 0x3ffff) >> 4) << 32 | kCode[uint32_t(s)] << 62;
}

// The descriptor of the first 16 k of a tile at `address` (ptx::shared_address). panel_bytes is not needed where a tile
// is a single panel, nor for swizzled K-major tiles.
template <Major kMajor, Swizzle S> constexpr uint64_t operand_descriptor(uint32_t address, uint32_t panel_bytes = 16) {
  constexpr uint32_t kEight = 8 * row_bytes(S);
  if constexpr (kMajor == Major::mn && S == Swizzle::none) return make_descriptor(address, kEight, panel_bytes, S);
  return make_descriptor(address, panel_bytes, kEight, S);
}

// The increment of a descriptor to reach element k (a multiple of 16; free when known at compile time).
template <Major kMajor, Swizzle S> constexpr uint64_t descriptor_step(uint32_t k, uint32_t panel_bytes = 0) {
  if constexpr (kMajor == Major::mn) return uint64_t(k * row_bytes(S)) >> 4;
  constexpr uint32_t kPerPanel = row_bytes(S) / 2;
  return uint64_t(k / kPerPanel * panel_bytes + k % kPerPanel * 2) >> 4;
}

// The descriptor of elements k .. k + 15, k known at compile time. Only its low word depends on the address, so code
// carries and adds 32 bits only.
template <Major kMajor, Swizzle S> constexpr uint64_t operand(uint32_t address, uint32_t k, uint32_t panel_bytes = 16) {
  const uint64_t base = operand_descriptor<kMajor, S>(0, panel_bytes);
  return (base & ~uint64_t(0xffffffff)) |
         (uint32_t(base) + ((address & 0x3ffff) >> 4) +  // in a cluster, the high bits of an address identify the block
          uint32_t(descriptor_step<kMajor, S>(k, panel_bytes)));
}

}  // namespace ingot::tile
