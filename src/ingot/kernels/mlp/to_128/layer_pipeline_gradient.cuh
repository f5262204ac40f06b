#pragma once
// The layer pipeline's warpgroup for dW, which stays in registers.
#include "ingot/kernels/mlp/to_128/layer_pipeline_block.cuh"

namespace ingot::cuda::layer_pipeline {

template <class T, int kPanels> struct WeightGradient : BlockView<T, kPanels> {
  using View = BlockView<T, kPanels>;
  using View::kWidth, View::s, View::a, View::plan;

  __device__ void hold_dw() {
    float dw[kPanels][kWidth / 2], db[2] = {};
#pragma unroll
    for (int m = 0; m < kPanels; ++m)
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) dw[m][i] = 0;
    tile::RingCursor<kDzSlots> dz_at;
    tile::RingCursor<kHSlots> h_at;
    const int units = plan().units;
    for (int i = 0; i < units; ++i, dz_at.advance(), h_at.advance()) {
      wait_or_trap(&s.h_full[h_at.stage], h_at.phase);
      wait_or_trap(&s.dz_full[dz_at.stage], dz_at.phase);
      const uint32_t dz = ptx::shared_address(s.dz[dz_at.stage]), h = ptx::shared_address(s.h[h_at.stage]);
      ptx::wgmma_fence();
#pragma unroll
      for (uint32_t k = 0; k < kRows; k += 16) {
#pragma unroll
        for (uint32_t m = 0; m < kPanels; ++m)
          ptx::wgmma<T, kWidth, Major::mn, Major::mn>(
              dw[m], operand<Major::mn, Swizzle::b128>(dz + m * kPanelBytes, k, kPanelBytes),
              operand<Major::mn, Swizzle::b128>(h, k, kPanelBytes), true);
        ptx::wgmma_commit_group();
        if (k + 16 < kRows) ptx::wgmma_wait_group<0>();
      }
      if (a.want_db) {
        add_bias_gradient<T, kPanels, 16>(db, dz);
        __syncwarp();  // all lanes have finished reading before dz is returned
      }
      ptx::wgmma_wait_group<0>();
      if (threadIdx.x % 32 == 0) {
        ptx::mbarrier_arrive(&s.dz_empty[dz_at.stage]);
        ptx::mbarrier_arrive(&s.h_empty[h_at.stage]);
      }
      __syncwarp();
    }
#pragma unroll
    for (int m = 0; m < kPanels; ++m) ptx::fence_registers(dw[m]);
    store_partial(dw, db);
  }
  // Stores the sums in the order of the threads' registers; the kernel of the sums uses this order.
  __device__ __forceinline__ void store_partial(const float (&dw)[kPanels][kWidth / 2], const float (&db)[2]) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float* out = a.partial + (a.layer[plan().layer].first_part + plan().cluster) * part_floats(kPanels);
    float4* to = reinterpret_cast<float4*>(out) + threadIdx.x % 128;
#pragma unroll
    for (int m = 0; m < kPanels; ++m)
#pragma unroll
      for (int i = 0; i < kWidth / 8; ++i)
        to[(m * kWidth / 8 + i) * 128] =
            make_float4(dw[m][4 * i], dw[m][4 * i + 1], dw[m][4 * i + 2], dw[m][4 * i + 3]);
    if (!a.want_db) return;
    *reinterpret_cast<float2*>(out + kWidth * (kWidth + warp / kPanels) + warp % kPanels * kPanel + 2 * lane) =
        make_float2(db[0], db[1]);
  }
};

}  // namespace ingot::cuda::layer_pipeline
