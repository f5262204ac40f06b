#pragma once
// Prefetches the first operands of a grid into L2 while earlier kernels are still ending. All writes of the GPU meet in
// L2, so a prefetched line also receives the earlier kernels' later writes.
#include <algorithm>
#include <cstdint>

#include "ingot/gpu/ptx/prefetch.cuh"
#include "ingot/gpu/tile/row_units.cuh"

namespace ingot::tile {

// The bytes of all operands together: as many as half of an H200's threads load at once, so that the memory is busy
// until the remaining threads have issued their loads. More would delay the preceding kernel: 8 MB lose the gain of 4
// MB.
constexpr int64_t kEarlyBytes = int64_t(4) << 20;

// The number of prefetching blocks, where each block reads `bytes` bytes.
constexpr uint32_t early_blocks(int64_t bytes_of_block) { return uint32_t(kEarlyBytes / bytes_of_block); }

// The first `blocks` blocks prefetch `bytes` each of an operand without gaps. The assignment of bytes to blocks does
// not matter.
struct EarlyReads {
  uint32_t blocks = 0, bytes = 0;
};
// For a grid reading `operands` operands of `operand_bytes` bytes each, in order.
inline EarlyReads early_reads(int64_t operand_bytes, int64_t grid, int operands = 1) {
  const int64_t bytes = operand_bytes / grid / 16 * 16;
  if (bytes == 0) return {};
  return {uint32_t(std::min<int64_t>(grid, early_blocks(bytes * operands))), uint32_t(bytes)};
}
// kKeep: the kernel loads the operand with the hint to keep it in L2.
template <bool kKeep> __device__ inline void ask_early(const EarlyReads& e, const void* operand) {
  if (blockIdx.x >= e.blocks || threadIdx.x != 0 || operand == nullptr) return;
  const char* const from = static_cast<const char*>(operand) + int64_t(blockIdx.x) * e.bytes;
  if constexpr (kKeep)
    ptx::prefetch_to_l2_keeping(from, e.bytes);
  else
    ptx::prefetch_to_l2(from, e.bytes);
}

// Called by a single thread. Prefetches the units `first` to `first + count` of an operand (N elements each), as far as
// these lie in a single row and are whole pieces of 16 bytes.
template <class T, int N>
__device__ inline void ask_early(const Rows& operand, const RowUnits& units, uint32_t first, uint32_t count) {
  const Division place = place_of(units, first);
  const uint32_t left = units.per_row.value - place.remainder;
  const uint32_t bytes = (left < count ? left : count) * N * uint32_t(sizeof(T));
  const T* const from = at<const T, N>(operand, place);
  if ((reinterpret_cast<uint64_t>(from) | bytes) % 16 == 0) ptx::prefetch_to_l2_keeping(from, bytes);
}

}  // namespace ingot::tile
