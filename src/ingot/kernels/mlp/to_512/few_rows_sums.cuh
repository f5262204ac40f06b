#pragma once
// dW_l = dz_l^T h_{l-1} and db_l of few rows. A block sums 128 x 64 of a layer's dW over all rows, each warpgroup 64 x
// 64 in registers, and adds the result to the old gradient. No partial sums are combined, and blocks do not wait for
// each other.
#include "ingot/kernels/mlp/parts/block_pair.cuh"
#include "ingot/kernels/mlp/to_512/few_rows_backward.h"

namespace ingot::cuda::to_512_few_rows_backward {

using namespace mlp_parts;

constexpr uint32_t kStages = 8, kChunkBytes = kChunk * 128;
constexpr int kSumThreads = kSumGroups * 128 + 32;

struct SumMemory {
  struct Stage {
    uint8_t dz[kSumGroups][kChunkBytes], h[kChunkBytes];
  };
  alignas(1024) Stage stage[kStages];
  float db[kSumGroups][4][kMlpPanel];  // of each warp
  uint64_t full[kStages], empty[kStages];
};
static_assert(sizeof(SumMemory) <= size_t(kMlpSharedBytes), "a block must fit the shared memory");

template <class T> struct SumBlock {
  SumMemory& s;
  const MlpSumMaps& maps;
  const Sums& a;
  const int l;
  const MlpSumLayer& layer;
  const int row, column;  // of dW
  const uint32_t warp = warp_of_block(), lane = threadIdx.x % 32, group = warp / 4;
  tile::RingCursor<kStages> at = {};

  __device__ bool has_bias() const { return layer.db != nullptr && column == 0; }
  // Called by a single thread.
  __device__ void load() {
    for (int i = 0; i < a.chunks; ++i, at.advance()) {
      auto& to = s.stage[at.stage];
      uint64_t* const full = &s.full[at.stage];
      tile::wait_or_trap(&s.empty[at.stage], at.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, uint32_t(sizeof(to)));
      for (int g = 0; g < kSumGroups; ++g)
        ptx::tensor_load(to.dz[g], &maps.dz[l], row + g * kMlpPanel, i * kChunk, full);
      ptx::tensor_load(to.h, &maps.h[l], column, i * kChunk, full);
    }
  }
  __device__ __forceinline__ void release(uint32_t stage) const {
    __syncwarp();  // all lanes have finished their ordinary loads
    if (lane == 0) ptx::mbarrier_arrive(&s.empty[stage]);
  }
  __device__ __forceinline__ void add_rows(float (&dw)[kSumColumns / 2], float (&db)[2]) {
    uint32_t before = 0;
#pragma unroll 1
    for (int i = 0; i < a.chunks; ++i, at.advance()) {
      tile::wait_warp_or_trap(&s.full[at.stage], at.phase);
      const uint32_t dz = ptx::shared_address(s.stage[at.stage].dz[group]),
                     h = ptx::shared_address(s.stage[at.stage].h);
      multiply_chunk<T, kSumColumns, kChunk>(dw, dz, h, true);
      if (has_bias()) add_bias<T, kChunk>(db, dz, warp, lane);
      ptx::wgmma_wait_group<1>();
      if (i > 0) release(before);
      before = at.stage;
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(dw);
  }
  // Calls each(row of dW, number among the lane's two rows, index of two adjacent sums, their first column) for all
  // existing elements.
  template <class Each> __device__ __forceinline__ void each_two(Each&& each) const {
    const int first = row + int(threadIdx.x / 32 * 16 + lane / 4);
#pragma unroll
    for (int low = 0; low < 2; ++low) {
      const int n = first + 8 * low;
      if (n >= layer.n) continue;
#pragma unroll
      for (int j = 0; j < kSumColumns / 8; ++j)
        if (const int k = column + 8 * j + int(lane % 4) * 2; k < layer.k) each(n, low, 4 * j + 2 * low, k);
    }
  }
  __device__ __forceinline__ void add_to_dw(const float (&dw)[kSumColumns / 2]) const {
    if (layer.dw == nullptr) return;
    float2 old[kSumColumns / 4];
    each_two([&](int n, int, int i, int k) {
      old[i / 2] = *reinterpret_cast<const float2*>(layer.dw + int64_t(n) * layer.k + k);
    });
    each_two([&](int n, int, int i, int k) {
      *reinterpret_cast<float2*>(layer.dw + int64_t(n) * layer.k + k) =
          make_float2(old[i / 2].x + dw[i], old[i / 2].y + dw[i + 1]);
    });
  }
  __device__ __forceinline__ void add_to_db(const float (&db)[2]) const {
    if (!has_bias()) return;
    auto& of = s.db[group];
    of[warp % 4][lane * 2] = db[0], of[warp % 4][lane * 2 + 1] = db[1];
    ptx::barrier_sync(1 + group, 128);
    const int at = int(threadIdx.x % 128), n = row + int(group) * kMlpPanel + at;
    if (at < kMlpPanel && n < layer.n) layer.db[n] += (of[0][at] + of[1][at]) + (of[2][at] + of[3][at]);
  }
  __device__ __forceinline__ void sum() {
    float dw[kSumColumns / 2] = {}, db[2] = {};
    add_rows(dw, db);
    add_to_dw(dw);
    add_to_db(db);
  }
};

template <class T>
__global__ void __launch_bounds__(kSumThreads, 1)
    sum_kernel(const __grid_constant__ MlpSumMaps maps, const __grid_constant__ Sums a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<SumMemory*>(memory);
  int l = 0;
  while (int(blockIdx.x) >= a.first_block[l + 1]) ++l;
  const MlpSumLayer& layer = a.layer[l];
  const int across = (layer.k + kSumColumns - 1) / kSumColumns, block = int(blockIdx.x) - a.first_block[l];
  SumBlock<T> of{s, maps, a, l, layer, block / across * kSumRows, block % across * kSumColumns};
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&s.full[i], 1);
      ptx::mbarrier_init(&s.empty[i], 4 * kSumGroups);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&maps.dz[l]);
    ptx::prefetch_tensor_map(&maps.h[l]);
  }
  __syncthreads();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  if (of.warp < 4 * kSumGroups)
    of.sum();
  else if (of.lane == 0)
    of.load();
}

template <class T> void launch_sums(const MlpSumMaps& maps, const Sums& a, int device, Stream stream) {
  gpu::launch("mlp_backward: sums", sum_kernel<T>,
              {.grid = a.first_block[a.layers],
               .block = kSumThreads,
               .smem = sizeof(SumMemory),
               .overlap = true,
               .device = device},
              stream, maps, a);
}

}  // namespace ingot::cuda::to_512_few_rows_backward
