#pragma once
// The chain of gradients where layers are up to 512 wide: dz_{l-1} = (dz_l W_l) . f'(z_{l-1}) from the top layer down,
// and dx. A pair of blocks takes 256 rows through all layers, each warpgroup 64 of them. The dz of the layer above is
// wgmma's A and lies in shared memory, 64 KB. A warpgroup computes half of the columns of dz W, multiplies them by the
// slopes and keeps them packed in registers until the product of the other columns has read the last of A. Both halves
// then replace A, and are then sent to memory. W and h, the source of slopes, pass through a single ring in the order
// of their use. Both blocks read the same W; each fetches half for both.
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/kernels/mlp/parts/slopes.cuh"
#include "ingot/kernels/mlp/to_512/halves.cuh"
#include "ingot/kernels/mlp/to_512/panels.cuh"

namespace ingot::cuda::to_512_backward {

constexpr uint32_t kGroupWarps = 4 * kGroups;
constexpr uint32_t kPanelBytes = kGroupRows * 128, kSlotPanelBytes = kSlotRows * 128;
constexpr uint32_t kSlotBytes = kGroups * kPanelBytes;  // a panel of h for every warpgroup; or rows of W
constexpr int kChainThreads = kGroups * 128 + 128;

template <class Cut> struct ChainMemory {
  static constexpr uint32_t kPanels = Cut::kPanels, kTileBytes = kPanels * kPanelBytes;
  static constexpr uint32_t kSlots = (uint32_t(kMlpSharedBytes) - kGroups * kTileBytes - 512) / kSlotBytes;
  static_assert(Cut::kHalfPanels * kSlotPanelBytes <= kSlotBytes, "a slot holds W or h");

  alignas(1024) uint8_t tile[kGroups][kPanels][kPanelBytes];  // dz
  uint8_t slot[kSlots][kSlotBytes];
  uint64_t full[kSlots], empty[kSlots];
  uint64_t tile_full[kGroups][kPanels];                // dy has arrived
  uint64_t tile_done[kGroups][2], tile_free[kGroups];  // half of dz is ready to be sent; all of dz has been read
};

__device__ __forceinline__ int panels_of(int width) { return (width + kMlpPanel - 1) / kMlpPanel; }
__device__ __forceinline__ int slots_of(int width) { return (width + kSlotRows - 1) / kSlotRows; }

template <class T, Slope kSlope, class Cut> struct ChainBlock {
  using Memory = ChainMemory<Cut>;
  static constexpr int kHalf = Cut::kHalf, kHalfPanels = Cut::kHalfPanels;
  static constexpr uint32_t kSlots = Memory::kSlots, kPanels = Memory::kPanels;
  static constexpr int kMultiplyRegisters = 232, kServeRegisters = 40;  // of a thread
  static_assert(sizeof(Memory) <= size_t(kMlpSharedBytes), "the chain must fit the shared memory");

  Memory& s;
  const MlpChainMaps& maps;
  const Chain& a;
  const uint32_t warp = warp_of_block(), lane = threadIdx.x % 32, rank = ptx::cluster_rank();
  const uint32_t group = warp / 4;

  // Calls each(first row of this block) for every unit of this cluster.
  template <class Each> __device__ __forceinline__ void each_unit(Each&& each) const {
    for (int unit = int(ptx::cluster_index()); unit < a.units; unit += int(gridDim.x) / kPair)
      each((unit * kPair + int(rank)) * groups() * kGroupRows);
  }
  __device__ int groups() const { return a.groups; }
  __device__ int top() const { return a.layers - 1; }

  // Called by a single thread.
  __device__ void prepare() {
    for (uint32_t i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(&s.full[i], 1);
      ptx::mbarrier_init(&s.empty[i], 4 * uint32_t(groups()) * kPair);
    }
    for (int g = 0; g < kGroups; ++g) {
      for (uint32_t p = 0; p < kPanels; ++p) ptx::mbarrier_init(&s.tile_full[g][p], 1);
      for (int half = 0; half < 2; ++half) ptx::mbarrier_init(&s.tile_done[g][half], 4);
      ptx::mbarrier_init(&s.tile_free[g], 1);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&maps.dy);
    for (int l = a.lowest; l < a.layers; ++l) ptx::prefetch_tensor_map(&maps.w[l]);
  }

  // --- each called by a single thread

  tile::RingCursor<kSlots> at = {};

  __device__ __forceinline__ uint64_t* next_slot(uint32_t bytes) {
    uint64_t* const full = &s.full[at.stage];
    wait_or_trap(&s.empty[at.stage], at.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, bytes);
    return full;
  }
  __device__ void load_values(int l, int column, int row) {
    uint64_t* const full = next_slot(uint32_t(groups()) * kPanelBytes);
    for (int g = 0; g < groups(); ++g)
      ptx::tensor_load(s.slot[at.stage] + g * kPanelBytes, &maps.h[l], column, row + g * kGroupRows, full);
    at.advance();
  }
  __device__ void fill_ring() {
    each_unit([&](int row) {
      if (a.activate_last)
#pragma unroll 1
        for (int p = 0; p < panels_of(a.layer[top()].n); ++p) load_values(top(), p * kMlpPanel, row);
      for (int l = top(); l >= a.lowest; --l)
        for (int half = 0; half < Cut::halves_of(a.layer[l].k); ++half) {
          for (int i = 0; i < slots_of(a.layer[l].n); ++i) {
            uint64_t* const full = next_slot(kHalfPanels * kSlotPanelBytes);
            load_for_pair<Cut, kSlotRows>(s.slot[at.stage], maps.w[l], half * kHalf, i * kSlotRows, full, rank);
            at.advance();
          }
#pragma unroll 1
          for (int p = 0; p < kHalfPanels && l > 0; ++p) load_values(l - 1, half * kHalf + p * kMlpPanel, row);
        }
    });
  }
  // The destination of the tile's contents, if any: dx, or dz of layer l.
  __device__ const CUtensorMap* destination(int l) const {
    if (l < 0) return &maps.dx;
    return a.layer[l].keeps_dz ? &maps.dz[l] : nullptr;
  }
  __device__ void load_panel(uint32_t g, int p, int row) {
    ptx::mbarrier_arrive_expect_tx(&s.tile_full[g][p], kPanelBytes);
    ptx::tensor_load(s.tile[g][p], &maps.dy, p * kMlpPanel, row, &s.tile_full[g][p]);
  }
  // Loads dy into a warpgroup's tile, and stores the results of each layer from the tile: a panel at a time, because
  // the copies of W would queue behind all copies issued at once. The next unit's dy is loaded after the last panel has
  // been stored.
  __device__ void move_tile(uint32_t g) {
    const int dy_panels = panels_of(a.layer[top()].n), step = int(gridDim.x) * groups() * kGroupRows,
              end = a.units * kPair * groups() * kGroupRows;
    uint32_t lower = 0, upper = 0;  // phases of the halves' barriers
    const auto send = [&](const CUtensorMap* to, int width, int row, int next_row) {
#pragma unroll 1
      for (int p = 0; p < panels_of(width); ++p) {
        if (p == 0) wait_or_trap(&s.tile_done[g][0], lower), lower ^= 1;
        if (p == kHalf / kMlpPanel && width > kHalf) wait_or_trap(&s.tile_done[g][1], upper), upper ^= 1;
        if (to != nullptr) {
          ptx::tensor_store(to, p * kMlpPanel, row, s.tile[g][p]);
          ptx::bulk_commit_group();
          ptx::bulk_wait_group_read<0>();
        }
        if (next_row >= 0 && p < dy_panels) load_panel(g, p, next_row);
      }
#pragma unroll 1
      for (int p = panels_of(width); p < dy_panels && next_row >= 0; ++p) load_panel(g, p, next_row);
      ptx::mbarrier_arrive(&s.tile_free[g]);
    };
    bool first = true;
    each_unit([&](int block_row) {
      const int row = block_row + int(g) * kGroupRows;
      if (first)
#pragma unroll 1
        for (int p = 0; p < dy_panels; ++p) load_panel(g, p, row);
      first = false;
      const int next_row = block_row + step < end ? row + step : -1;
      if (a.activate_last) send(destination(top()), a.layer[top()].n, row, a.lowest == a.layers ? next_row : -1);
      for (int l = top(); l >= a.lowest; --l)
        send(destination(l - 1), a.layer[l].k, row, l == a.lowest ? next_row : -1);
    });
    ptx::bulk_wait_group<0>();
  }

  // --- a warpgroup

  uint32_t units_before = 0, sent = 0;

  __device__ __forceinline__ void sync_group() const { ptx::barrier_sync(1 + group, 128); }
  // Where this lane's ldmatrix and stmatrix find 16 columns of its warp's 16 rows: step i of a panel. Steps are 32
  // bytes apart, a distance unchanged by the swizzle.
  __device__ __forceinline__ uint32_t place(uint32_t panel, uint32_t i) const {
    return (panel + tile::swizzled<Swizzle::b128>(warp % 4 * 16 + lane % 16, lane / 16 * 16)) ^ (i * 32);
  }
  __device__ __forceinline__ uint32_t tile_panel(int p) const { return ptx::shared_address(s.tile[group][p]); }

  // h of the next panel in the ring.
  __device__ __forceinline__ void take_values(uint32_t (&h)[4][4]) {
    wait_warp_or_trap(&s.full[at.stage], at.phase);
    const uint32_t panel = ptx::shared_address(s.slot[at.stage]) + group * kPanelBytes;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) ptx::ldmatrix(h[i], place(panel, i));
    ptx::fence_proxy_async_shared();
    release_to_pair(&s.empty[at.stage], lane);
    at.advance();
  }
  // Turns dy into dz of the top layer, an activated layer, and into A.
  __device__ __forceinline__ void enter() {
    const int panels = panels_of(a.layer[top()].n);
#pragma unroll 1
    for (int p = 0; p < panels; ++p) {
      uint32_t h[4][4];
      wait_warp_or_trap(&s.tile_full[group][p], units_before & 1);
      take_values(h);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        uint32_t dz[4];
        ptx::ldmatrix(dz, place(tile_panel(p), i));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float d[2], slope[2];
          ptx::unpack(T{}, dz[e], d[0], d[1]);
          slopes_at<T, kSlope>(h[i][e], a.number, slope);
          dz[e] = ptx::pack(T{}, d[0] * slope[0], d[1] * slope[1]);
        }
        ptx::stmatrix(place(tile_panel(p), i), dz);
      }
    }
    hand_over(0);
    if (a.layer[top()].n > kHalf) hand_over(1);
    ++sent;
    sync_group();
  }
  // sums = dz W for half of W's columns.
  __device__ __forceinline__ void multiply(float (&sums)[kHalf / 2], int l) {
    const int slots = slots_of(a.layer[l].n);
    const uint32_t tile = tile_panel(0);
    uint32_t before = 0;
#pragma unroll 1
    for (int i = 0; i < slots; ++i) {
      if (l == top() && i % 2 == 0) wait_warp_or_trap(&s.tile_full[group][i / 2], units_before & 1);
      wait_warp_or_trap(&s.full[at.stage], at.phase);
      const uint32_t w = ptx::shared_address(s.slot[at.stage]);
      const uint32_t dz = tile + uint32_t(i) / 2 * kPanelBytes + uint32_t(i) % 2 * (kSlotRows * 2);
      ptx::wgmma_fence();
#pragma unroll
      for (uint32_t k = 0; k < kSlotRows; k += 16)
        ptx::wgmma<T, kHalf, Major::k, Major::mn>(sums, operand<Major::k, Swizzle::b128>(dz, k),
                                                  operand<Major::mn, Swizzle::b128>(w, k, kSlotPanelBytes), i + k > 0);
      ptx::wgmma_commit_group();
      if (i > 0) {
        ptx::wgmma_wait_group<1>();
        release_to_pair(&s.empty[before], lane);
      }
      before = at.stage;
      at.advance();
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(sums);
    release_to_pair(&s.empty[before], lane);
  }
  // The number of columns in panel p of a half.
  static constexpr int columns_of(int p) { return p < kHalf / kMlpPanel ? kMlpPanel : kHalf % kMlpPanel; }
  // The sums of a half's panel p times slopes, or dx, packed.
  template <bool kSlopes>
  __device__ __forceinline__ void form_panel(const float (&sums)[kHalf / 2], int p, uint32_t (&dz)[4][4]) {
    uint32_t h[4][4];
    if constexpr (kSlopes) take_values(h);
#pragma unroll
    for (uint32_t i = 0; i < uint32_t(columns_of(p)) / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float slope[2] = {1, 1};
        if constexpr (kSlopes) slopes_at<T, kSlope>(h[i][e], a.number, slope);
        const uint32_t j = 32 * uint32_t(p) + 8 * i + 2 * e;
        dz[i][e] = ptx::pack(T{}, sums[j] * slope[0], sums[j + 1] * slope[1]);
      }
  }
  __device__ __forceinline__ void put_panel(int half, int p, const uint32_t (&dz)[4][4]) const {
#pragma unroll
    for (int i = 0; i < columns_of(p) / 16; ++i) {
      const int at = half * kHalf / 16 + 4 * p + i;
      ptx::stmatrix(place(tile_panel(at / 4), at % 4), dz[i]);
    }
  }
  // Waits until the tile may be written: its products have ended, and the copies from the tile have been read.
  __device__ __forceinline__ void claim_tile() const {
    wait_warp_or_trap(&s.tile_free[group], (sent & 1) ^ 1);
    sync_group();
  }
  // Half of the tile is written and may be sent to memory.
  __device__ __forceinline__ void hand_over(uint32_t half) const {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&s.tile_done[group][half]);
  }
  // The tile is complete and can be read by the next product.
  __device__ __forceinline__ void end_tile() {
    sync_group();
    ++sent;
  }
  template <bool kSlopes> __device__ __forceinline__ void pass_layer(float (&sums)[kHalf / 2], int l) {
    uint32_t dz[kHalfPanels][4][4];
    multiply(sums, l);
#pragma unroll
    for (int p = 0; p < kHalfPanels; ++p) form_panel<kSlopes>(sums, p, dz[p]);
    const auto put_first_half = [&] {
      claim_tile();
#pragma unroll
      for (int p = 0; p < kHalfPanels; ++p) put_panel(0, p, dz[p]);
      hand_over(0);
    };
    if (a.layer[l].k > kHalf) {
      multiply(sums, l);
      put_first_half();
#pragma unroll
      for (int p = 0; p < kHalfPanels; ++p) {
        form_panel<kSlopes>(sums, p, dz[0]);
        put_panel(1, p, dz[0]);
      }
      hand_over(1);
    } else {
      put_first_half();
    }
    end_tile();
  }
  __device__ __forceinline__ void run() {
    float sums[kHalf / 2];
    each_unit([&](int) {
      if (a.activate_last) enter();
#pragma unroll 1
      for (int l = top(); l >= a.lowest; --l) {
        if (l > 0)
          pass_layer<true>(sums, l);
        else
          pass_layer<false>(sums, l);
      }
      ++units_before;
    });
  }
};

template <class T, Slope kSlope, class Cut>
__global__ void __launch_bounds__(kChainThreads, 1)
    chain_kernel(const __grid_constant__ MlpChainMaps maps, const __grid_constant__ Chain a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  using Block = ChainBlock<T, kSlope, Cut>;
  Block block{*reinterpret_cast<ChainMemory<Cut>*>(memory), maps, a};
  if (threadIdx.x == 0) block.prepare();
  __syncwarp();
  ptx::wait_for_earlier_kernels();
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.counter = 0;
  tile::sync_cluster();  // the neighbour's barriers are ready
  if (block.warp < kGroupWarps) {
    ptx::increase_registers<Block::kMultiplyRegisters>();
    if (int(block.group) < block.groups()) block.run();
  } else {
    ptx::decrease_registers<Block::kServeRegisters>();
    if (block.warp == kGroupWarps && block.lane == 0) block.fill_ring();
    const uint32_t mover = block.warp - kGroupWarps - 1;
    if (mover < uint32_t(block.groups()) && block.lane == 0) block.move_tile(mover);
    __syncwarp();
  }
  tile::sync_cluster();  // the neighbour may still write to this block's memory, or report the end of its reads
}

template <class T, int kHalf>
void launch_chain(const MlpChainMaps& maps, const Chain& a, const ChainLaunch& at, Stream stream) {
  with_slope_kind(at.slope, [&](auto slope) {
    gpu::launch("mlp_backward", chain_kernel<T, slope(), Cut<kHalf>>,
                {.grid = int64_t(at.clusters) * kPair,
                 .block = kChainThreads,
                 .smem = sizeof(ChainMemory<Cut<kHalf>>),
                 .cluster = kPair,
                 .overlap = true,
                 .device = at.device},
                stream, maps, a);
  });
}

}  // namespace ingot::cuda::to_512_backward
