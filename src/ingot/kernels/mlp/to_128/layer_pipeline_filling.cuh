#pragma once
// The layer pipeline's plan and its copies: barriers, W, and each unit's h and dy on their way to shared memory.
#include "ingot/kernels/mlp/to_128/layer_pipeline_block.cuh"

namespace ingot::cuda::layer_pipeline {

template <class T, int kPanels> struct Filling : BlockView<T, kPanels> {
  using View = BlockView<T, kPanels>;
  using View::kWidth, View::kBytes, View::kTogether, View::s, View::maps, View::a, View::plan, View::loads_weights;

  __device__ const CUtensorMap& map_of_h() const { return maps.h[s.plan.layer]; }

  // Called by a single thread. The code is short, as all code at the start of blocks, because all blocks fetch this
  // code at once and wait for the fetch.
  __device__ void initialise() {
    const int cluster = a.cluster > 1 ? int(ptx::cluster_index()) : int(blockIdx.x);
    const uint32_t rank = a.cluster > 1 ? ptx::cluster_rank() : 0;
    Plan& p = s.plan;
    p.rank = rank, p.cluster = cluster;
    p.top = rank == 0, p.bottom = int(rank) + 1 == a.cluster;
    p.entry = p.top && a.entry;
    p.layer = a.layers - int(rank) - (a.entry ? 0 : 1);
    p.sends = !p.bottom || a.want_dx;
    p.units = a.units_each + (cluster < a.units_left);
    // From the last rows to the first, because the last rows stored by a forward pass are still in L2.
    p.row = (a.units_each * a.clusters + a.units_left - 1 - cluster) * kRows, p.row_step = -a.clusters * kRows;
    // The readers of a unit: the warps of the chain, and of dW.
    const uint32_t readers = (p.sends ? 4 * kTogether : 0) + (p.entry ? 0 : 4);
    const uint32_t room = p.bottom ? kTogether : 1;
#pragma unroll 1
    for (uint32_t i = 0; i < kDzSlots; ++i) {
      ptx::mbarrier_init(&s.dz_full[i], 1);
      ptx::mbarrier_init(&s.dz_empty[i], readers);
      for (auto& of_warpgroup : s.out_full) ptx::mbarrier_init(&of_warpgroup[i], 4);
      ptx::mbarrier_init(&s.room[i], room);
    }
#pragma unroll 1
    for (uint32_t i = 0; i < kHSlots; ++i) {
      ptx::mbarrier_init(&s.h_full[i], 1);
      ptx::mbarrier_init(&s.h_empty[i], readers);
    }
    ptx::mbarrier_init(&s.weights_full, 1);
    ptx::mbarrier_init(&s.taken, 1);
    ptx::fence_mbarrier_init();
  }
  // The panels of W's (or v's) inputs are adjacent. Called by a single thread.
  __device__ void start_loading_weights() {
    if (!loads_weights()) return;
    ptx::mbarrier_arrive_expect_tx(&s.weights_full, kPanels * kWidth * 128);
    for (int p = 0; p < kPanels; ++p)
      ptx::tensor_load(s.out[0][0] + p * kWidth * 128, &maps.w[s.plan.layer], p * kPanel, 0, &s.weights_full);
  }

  // No block reads these rows again, and in L2 these rows would displace stored rows of the forward pass that are still
  // to be read.
  static constexpr uint64_t kHint = ptx::kEvictFirst;
  __device__ void load_h(tile::RingCursor<kHSlots> at, int row) {
    ptx::mbarrier_arrive_expect_tx(&s.h_full[at.stage], kBytes);
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      ptx::tensor_load(s.h[at.stage][p], &map_of_h(), p * kPanel, row, &s.h_full[at.stage], kHint);
  }
  __device__ void load_dy(tile::RingCursor<kDzSlots> at, int row) {
    ptx::mbarrier_arrive_expect_tx(&s.dz_full[at.stage], kBytes);
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      ptx::tensor_load(s.dz[at.stage][p], &maps.dy, p * kPanel, row, &s.dz_full[at.stage], kHint);
  }
  // When the copies of the last units have arrived, the block above may end. Called by a single thread.
  __device__ void signal_all_taken() {
    constexpr int kSlots = kDzSlots;
    for (int i = plan().units - 1; i >= 0 && i >= plan().units - kSlots; --i)
      wait_or_trap(&s.dz_full[i % kSlots], uint32_t(i / kSlots) & 1);
    ptx::mbarrier_arrive_remote_relaxed(ptx::cluster_address(&s.taken, plan().rank - 1));
  }
  // Each function is called by a single thread.
  __device__ void fill_h() {
    if (loads_weights()) wait_or_trap(&s.weights_full, 0);
    tile::RingCursor<kHSlots> at;
    int row = plan().row;
    for (int i = 0; i < plan().units; ++i, row += plan().row_step, at.advance()) {
      if (i < kFirstUnits) continue;
      wait_or_trap(&s.h_empty[at.stage], at.phase ^ 1);
      load_h(at, row);
    }
  }
  __device__ void fill_dz() {
    if (plan().top && loads_weights()) wait_or_trap(&s.weights_full, 0);
    tile::RingCursor<kDzSlots> at;
    int row = plan().row;
    for (int i = 0; i < plan().units; ++i, row += plan().row_step, at.advance()) {
      if (plan().top && i < kFirstUnits) continue;
      wait_or_trap(&s.dz_empty[at.stage], at.phase ^ 1);
      if (plan().top) {
        load_dy(at, row);
      } else {
        ptx::mbarrier_arrive_expect_tx(&s.dz_full[at.stage], kBytes);
        ptx::mbarrier_arrive_remote_relaxed(ptx::cluster_address(&s.room[at.stage], plan().rank - 1));
      }
    }
    if (!plan().top) signal_all_taken();
  }
  // Issues the copies that need no started neighbours. Called by a single thread.
  __device__ void start_filling() {
    static_assert(kFirstUnits <= int(kDzSlots) && kFirstUnits <= int(kHSlots));
    tile::RingCursor<kHSlots> at;
    int row = s.plan.row;
#pragma unroll 1
    for (int i = 0; i < s.plan.units && i < kFirstUnits; ++i, row += s.plan.row_step, at.advance()) {
      if (s.plan.top) load_dy({at.stage, 0}, row);
      if (i == 0) start_loading_weights();
      load_h(at, row);
    }
  }
};

}  // namespace ingot::cuda::layer_pipeline
