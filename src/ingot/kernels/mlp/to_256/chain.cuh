#pragma once
// The chain of gradients where layers are up to 256 wide: dz_{l-1} = (dz_l W_l) . f'(z_{l-1}) from the top layer down,
// and dx. A pair of blocks takes 256 rows through all layers, each warpgroup 64 of them: a warpgroup's dz is wgmma's A,
// in registers, and the 64 x 256 sums of a product become the next A. Both blocks read the same W_l, 32 rows per stage;
// each fetches half for both. h_{l-1} is loaded into shared memory; the dz computed with its slopes replaces h in
// place, and is then sent to memory.
#include <type_traits>

#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/kernels/mlp/parts/slopes.cuh"
#include "ingot/kernels/mlp/to_256/memory.cuh"

namespace ingot::cuda::to_256_backward {

constexpr uint32_t kStagesOfLayer = kWidth / kStageRows;
constexpr uint32_t kSteps = kWidth / 16;  // of 16 columns

// The uses of a tile's buffer, in order: dy, the saved values of the last layer, ..., and finally the values that
// become dx.
struct Use {
  const CUtensorMap *from = nullptr, *to = nullptr;
};

template <class T, Slope kSlope> struct ChainBlock {
  Memory& s;
  const Maps& maps;
  const Arguments& a;
  const uint32_t warp = warp_of_block(), lane = threadIdx.x % 32, rank = ptx::cluster_rank();
  const uint32_t group = warp / 4;

  // Calls each(unit) for every unit of this cluster.
  template <class Each> __device__ __forceinline__ void each_unit(Each&& each) const {
    for (int unit = int(ptx::cluster_index()); unit < a.units; unit += int(gridDim.x) / kPair) each(unit);
  }
  // Calls each(layer, stage of the ring, its phase, number in the layer) for all stages of the ring of weights.
  template <class Each> __device__ __forceinline__ void each_stage(Each&& each) const {
    tile::RingCursor<kStages> at;
    each_unit([&](int) {
      for (int l = a.layers - 1; l >= a.lowest; --l)
        for (uint32_t i = 0; i < kStagesOfLayer; ++i, at.advance()) each(l, at.stage, at.phase, i);
    });
  }

  // Called by a single thread.
  __device__ void prepare() {
    for (uint32_t i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&s.w_full[i], 1);
      ptx::mbarrier_init(&s.w_empty[i], kReaders);
    }
    for (int g = 0; g < kGroups; ++g)
      for (uint32_t i = 0; i < kHalves; ++i) {
        ptx::mbarrier_init(&s.tile_full[g][i], 1);
        ptx::mbarrier_init(&s.tile_done[g][i], 4);
      }
    ptx::prefetch_tensor_map(&maps.dy);
    for (int l = a.lowest; l < a.layers; ++l) ptx::prefetch_tensor_map(&maps.w[l]);
    for (int number = 1; number < uses(); ++number) {
      const Use use = use_of(number);
      if (use.from != nullptr) ptx::prefetch_tensor_map(use.from);
      if (use.to != nullptr) ptx::prefetch_tensor_map(use.to);
    }
  }

  // --- each called by a single thread

  __device__ void load_weights() {
    each_stage([&](int l, uint32_t stage, uint32_t phase, uint32_t i) {
      uint64_t* const full = &s.w_full[stage];
      wait_or_trap(&s.w_empty[stage], phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, uint32_t(sizeof(s.chain.w[stage])));
      load_for_pair(s.chain.w[stage], maps.w[l], int(i * kStageRows), full, rank);
    });
  }

  __device__ Use use_of(int number) const {
    if (number == 0) return {&maps.dy, nullptr};
    const int l = a.layers - number - (a.activate_last ? 0 : 1);  // whose values arrive, and whose dz is sent
    if (l < 0) return {nullptr, &maps.dx};
    return {&maps.h[l], a.layer[l].keeps_dz ? &maps.dz[l] : nullptr};
  }
  __device__ int uses() const { return 1 + a.activate_last + a.layers - a.lowest; }
  __device__ void load_half(const Use& use, int g, uint32_t half, int row) {
    if (use.from == nullptr) return ptx::mbarrier_arrive(&s.tile_full[g][half]);
    ptx::mbarrier_arrive_expect_tx(&s.tile_full[g][half], uint32_t(sizeof(s.chain.tile[g]) / kHalves));
    for (uint32_t p = half * 2; p < half * 2 + 2; ++p)
      ptx::tensor_load(s.chain.tile[g][p], use.from, int(p) * kMlpPanel, row, &s.tile_full[g][half]);
  }
  // Sends the warpgroup's results of this half; `n` is the number of this use of the buffer.
  __device__ void store_half(const Use& use, int g, uint32_t half, int row, uint32_t n) {
    wait_or_trap(&s.tile_done[g][half], n & 1);
    if (use.to != nullptr)
      for (uint32_t p = half * 2; p < half * 2 + 2; ++p)
        ptx::tensor_store(use.to, int(p) * kMlpPanel, row, s.chain.tile[g][p]);
    ptx::bulk_commit_group();
  }
  __device__ void move_tiles() {
    uint32_t n = 0;
    Use before;
    int row_before = 0;
    const auto store = [&](int g, uint32_t half) { store_half(before, g, half, row_before + g * kGroupRows, n - 1); };
    each_unit([&](int unit) {
      const int row = (unit * kPair + int(rank)) * kGroups * kGroupRows;
      for (int i = 0; i < uses(); ++i, ++n) {
        const Use now = use_of(i);
        for (int g = 0; g < kGroups; ++g) {
          if (n > 0) store(g, 0), store(g, 1);
          ptx::bulk_wait_group_read<1>();
          load_half(now, g, 0, row + g * kGroupRows);
          ptx::bulk_wait_group_read<0>();
          load_half(now, g, 1, row + g * kGroupRows);
        }
        before = now, row_before = row;
      }
    });
    if (n > 0)
      for (int g = 0; g < kGroups; ++g) store(g, 0), store(g, 1);
    ptx::bulk_wait_group<0>();
    ptx::fence_proxy_async();  // orders these completed copies before later reads of the results
  }

  // --- the products, by a warpgroup

  tile::RingCursor<kStages> w_at = {};
  uint32_t use = 0;  // number of uses of the tile's buffer before this one

  // Where this lane's ldmatrix and stmatrix find 16 columns of its warp's 16 rows: step i, in the layout of A.
  __device__ __forceinline__ uint32_t place(uint32_t i) const {
    const uint32_t panel = ptx::shared_address(s.chain.tile[group][i / 4]);
    return panel + tile::swizzled<Swizzle::b128>(warp % 4 * 16 + lane % 16, i % 4 * 32 + lane / 16 * 16);
  }
  __device__ __forceinline__ void wait_for_half(uint32_t half) const {
    wait_warp_or_trap(&s.tile_full[group][half], use & 1);
  }
  __device__ __forceinline__ void finish_half(uint32_t half) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&s.tile_done[group][half]);
    __syncwarp();
  }
  // Calls step(i) for the steps of the arrived tile, which is then sent to memory, half by half.
  template <class Step> __device__ __forceinline__ void each_step(Step&& step) {
#pragma unroll
    for (uint32_t half = 0; half < kHalves; ++half) {
      wait_for_half(half);
#pragma unroll
      for (uint32_t i = half * kSteps / 2; i < (half + 1) * kSteps / 2; ++i) step(i);
      ptx::fence_proxy_async_shared();
      finish_half(half);
    }
    ++use;
  }
  // A = dz of the top layer.
  __device__ __forceinline__ void enter(uint32_t (&dz)[kSteps][4]) {
#pragma unroll
    for (uint32_t half = 0; half < kHalves; ++half) {
      wait_for_half(half);
#pragma unroll
      for (uint32_t i = half * kSteps / 2; i < (half + 1) * kSteps / 2; ++i) ptx::ldmatrix(dz[i], place(i));
      finish_half(half);
    }
    ++use;
    if (!a.activate_last) return;
    each_step([&](uint32_t i) {
      uint32_t h[4];
      ptx::ldmatrix(h, place(i));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float slope[2], d[2];
        slopes_at<T, kSlope>(h[e], a.number, slope);
        ptx::unpack(T{}, dz[i][e], d[0], d[1]);
        dz[i][e] = ptx::pack(T{}, d[0] * slope[0], d[1] * slope[1]);
      }
      ptx::stmatrix(place(i), dz[i]);
    });
  }
  // The products of a warpgroup run while the second warpgroup computes slopes.
  __device__ __forceinline__ void hand_over() const { ptx::barrier_arrive(1 + (group ^ 1), 128 * kGroups); }
  __device__ __forceinline__ void multiply(float (&sums)[kWidth / 2], const uint32_t (&dz)[kSteps][4]) {
    ptx::barrier_sync(1 + group, 128 * kGroups);
    uint32_t before = 0;
#pragma unroll
    for (uint32_t i = 0; i < kStagesOfLayer; ++i) {
      const uint32_t stage = w_at.stage;
      wait_warp_or_trap(&s.w_full[stage], w_at.phase);
      const uint32_t w = ptx::shared_address(s.chain.w[stage]);
      ptx::wgmma_fence();
#pragma unroll
      for (uint32_t k = 0; k < kStageRows; k += 16)
        ptx::wgmma<T, kWidth, Major::mn>(sums, dz[(i * kStageRows + k) / 16],
                                         operand<Major::mn, Swizzle::b128>(w, k, kStageRows * 128), i + k > 0);
      ptx::wgmma_commit_group();
      if (i > 0) {
        ptx::wgmma_wait_group<1>();
        release_to_pair(&s.w_empty[before], lane);
      }
      before = stage;
      w_at.advance();
    }
    hand_over();
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(sums);
    release_to_pair(&s.w_empty[before], lane);
  }
  // The next A and the data for memory: the sums of the product with W of layer l times slopes, or dx.
  template <bool kSlopes>
  __device__ __forceinline__ void finish(const float (&sums)[kWidth / 2], uint32_t (&dz)[kSteps][4]) {
    each_step([&](uint32_t i) {
      uint32_t h[4], out[4];
      if constexpr (kSlopes) ptx::ldmatrix(h, place(i));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float slope[2] = {1, 1};
        if constexpr (kSlopes) slopes_at<T, kSlope>(h[e], a.number, slope);
        out[e] = ptx::pack(T{}, sums[8 * i + 2 * e] * slope[0], sums[8 * i + 2 * e + 1] * slope[1]);
        if constexpr (kSlopes) dz[i][e] = out[e];
      }
      ptx::stmatrix(place(i), out);
    });
  }
  __device__ __forceinline__ void run() {
    uint32_t dz[kSteps][4];
    float sums[kWidth / 2];
    if (group == 1) hand_over();
    each_unit([&](int) {
      enter(dz);
#pragma unroll 1
      for (int l = a.layers - 1; l >= a.lowest; --l) {
        multiply(sums, dz);
        if (l > 0)
          finish<true>(sums, dz);
        else
          finish<false>(sums, dz);
      }
    });
    if (group == 0) ptx::barrier_sync(1, 128 * kGroups);  // the last turn of this warpgroup
  }

  // The loop of the warps that do not multiply.
  __device__ __forceinline__ void serve() {
    if (warp == kGroupWarps && lane == 0) load_weights();
    if (warp == kGroupWarps + 1 && lane == 0) move_tiles();
    if (warp == kGroupWarps + 2 && int(lane) <= a.layers * kPair) mark_counter(a.counter + lane);
    __syncwarp();
  }
};

}  // namespace ingot::cuda::to_256_backward
