#pragma once
// What a grid reads first, asked for while earlier kernels still end. L2 is where everybody's writes meet, so what they
// change there is changed for this kernel too.
#include <algorithm>
#include <cstdint>

#include "ingot/gpu/ptx/prefetch.cuh"
#include "ingot/gpu/tile/row_units.cuh"

namespace ingot::tile {

// Of all operands together. What half of the threads of an H200 load at once: memory has work until the others have
// asked for theirs. More delays the kernel before: 8 MB cost what 4 gain.
constexpr int64_t kEarlyBytes = int64_t(4) << 20;

// How many of the first blocks ask, if each reads so many bytes.
constexpr uint32_t early_blocks(int64_t bytes_of_block) { return uint32_t(kEarlyBytes / bytes_of_block); }

// Of an operand without gaps the first `blocks` blocks ask for `bytes` each. Who asks for what does not matter.
struct EarlyReads {
  uint32_t blocks = 0, bytes = 0;
};
// For a grid that reads each of so many operands of so many bytes in order.
inline EarlyReads early_reads(int64_t operand_bytes, int64_t grid, int operands = 1) {
  const int64_t bytes = operand_bytes / grid / 16 * 16;
  if (bytes == 0) return {};
  return {uint32_t(std::min<int64_t>(grid, early_blocks(bytes * operands))), uint32_t(bytes)};
}
// kKeep: it is loaded by loads that L2 is asked to keep.
template <bool kKeep> __device__ inline void ask_early(const EarlyReads& e, const void* operand) {
  if (blockIdx.x >= e.blocks || threadIdx.x != 0 || operand == nullptr) return;
  const char* const from = static_cast<const char*>(operand) + int64_t(blockIdx.x) * e.bytes;
  if constexpr (kKeep)
    ptx::prefetch_to_l2_keeping(from, e.bytes);
  else
    ptx::prefetch_to_l2(from, e.bytes);
}

// By one thread: units `first` to `first + count` of an operand, as far as they are of one row and whole pieces of 16
// bytes; N elements each.
template <class T, int N>
__device__ inline void ask_early(const Rows& operand, const RowUnits& units, uint32_t first, uint32_t count) {
  const Division place = place_of(units, first);
  const uint32_t left = units.per_row.value - place.remainder;
  const uint32_t bytes = (left < count ? left : count) * N * uint32_t(sizeof(T));
  const T* const from = at<const T, N>(operand, place);
  if ((reinterpret_cast<uint64_t>(from) | bytes) % 16 == 0) ptx::prefetch_to_l2_keeping(from, bytes);
}

}  // namespace ingot::tile
