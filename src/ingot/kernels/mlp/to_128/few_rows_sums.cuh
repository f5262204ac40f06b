#pragma once
// The weight gradients of few rows:  dW_l = dz_l^T h_{l-1}  and  db_l, summed over all rows. A cluster of eight blocks
// computes 32 or 64 rows of one dW. The blocks share the rows of the batch and then exchange their sums in shared
// memory, so no partial sum goes to global memory, and the order of the sums is fixed. While the chain of gradients
// (few_rows_chain.cuh) runs, these blocks load h; only dz arrives late.
#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"
#include "ingot/kernels/mlp/to_128/few_rows_backward.h"
#include "ingot/kernels/mlp/to_128/few_rows_tile.cuh"

namespace ingot::cuda::to_128_few_rows_backward {

using namespace to_128_few_rows;

template <int kPanels, int kTile> struct SumMemory {
  static constexpr int kWidth = kPanel * kPanels, kWarps = 4 * kPanels, kOwnRows = kTile / kBlocks;
  struct Stage {
    uint8_t h[kPanels][kChunk * 128];
    uint8_t dz[kChunk * kTile * 2];
  };
  // A block's sums for the rows of dW that one block of the cluster finishes. dw_column() rotates the columns.
  struct PartialSums {
    float dw[kOwnRows][kWidth];
    float db[kWarps][kOwnRows];
  };
  uint64_t h_full[kMaxSumStages], dz_full[kMaxSumStages], received_full;
  alignas(16) PartialSums received[kBlocks];  // from each block of the cluster
  // As many stages as the launch allows; the first stage later holds the sums for the other blocks.
  alignas(1024) Stage stage[1];
  static_assert(sizeof(PartialSums) * kBlocks <= sizeof(Stage), "the outgoing sums take the memory of the first stage");
};

template <class T, int kPanels, int kTile> struct SumBlock {
  using Memory = SumMemory<kPanels, kTile>;
  using PartialSums = typename Memory::PartialSums;
  static constexpr int kWidth = Memory::kWidth, kWarps = Memory::kWarps, kOwnRows = Memory::kOwnRows;
  static constexpr Swizzle kDzSwizzle = kTile == 64 ? Swizzle::b128 : Swizzle::b64;

  Memory& s;
  const MlpSumMaps& maps;
  const Sums& a;
  const uint32_t warp = warp_of_block(), lane = threadIdx.x % 32, rank = ptx::cluster_rank();
  int l = 0, first_n = 0;  // the cluster's layer, and its first row of dW

  __device__ void find_tile() {
    int at = int(blockIdx.x) / kBlocks;
    while (at >= a.layer[l].tiles) at -= a.layer[l++].tiles;
    first_n = at * kTile;
  }
  __device__ int chunks() const { return (a.chunks - int(rank) + kBlocks - 1) / kBlocks; }  // of this block
  __device__ int first_row(int i) const { return (int(rank) + i * kBlocks) * kChunk; }

  // Loads h of this block's chunk i. Called by a single thread.
  __device__ void load_h(int i) {
    auto& to = s.stage[i % a.stages];
    ptx::mbarrier_arrive_expect_tx(&s.h_full[i % a.stages], uint32_t(sizeof(to.h)));
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      ptx::tensor_load(to.h[p], &maps.h[l], p * kPanel, first_row(i), &s.h_full[i % a.stages]);
  }
  __device__ void load_dz(int i) {
    auto& to = s.stage[i % a.stages];
    ptx::mbarrier_arrive_expect_tx(&s.dz_full[i % a.stages], uint32_t(sizeof(to.dz)));
    ptx::tensor_load(to.dz, &maps.dz[l], first_n, first_row(i), &s.dz_full[i % a.stages]);
  }
  __device__ void start_loading_h() {
    if (threadIdx.x == 0)
      for (int i = 0; i < a.stages && i < chunks(); ++i) load_h(i);
    __syncwarp();
  }
  __device__ void start_loading_dz() {
    if (threadIdx.x == 0)
      for (int i = 0; i < a.stages && i < chunks(); ++i) load_dz(i);
    __syncwarp();
  }

  // db += columns of dz. A warp takes kEach rows of the chunk; a lane adds two columns of every kStep-th of these rows.
  __device__ __forceinline__ void add_bias(float (&db)[2], uint32_t dz) {
    constexpr uint32_t kPairs = kTile / 2, kStep = 32 / kPairs, kEach = kChunk / kWarps;
    const uint32_t first = warp * kEach + lane / kPairs;
#pragma unroll
    for (uint32_t i = 0; i < kEach; i += kStep) {
      uint32_t v[1];
      float low, high;
      ptx::load_shared(v, dz + tile::swizzled<kDzSwizzle>(first + i, lane % kPairs * 4));
      ptx::unpack(T{}, v[0], low, high);
      db[0] += low, db[1] += high;
    }
  }
  __device__ __forceinline__ void add_chunk(float (&dw)[kTile / 2], float (&db)[2], int i) {
    auto& at = s.stage[i % a.stages];
    wait_warp_or_trap(&s.h_full[i % a.stages], i / a.stages & 1);
    wait_warp_or_trap(&s.dz_full[i % a.stages], i / a.stages & 1);
    const uint32_t h = ptx::shared_address(at.h) + warp / 4 * kChunk * 128, dz = ptx::shared_address(at.dz);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t k = 0; k < kChunk; k += 16)
      ptx::wgmma<T, kTile, Major::mn, Major::mn>(dw, operand<Major::mn, Swizzle::b128>(h, k),
                                                 operand<Major::mn, kDzSwizzle>(dz, k), true);
    ptx::wgmma_commit_group();
    if (a.want_db) add_bias(db, dz);
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(dw);
  }

  // Rotated so that the four column pairs of a fragment meet different banks.
  static __device__ uint32_t dw_column(uint32_t n, uint32_t k) { return (k + n / 2 % 4 * 8) % kWidth; }

  // The memory in which the sums for block `to` are assembled. This block's own sums need no copy.
  __device__ PartialSums& part_for(PartialSums* outgoing, uint32_t to) const {
    return to == rank ? s.received[rank] : outgoing[to];
  }

  __device__ void exchange_sums(const float (&dw)[kTile / 2], float (&db)[2]) {
    PartialSums* outgoing = reinterpret_cast<PartialSums*>(s.stage[0].h);
    const uint32_t k = warp * 16 + lane / 4;
    __syncthreads();  // all threads have read the stage
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t n = 8 * j + lane % 4 * 2 + i % 2;
        part_for(outgoing, n / kOwnRows).dw[n % kOwnRows][dw_column(n, k + i / 2 * 8)] = dw[4 * j + i];
      }
    if (a.want_db) {
      constexpr uint32_t kPairs = kTile / 2;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (kPairs < 32) db[e] += __shfl_xor_sync(~0u, db[e], 16);
      if (lane < kPairs)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e)
          part_for(outgoing, (2 * lane + e) / kOwnRows).db[warp][(2 * lane + e) % kOwnRows] = db[e];
    }
    ptx::fence_proxy_async_shared();
    ptx::cluster_wait();  // the neighbours' barriers are ready
    __syncthreads();
    if (lane == 0)
      for (uint32_t to = warp; to < uint32_t(kBlocks); to += kWarps)
        if (to != rank)
          ptx::bulk_copy_to_cluster(ptx::cluster_address(&s.received[rank], to), &outgoing[to],
                                    uint32_t(sizeof(PartialSums)), ptx::cluster_address(&s.received_full, to));
    __syncwarp();
  }

  // A row of dW that one of this block's warps finishes: warp w takes row w (and w + kWarps, ...) of the block's rows.
  struct Row {
    int n;
    bool inside;       // a row of dW at all
    bool has_columns;  // this lane's four columns
    int64_t start;     // where these columns begin in dW
  };
  __device__ __forceinline__ Row row_of(uint32_t turn) const {
    const SumLayer& at = a.layer[l];
    const int n = first_n + int(rank * kOwnRows + warp + turn * kWarps);
    const bool inside = warp + turn * kWarps < kOwnRows && n < at.n;
    return {n, inside, inside && int(lane * 4) < at.k, int64_t(n) * at.k + lane * 4};
  }
  // The operands of finish_row() for a row: the old gradients, and for a weight-normalised layer u = v r and g r with r
  // = 1 / |v|. The loads are issued while dz is being computed and copied.
  struct RowOperands {
    float4 dw = {};
    float db = 0, dg = 0, u[4] = {}, scale = 0;
  };
  __device__ __forceinline__ RowOperands load_row_operands(uint32_t turn) const {
    const SumLayer& at = a.layer[l];
    const Row row = row_of(turn);
    RowOperands b;
    if (!row.inside) return b;
    if (row.has_columns && at.dw != nullptr) b.dw = *reinterpret_cast<const float4*>(at.dw + row.start);
    if (at.db != nullptr) b.db = at.db[row.n];
    if (at.g == nullptr) return b;
    if (at.dg != nullptr) b.dg = at.dg[row.n];
    const T* v = static_cast<const T*>(at.v);
    const float r = weight_inverse_norm(v + int64_t(row.n) * at.k, at.k);
    b.scale = tile::to_float(static_cast<const T*>(at.g)[row.n]) * r;
    if (!row.has_columns) return b;
#pragma unroll
    for (int i = 0; i < 4; ++i) b.u[i] = tile::to_float(v[row.start + i]) * r;
    return b;
  }

  __device__ __forceinline__ void finish_row(uint32_t turn, const RowOperands& operands) const {
    const SumLayer& at = a.layer[l];
    const Row row = row_of(turn);
    if (!row.inside) return;
    const uint32_t own_row = warp + turn * kWarps;
    float dw[4] = {};
    if (row.has_columns) {
      const uint32_t column = dw_column(uint32_t(row.n - first_n), lane * 4);
#pragma unroll
      for (const PartialSums& part : s.received) {
        const float4 p = *reinterpret_cast<const float4*>(&part.dw[own_row][column]);
        dw[0] += p.x, dw[1] += p.y, dw[2] += p.z, dw[3] += p.w;
      }
    }
    if (at.g != nullptr) {  // dW of a row becomes dv, and dg is added
      float dot[1] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) dot[0] = fmaf(dw[i], operands.u[i], dot[0]);
      tile::warp_sum(dot, 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) dw[i] = operands.scale * (dw[i] - operands.u[i] * dot[0]);
      if (lane == 0 && at.dg != nullptr) at.dg[row.n] = operands.dg + dot[0];
    }
    if (row.has_columns && at.dw != nullptr)
      *reinterpret_cast<float4*>(at.dw + row.start) =
          make_float4(operands.dw.x + dw[0], operands.dw.y + dw[1], operands.dw.z + dw[2], operands.dw.w + dw[3]);
    if (at.db == nullptr) return;
    float db[1] = {};
#pragma unroll
    for (uint32_t i = lane; i < uint32_t(kBlocks * kWarps); i += 32)
      db[0] += s.received[i / kWarps].db[i % kWarps][own_row];
    tile::warp_sum(db, 32);
    if (lane == 0) at.db[row.n] = operands.db + db[0];
  }

  // Called by a single thread.
  __device__ void init_barriers() {
    for (int i = 0; i < kMaxSumStages; ++i) {
      ptx::mbarrier_init(&s.h_full[i], 1);
      ptx::mbarrier_init(&s.dz_full[i], 1);
    }
    ptx::mbarrier_init(&s.received_full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&s.received_full, uint32_t((kBlocks - 1) * sizeof(PartialSums)));
  }
  __device__ void prefetch_maps() const {
    ptx::prefetch_tensor_map(&maps.h[l]);
    ptx::prefetch_tensor_map(&maps.dz[l]);
  }
};

template <class T, int kPanels, int kTile>
__global__ void __launch_bounds__(kMultipliers<kPanels>)
    sum_kernel(const __grid_constant__ MlpSumMaps maps, const __grid_constant__ Sums a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  using Block = SumBlock<T, kPanels, kTile>;
  Block block{*reinterpret_cast<SumMemory<kPanels, kTile>*>(memory), maps, a};
  block.find_tile();
  if (threadIdx.x == 0) block.init_barriers(), block.prefetch_maps();
  __syncthreads();
  ptx::cluster_arrive();
  // The chain lets this kernel start only after the chain's own wait, so only the results of the chain may still be
  // missing.
  if (!a.after_chain) ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  block.start_loading_h();
  constexpr uint32_t kTurns = (Block::kOwnRows + Block::kWarps - 1) / Block::kWarps;
  typename Block::RowOperands operands[kTurns];
#pragma unroll
  for (uint32_t i = 0; i < kTurns; ++i) operands[i] = block.load_row_operands(i);
  const bool dz_is_late = a.after_chain && a.layer[block.l].dz_is_late;
  if (dz_is_late) ptx::wait_for_earlier_kernels();
  block.start_loading_dz();

  float dw[kTile / 2] = {}, db[2] = {};
  const int chunks = block.chunks();
  for (int i = 0; i < chunks; ++i) {
    block.add_chunk(dw, db, i);
    if (i + a.stages < chunks) {
      __syncthreads();
      if (threadIdx.x == 0) block.load_h(i + a.stages), block.load_dz(i + a.stages);
      __syncwarp();
    }
  }
  block.exchange_sums(dw, db);
  wait_warp_or_trap(&block.s.received_full, 0);
  ptx::cluster_arrive();  // all sums for this block have arrived, so their senders may end
#pragma unroll
  for (uint32_t i = 0; i < kTurns; ++i) block.finish_row(i, operands[i]);
  if (a.after_chain && !dz_is_late) ptx::wait_for_earlier_kernels();  // this kernel ends after the chain
  __syncwarp();
  ptx::cluster_wait();
}

template <class T, int kPanels, int kTile>
void launch_sums_of(const MlpSumMaps& maps, const Sums& a, int64_t tiles, int device, Stream stream) {
  using Memory = SumMemory<kPanels, kTile>;
  gpu::launch("mlp_backward: sums", sum_kernel<T, kPanels, kTile>,
              {.grid = tiles * kBlocks,
               .block = kMultipliers<kPanels>,
               .smem = int64_t(sizeof(Memory)) + (a.stages - 1) * int64_t(sizeof(typename Memory::Stage)),
               .cluster = kBlocks,
               .overlap = true,
               .device = device},
              stream, maps, a);
}

template <class T> void launch_sums(const MlpSumMaps& maps, const Sums& a, const SumLaunch& at, Stream stream) {
  const auto with_tile = [&](auto panels) {
    constexpr int kPanels = decltype(panels)::value;
    if (at.tile == 32) return launch_sums_of<T, kPanels, 32>(maps, a, at.tiles, at.device, stream);
    launch_sums_of<T, kPanels, 64>(maps, a, at.tiles, at.device, stream);
  };
  at.panels == 2 ? with_tile(std::integral_constant<int, 2>()) : with_tile(std::integral_constant<int, 1>());
}

}  // namespace ingot::cuda::to_128_few_rows_backward
