#pragma once
// Shared code of the kernels for few rows up to 512 wide. A cluster of 2, 4 or 8 blocks takes 64 rows. The outputs of a
// layer are divided into panels of 64 columns; each block computes a panel per warpgroup, so each SM loads only a part
// of W. A panel is copied to the shared memory of every block of the cluster. There are two sets of panels, for the
// inputs of a product and for its results. W passes through a ring, with a part for each warpgroup.
#include <cuda.h>

#include <cstdint>

#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/kernels/mlp/forms.h"

namespace ingot::cuda::to_512_cluster {

constexpr uint32_t kRows = 64, kColumns = kMlpPanel;  // of a panel
constexpr uint32_t kPanels = kMlpTo512 / kMlpPanel, kPanelBytes = kRows * 128;
constexpr uint32_t kMostGroups = 4, kSlots = 12;            // of a block; slices of W for all warpgroups together
constexpr uint32_t kSliceBytes = kMlpPanel * kColumns * 2;  // 64 rows of W by 64 columns
constexpr int kMostThreads = 128 * (kMostGroups + 1);

struct Memory {
  alignas(1024) char rows[2][kPanels][kPanelBytes];
  char w[kSlots][kSliceBytes];
  float scale[kMostGroups][kColumns];  // of a weight norm
  uint64_t w_full[kSlots], w_empty[kSlots], full[2][kPanels];
};
static_assert(sizeof(Memory) <= size_t(kMlpSharedBytes), "a block must fit the shared memory");

__device__ __forceinline__ uint32_t slices_of(uint32_t width) { return (width + kMlpPanel - 1) / kMlpPanel; }

// A warpgroup's part of the ring, its panel of each layer, and its reading order of the panels: its own panel first,
// then the rest in an order independent of the blocks, so that sums do not depend on the cluster's size.
struct Share {
  uint32_t group, groups, rank, blocks;
  __device__ __forceinline__ uint32_t slots() const { return kSlots / groups; }
  __device__ __forceinline__ uint32_t panel() const { return rank * groups + group; }
  __device__ __forceinline__ bool has(uint32_t width) const { return panel() * kColumns < width; }
  __device__ __forceinline__ uint32_t slice(uint32_t i, uint32_t slices) const {
    const uint32_t at = i + (panel() < slices ? panel() : 0);
    return at < slices ? at : at - slices;
  }
};

struct Slot {
  uint32_t number, phase = 0;
  const uint32_t first, end;
  __device__ __forceinline__ explicit Slot(const Share& of)
      : number(of.group * of.slots()), first(number), end(number + of.slots()) {}
  __device__ __forceinline__ void advance() {
    if (++number == end) number = first, phase ^= 1;
  }
};

// Called by a single thread of every block, before the barrier of the cluster.
__device__ __forceinline__ void prepare(Memory& s) {
  for (uint32_t i = 0; i < kSlots; ++i) {
    ptx::mbarrier_init(&s.w_full[i], 1);
    ptx::mbarrier_init(&s.w_empty[i], 4);
  }
  for (uint32_t i = 0; i < 2 * kPanels; ++i) ptx::mbarrier_init(&s.full[0][i], 1);
  ptx::fence_mbarrier_init();
}

// --- called by a single thread

// Copies 64 x 64 of a matrix from (row, column) on to the next slot.
__device__ __forceinline__ void load_slice(Memory& s, Slot& at, const CUtensorMap& matrix, uint32_t column,
                                           uint32_t row) {
  tile::wait_or_trap(&s.w_empty[at.number], at.phase ^ 1);
  ptx::mbarrier_arrive_expect_tx(&s.w_full[at.number], kSliceBytes);
  ptx::tensor_load(s.w[at.number], &matrix, int(column), int(row), &s.w_full[at.number]);
  at.advance();
}
// Loads the rows for the first product; each block fetches some panels for all blocks.
__device__ __forceinline__ void load_rows(Memory& s, const Share& of, const CUtensorMap& matrix, uint32_t width,
                                          uint32_t tile) {
  const uint32_t panels = slices_of(width);
  for (uint32_t i = 0; i < kPanels; ++i) ptx::mbarrier_arrive_expect_tx(&s.full[0][i], i < panels ? kPanelBytes : 0);
  for (uint32_t i = of.rank; i < panels; i += of.blocks)
    ptx::tensor_load_multicast(s.rows[0][i], &matrix, int(i * kMlpPanel), int(tile * kRows), &s.full[0][i],
                               ptx::multicast_mask(0, of.blocks));
}

// --- a warpgroup; `step`: number of products before this one

__device__ __forceinline__ void sync_group(const Share& of) { ptx::barrier_sync(1 + of.group, 128); }
__device__ __forceinline__ void wait_for_panel(Memory& s, int step, uint32_t panel) {
  tile::wait_warp_or_trap(&s.full[step % 2][panel], step / 2 & 1);
}
__device__ __forceinline__ void release(Memory& s, uint32_t slot) {
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&s.w_empty[slot]);
}
// Announces every panel of every layer to every block, also panels without columns. No block can then be a layer ahead
// of a block still waiting for the layer's input; otherwise a barrier could be two phases ahead of this block.
__device__ __forceinline__ void announce(Memory& s, const Share& of, int step, uint32_t bytes) {
  sync_group(of);
  const uint32_t set = (step + 1) % 2, peer = threadIdx.x % 128;
  if (peer >= of.blocks) return;
  uint64_t* const full = &s.full[set][of.panel()];
  if (peer == of.rank) return ptx::mbarrier_arrive(full);
  const uint32_t there = ptx::cluster_address(full, peer);
  ptx::mbarrier_arrive_expect_tx_remote(there, bytes);
  char* const panel = s.rows[set][of.panel()];
  if (bytes > 0) ptx::bulk_copy_to_cluster(ptx::cluster_address(panel, peer), panel, bytes, there);
}

}  // namespace ingot::cuda::to_512_cluster
