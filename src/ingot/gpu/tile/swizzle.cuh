#pragma once
// The layout of tiles in shared memory for the copy engine and the tensor cores. A tile is cut into panels, each as
// wide as the swizzle's row (panel_bytes along the contiguous index); a panel's rows follow each other without gaps:
//     offset(row, byte) = swizzled(row * W + byte)          W = 16, 32, 64, 128 bytes for none, b32, b64, b128
// The XOR moves the 16-byte chunks of a row by bits of the row's number, so a column of chunks meets all banks:
//     b128: chunk ^= row % 8      b64: chunk ^= row / 2 % 4      b32: chunk ^= row / 4 % 2
// The hardware takes these bits from the address, so a panel starts at a multiple of 8 * W bytes (kSwizzleAlignment
// serves all).
#include <cstdint>

namespace ingot::tile {

enum class Swizzle : uint8_t { none, b32, b64, b128 };
constexpr uint32_t kSwizzleAlignment = 1024;

// Bytes of a row of a panel.
constexpr uint32_t row_bytes(Swizzle s) { return 16u << uint32_t(s); }

// The offset after swizzling of the byte at `offset` of an unswizzled panel.
constexpr uint32_t swizzled(Swizzle s, uint32_t offset) {
  return offset ^ ((offset >> 3) & (((1u << uint32_t(s)) - 1) << 4));
}
template <Swizzle S> constexpr uint32_t swizzled(uint32_t row, uint32_t byte) {
  return swizzled(S, row * row_bytes(S) + byte);
}

}  // namespace ingot::tile
