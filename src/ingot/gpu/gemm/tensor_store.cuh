#pragma once
// The results of Hopper's form of the core: a warp passes its 16 rows through its own panels of shared memory to tensor
// copies, and waits for no further warps.
#include <cstdint>

#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tma_map.h"

namespace ingot::gemm {

// The box of WarpStore's tensor maps, and two kinds of maps: for rows that are whole multiples of 16 bytes, and for
// rows with padding at their end, where the padding is written, too (operands.h).
template <class T>
constexpr gpu::TmaBox kStoreBox{.rows = kWarpRows, .cols = 128 / int(sizeof(T)), .swizzle = tile::Swizzle::b128};
template <class T> CUtensorMap store_map(const char* name, const Tensor& t) {
  check_whole_rows(name, t);
  return gpu::tensor_map(name, as_bank(t), kStoreBox<T>);
}
template <class T> CUtensorMap padded_store_map(const char* name, const Tensor& t) {
  check_padded_rows(name, t);
  return gpu::tensor_map(name, as_bank(t), kStoreBox<T>);
}
// For panels written by write_turned: the mirror image of a tile of a symmetric product.
constexpr gpu::TmaBox kTurnedBox{.rows = 64, .cols = kWarpRows, .swizzle = tile::Swizzle::b32};

// A warp's panels, used in turn: while the copy engine reads one panel, the warp writes the next panel.
template <int kPanels = 2> class WarpStore {
 public:
  __device__ __forceinline__ explicit WarpStore(WarpStaging<kPanels>& s) : panels_(ptx::shared_address(&s)) {}

  // 64 columns of 16 bits: pairs[2 * j] holds columns 8 * j + 2 * (lane % 4), + 1 of row lane / 4, pairs[2 * j + 1] the
  // same columns of row lane / 4 + 8: the fragment's order.
  __device__ __forceinline__ void write(const uint32_t (&pairs)[16]) {
    begin();
    const uint32_t to = panel() + tile::swizzled<tile::Swizzle::b128>(lane() % 16, lane() / 16 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::stmatrix(to ^ (i * 32), {pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]});
  }
  // 32 columns of fp32, in the fragment's order.
  __device__ __forceinline__ void write(const float (&d)[16]) {
    begin();
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::store_shared(panel() + tile::swizzled<tile::Swizzle::b128>(lane() / 4 + 8 * half, 32 * j + lane() % 4 * 8),
                          {__float_as_uint(d[4 * j + 2 * half]), __float_as_uint(d[4 * j + 2 * half + 1])});
  }
  // Writes the same elements transposed: a panel of 64 rows x 16 columns, for a map of kTurnedBox.
  __device__ __forceinline__ void write_turned(const uint32_t (&pairs)[16]) {
    begin();
    const uint32_t to = panel() + tile::swizzled<tile::Swizzle::b32>(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::stmatrix_trans(to + i * 512, {pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]});
  }
  // Reorders 64 columns of 16 bits read by an epilogue, from rows in memory order (load_panel) to the fragment's order.
  // The panel is free to be written again.
  __device__ __forceinline__ void arrange(const uint32_t (&chunks)[4][4], uint32_t (&pairs)[16]) {
    begin();
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      ptx::store_shared(panel() + tile::swizzled<tile::Swizzle::b128>(lane() / 8 + 4 * i, lane() % 8 * 16), chunks[i]);
    __syncwarp();
    const uint32_t from = panel() + tile::swizzled<tile::Swizzle::b128>(lane() % 16, lane() / 16 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t of_columns[4];
      ptx::ldmatrix(of_columns, from ^ (i * 32));
#pragma unroll
      for (int j = 0; j < 4; ++j) pairs[4 * i + j] = of_columns[j];
    }
  }
  // Stores the panel at (row, column) of the map's tensor, or adds the panel; parts beyond the tensor's edges are
  // dropped.
  __device__ __forceinline__ void send(const CUtensorMap* map, uint32_t column, uint32_t row, uint32_t batch,
                                       bool add = false) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane() == 0) {
      const void* const from = __cvta_shared_to_generic(panel());
      if (add)
        ptx::tensor_add_3d(map, int(column), int(row), int(batch), from);
      else
        ptx::tensor_store_3d(map, int(column), int(row), int(batch), from);
      ptx::bulk_commit_group();
    }
    next_ = next_ + 1 == kPanels ? 0 : next_ + 1;
  }
  // The same for a panel of write_turned(), whose map has kTurnedBox: 64 rows from `row` on, 16 columns.
  __device__ __forceinline__ void send_turned(const CUtensorMap* map, uint32_t column, uint32_t row, uint32_t batch) {
    send(map, column, row, batch);
  }
  // Shared memory must live until the copies have read the panels.
  __device__ __forceinline__ void end() {
    if (lane() == 0) ptx::bulk_wait_group_read<0>();
  }

 private:
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ uint32_t panel() const { return panels_ + next_ * kWarpPanelBytes; }
  __device__ __forceinline__ void begin() {
    if (lane() == 0) ptx::bulk_wait_group_read<kPanels - 1>();
    __syncwarp();
  }
  uint32_t panels_, next_ = 0;
};

// A warp's panels of a tile of 128 columns, read from one tensor and written to another of the same shape: the copy
// engine brings the old contents during the tile's products, the epilogue changes the panels in place, and the engine
// stores them. Both row blocks of a warpgroup have panels of their own.
class WarpExchange {
 public:
  static constexpr bool kRequests = true;  // the reads start ahead, at request()
  static constexpr int kBlocks = 2, kPanels = 2;
  struct Memory {
    WarpStaging<kBlocks * kPanels> of[kConsumerWarps];
    uint64_t arrived[kConsumerWarps][kBlocks];
  };

  __device__ __forceinline__ WarpExchange(Memory& m, uint32_t warp)
      : panels_(ptx::shared_address(&m.of[warp])), arrived_(m.arrived[warp]) {
    if (lane() < kBlocks) ptx::mbarrier_init(arrived_ + lane(), 1);
    ptx::fence_mbarrier_init();
    __syncwarp();
  }
  // Starts the reads of the block of rows at `at`, once the panels of the tile before have been stored.
  __device__ __forceinline__ void request(const CUtensorMap* from, const WarpAt& at) {
    if (lane() != 0) return;
    const uint32_t block = at.row / 64 % kBlocks;
    ptx::bulk_wait_group_read<0>();
    ptx::mbarrier_arrive_expect_tx(arrived_ + block, kPanels * kWarpPanelBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      ptx::tensor_load_3d(__cvta_shared_to_generic(panels_ + (block * kPanels + panel) * kWarpPanelBytes), from,
                          int(at.column) + panel * 64, int(at.row), int(at.batch), arrived_ + block);
  }
  // Waits for the contents requested for `at`.
  __device__ __forceinline__ void await(const CUtensorMap*, const WarpAt& at) {
    const uint32_t block = at.row / 64 % kBlocks;
    tile::wait_warp_or_trap(arrived_ + block, phases_ >> block & 1);
    phases_ ^= 1u << block;
    block_ = panels_ + block * kPanels * kWarpPanelBytes;
  }
  // 64 columns in the fragment's order (WarpStore::write).
  __device__ __forceinline__ void take(int panel, uint32_t (&pairs)[16]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t of_columns[4];
      ptx::ldmatrix(of_columns, place(panel) ^ (i * 32));
#pragma unroll
      for (int j = 0; j < 4; ++j) pairs[4 * i + j] = of_columns[j];
    }
  }
  // Writes the panel's place at `at` of another tensor.
  __device__ __forceinline__ void send(const uint32_t (&pairs)[16], int panel, const CUtensorMap* to,
                                       const WarpAt& at) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::stmatrix(place(panel) ^ (i * 32), {pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]});
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane() != 0) return;
    ptx::tensor_store_3d(to, int(at.column) + panel * 64, int(at.row), int(at.batch),
                         __cvta_shared_to_generic(block_ + panel * kWarpPanelBytes));
    ptx::bulk_commit_group();
  }
  __device__ __forceinline__ void end() {
    if (lane() == 0) ptx::bulk_wait_group_read<0>();
  }

 private:
  static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ uint32_t place(int panel) const {
    return block_ + panel * kWarpPanelBytes + tile::swizzled<tile::Swizzle::b128>(lane() % 16, lane() / 16 * 16);
  }
  uint32_t panels_, block_ = 0, phases_ = 0;
  uint64_t* arrived_;
};

}  // namespace ingot::gemm
