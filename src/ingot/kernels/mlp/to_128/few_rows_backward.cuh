#pragma once
// The backward pass of a whole MLP where there are few rows and only latency counts. Two kernels:
//
//   chain   dz_{l-1} = (dz_l W_l) . f'(z_{l-1}) from the top layer down, and dx: a block takes kRows rows through all
//           layers.
//   sums    dW_l = dz_l^T h_{l-1} over all rows: each cluster of eight blocks computes 32 or 64 rows of a dW. Its
//           blocks share the rows of the batch and then exchange their sums in shared memory: no partial sum goes to
//           global memory, and the order is fixed. While the chain runs, these blocks load h; only dz arrives late.
// Both kernels multiply transposed, features by rows, so that few rows fill the tensor cores: the chain's product is
// (features x features) (features x kRows). A dz lies in shared memory row by row, in panels of 64 columns.
#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/mlp/parts/slopes.cuh"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"
#include "ingot/kernels/mlp/to_128/few_rows_backward.h"
#include "ingot/kernels/mlp/to_128/few_rows_tile.cuh"

namespace ingot::cuda::to_128_few_rows_backward {

using namespace to_128_few_rows;

// --- the chain of gradients

template <int kPanels, int kRows> struct ChainMemory {
  static constexpr int kWidth = kPanel * kPanels;
  static constexpr uint32_t kTileBytes = kPanels * kRows * 128;
  struct Stage {
    uint8_t w[kPanels][kWidth * 128];  // panels of inputs
    uint8_t h[kPanels][kRows * 128];
  };
  uint64_t full[kMlpMaxLayers], normed[kMlpMaxLayers], dy_full, formed, stored;
  float gain[kMlpMaxLayers][kWidth];
  alignas(1024) uint8_t dz[2][kPanels][kRows * 128];
  Stage stage[1];  // more follow: a stage per layer, or as many as fit
};

template <class T, int kPanels, int kRows, bool kNorm> struct ChainBlock {
  using Memory = ChainMemory<kPanels, kRows>;
  static constexpr int kWidth = Memory::kWidth, kWarps = 4 * kPanels;
  static constexpr int kSums = kRows / 2;  // a thread's: two neighbouring features' of every row

  Memory& s;
  const MlpChainMaps& maps;
  const Chain& a;
  const uint32_t warp = warp_of_block(), lane = threadIdx.x % 32;
  const int row = int(blockIdx.x) * kRows;
  const uint32_t fragment = tile_fragment<kRows>(warp, lane);

  __device__ int layer_of(int step) const { return a.layers - 1 - step; }
  __device__ int steps() const { return a.layers - a.lowest; }

  // The operands of a step, except for the dz of the step before. The slowest to arrive are requested first.
  __device__ void load(int step) {
    const int l = layer_of(step), slot = step % a.stages;
    if (l > 0)
      load_tile(s.stage[slot].h, maps.h[l - 1], row, &s.full[slot]);
    else
      ptx::mbarrier_arrive(&s.full[slot]);
    load_tile(s.stage[slot].w, maps.w[l], 0, &s.full[slot]);
  }
  // Role::copy. Each function is called by a single thread.
  __device__ void start_loading() {
    load_tile(s.dz[0], maps.dy, row, &s.dy_full);
    if (a.activate_last)  // values that determine f'
      load_tile(s.dz[1], maps.h[a.layers - 1], row, &s.dy_full);
    else
      ptx::mbarrier_arrive(&s.dy_full);
    for (int step = 0; step < a.stages && step < steps(); ++step) load(step);
  }
  __device__ void store_and_reload() {
    if (a.activate_last && a.layer[a.layers - 1].keeps_dz) store_tile(maps.dz[a.layers - 1], row, s.dz[0]);
    ptx::bulk_commit_group();
    ptx::bulk_wait_group_read<0>();
    ptx::mbarrier_arrive(&s.stored);
    for (int step = 0; step < steps(); ++step) {
      const int l = layer_of(step);
      tile::wait_or_trap(&s.formed, step & 1);
      if (l == 0)
        store_tile(maps.dx, row, s.dz[(step + 1) & 1]);
      else if (a.layer[l - 1].keeps_dz)
        store_tile(maps.dz[l - 1], row, s.dz[(step + 1) & 1]);
      ptx::bulk_commit_group();
      if (step + a.stages < steps()) load(step + a.stages);
      ptx::bulk_wait_group_read<0>();
      ptx::mbarrier_arrive(&s.stored);
    }
    ptx::bulk_wait_group<0>();
  }

  // dz = dy . f' in place. Called by all threads.
  __device__ void enter() {
    const uint32_t to = ptx::shared_address(s.dz[0]), h = ptx::shared_address(s.dz[1]);
    with_slope(
        a.act,
        [&](auto f) {
          for (uint32_t i = threadIdx.x * 16; i < Memory::kTileBytes; i += blockDim.x * 16) {
            uint32_t v[4], at[4];
            ptx::load_shared(v, to + i);
            ptx::load_shared(at, h + i);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              float d[2], slope[2];
              slopes_of<decltype(f), T>(at[k], slope);
              ptx::unpack(T{}, v[k], d[0], d[1]);
              v[k] = ptx::pack(T{}, d[0] * slope[0], d[1] * slope[1]);
            }
            ptx::store_shared(to + i, v);
          }
        },
        Activations{});
    ptx::fence_proxy_async_shared();
    __syncthreads();
  }

  __device__ __forceinline__ void find_slopes(float (&slope)[kSums], uint32_t h) {
    uint32_t v[kRows / 16][4];
#pragma unroll
    for (int j = 0; j < kRows / 16; ++j) ptx::ldmatrix_trans(v[j], h + fragment + j * 16 * 128);
    with_slope(
        a.act,
        [&](auto f) {
#pragma unroll
          for (int i = 0; i < kRows / 4; ++i) {
            float two[2];
            slopes_of<decltype(f), T>(v[i / 4][i % 4], two);
            slope[2 * i] = two[0], slope[2 * i + 1] = two[1];
          }
        },
        Activations{});
  }
  // Starts sums = (W^T dz^T) of this warpgroup's 64 features.
  __device__ __forceinline__ void multiply(float (&sums)[kSums], uint32_t w, uint32_t dz) {
    const uint32_t panel = w + warp / 4 * kWidth * 128;
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t k = 0; k < kWidth; k += 16)
      ptx::wgmma<T, kRows, Major::mn, Major::k>(sums, operand<Major::mn, Swizzle::b128>(panel, k),
                                                operand<Major::k, Swizzle::b128>(dz, k, kRows * 128), k > 0);
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void put(const float (&sums)[kSums], const float (&slope)[kSums], bool slopes,
                                      uint32_t to) {
#pragma unroll
    for (int j = 0; j < kRows / 16; ++j) {
      uint32_t v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 8 * j + 2 * i;
        v[i] = slopes ? ptx::pack(T{}, sums[at] * slope[at], sums[at + 1] * slope[at + 1])
                      : ptx::pack(T{}, sums[at], sums[at + 1]);
      }
      ptx::stmatrix_trans(to + fragment + j * 16 * 128, v);
    }
  }

  __device__ __forceinline__ void run(int step) {
    const int l = layer_of(step), slot = step % a.stages;
    const bool slopes = l > 0;  // below layer 0 lies dx
    const uint32_t w = ptx::shared_address(s.stage[slot].w), h = ptx::shared_address(s.stage[slot].h);
    float sums[kSums], slope[kSums];
    wait_warp_or_trap(&s.full[slot], step / a.stages & 1);
    if (kNorm && a.layer[l].g != nullptr) {
      if (step == 0) normalise<T, kPanels>(w, s.gain[l], &s.normed[0], warp, kWarps);  // no earlier work
      wait_warp_or_trap(&s.normed[slot], step / a.stages & 1);
    }
    if (step > 0)
      wait_warp_or_trap(&s.formed, (step - 1) & 1);
    else if (!a.activate_last)
      wait_warp_or_trap(&s.dy_full, 0);
    multiply(sums, w, ptx::shared_address(s.dz[step & 1]));
    if (slopes) find_slopes(slope, h);
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(sums);
    put(sums, slope, slopes, ptx::shared_address(s.dz[(step + 1) & 1]));
    ptx::fence_proxy_async_shared();
    wait_warp_or_trap(&s.stored,
                      step & 1);  // the next step overwrites data whose copy to memory began before this step
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&s.formed);
    __syncwarp();
  }
  // Called by a single thread.
  __device__ void prepare() {
    for (uint64_t& full : s.full) ptx::mbarrier_init(&full, 2);
    if constexpr (kNorm)
      for (uint64_t& normed : s.normed) ptx::mbarrier_init(&normed, kNormArrivals<kPanels>);
    ptx::mbarrier_init(&s.dy_full, 2);
    ptx::mbarrier_init(&s.formed, kWarps);
    ptx::mbarrier_init(&s.stored, 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&maps.dy);
    for (int l = a.lowest; l < a.layers; ++l) {
      ptx::prefetch_tensor_map(&maps.w[l]);
      if (l > 0) ptx::prefetch_tensor_map(&maps.h[l - 1]);
      if (l > 0 && a.layer[l - 1].keeps_dz) ptx::prefetch_tensor_map(&maps.dz[l - 1]);
    }
    if (a.lowest == 0) ptx::prefetch_tensor_map(&maps.dx);
  }
  // Role::form_weights: of normalised layers above the first step's.
  __device__ void form_weights() {
    for (int step = 1; step < steps(); ++step) {
      const int l = layer_of(step), slot = step % a.stages;
      if (a.layer[l].g == nullptr) continue;
      wait_warp_or_trap(&s.full[slot], step / a.stages & 1);
      normalise<T, kPanels>(ptx::shared_address(s.stage[slot].w), s.gain[l], &s.normed[slot], warp - kWarps - 1,
                            kFormers / 32);
    }
  }
  __device__ void load_gains() {
    for (uint32_t i = threadIdx.x; i < uint32_t(a.layers) * kWidth; i += blockDim.x) {
      const ChainLayer& layer = a.layer[i / kWidth];
      s.gain[i / kWidth][i % kWidth] = layer.g != nullptr && int(i % kWidth) < layer.n
                                           ? tile::to_float(static_cast<const T*>(layer.g)[i % kWidth])
                                           : 0.f;
    }
    __syncthreads();
  }
};

template <class T, int kPanels, int kRows, bool kNorm>
__global__ void __launch_bounds__(threads<kPanels>(kNorm), 1)
    chain_kernel(const __grid_constant__ MlpChainMaps maps, const __grid_constant__ Chain a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  ChainBlock<T, kPanels, kRows, kNorm> block{*reinterpret_cast<ChainMemory<kPanels, kRows>*>(memory), maps, a};
  if (threadIdx.x == 0) block.prepare();
  __syncwarp();
  __syncthreads();
  ptx::wait_for_earlier_kernels();
  // Not before the wait, because the next kernel reads results of the kernels before this one without waiting for this
  // one.
  ptx::let_next_kernel_start();
  const Role role = role_of<kPanels>(block.warp);
  const bool copies = role == Role::copy && block.lane == 0;
  if (copies) block.start_loading();
  __syncwarp();
  if constexpr (kNorm) block.load_gains();
  if (a.activate_last) {
    wait_warp_or_trap(&block.s.dy_full, 0);
    block.enter();
  }
  if (role == Role::multiply)
    for (int step = 0; step < block.steps(); ++step) block.run(step);
  else if (kNorm && role == Role::form_weights)
    block.form_weights();
  else if (copies)
    block.store_and_reload();
}

// --- sums over the rows

template <int kPanels, int kTile> struct SumMemory {
  static constexpr int kWidth = kPanel * kPanels, kWarps = 4 * kPanels, kGiven = kTile / kBlocks;
  struct Stage {
    uint8_t h[kPanels][kChunk * 128];
    uint8_t dz[kChunk * kTile * 2];
  };
  // A block's sums for the rows of dW finished by one block of the cluster. dw_column() rotates the columns.
  struct Part {
    float dw[kGiven][kWidth];
    float db[kWarps][kGiven];
  };
  uint64_t h_full[kMaxSumStages], dz_full[kMaxSumStages], taken_full;
  alignas(16) Part taken[kBlocks];  // the part of each block of the cluster
  // As many stages as the launch allows; the first stage later holds the exchanged parts.
  alignas(1024) Stage stage[1];
  static_assert(sizeof(Part) * kBlocks <= sizeof(Stage), "what is given must fit where the first stage was");
};

template <class T, int kPanels, int kTile> struct SumBlock {
  using Memory = SumMemory<kPanels, kTile>;
  using Part = typename Memory::Part;
  static constexpr int kWidth = Memory::kWidth, kWarps = Memory::kWarps, kGiven = Memory::kGiven;
  static constexpr Swizzle kDzSwizzle = kTile == 64 ? Swizzle::b128 : Swizzle::b64;

  Memory& s;
  const MlpSumMaps& maps;
  const Sums& a;
  const uint32_t warp = warp_of_block(), lane = threadIdx.x % 32, rank = ptx::cluster_rank();
  int l = 0, first_n = 0;  // of the cluster

  __device__ void find_place() {
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

  // db += columns of dz: a warp's rows of the chunk, a lane's two columns of every so many.
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

  // The place where the part for block `to` is assembled; this block's own part needs no copy.
  __device__ Part& share(Part* given, uint32_t to) const { return to == rank ? s.taken[rank] : given[to]; }

  __device__ void hand_out(const float (&dw)[kTile / 2], float (&db)[2]) {
    Part* given = reinterpret_cast<Part*>(s.stage[0].h);
    const uint32_t k = warp * 16 + lane / 4;
    __syncthreads();  // all threads have read the stage
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t n = 8 * j + lane % 4 * 2 + i % 2;
        share(given, n / kGiven).dw[n % kGiven][dw_column(n, k + i / 2 * 8)] = dw[4 * j + i];
      }
    if (a.want_db) {
      constexpr uint32_t kPairs = kTile / 2;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (kPairs < 32) db[e] += __shfl_xor_sync(~0u, db[e], 16);
      if (lane < kPairs)
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e)
          share(given, (2 * lane + e) / kGiven).db[warp][(2 * lane + e) % kGiven] = db[e];
    }
    ptx::fence_proxy_async_shared();
    ptx::cluster_wait();  // the neighbours' barriers are ready
    __syncthreads();
    if (lane == 0)
      for (uint32_t to = warp; to < uint32_t(kBlocks); to += kWarps)
        if (to != rank)
          ptx::bulk_copy_to_cluster(ptx::cluster_address(&s.taken[rank], to), &given[to], uint32_t(sizeof(Part)),
                                    ptx::cluster_address(&s.taken_full, to));
    __syncwarp();
  }

  // The rows finished by this block's warps: warp w takes row w (and w + kWarps, ...) of the block's share.
  struct Row {
    int n;
    bool inside;      // a row of dW at all
    bool has_column;  // this lane's four columns
    int64_t start;    // of these rows in dW
  };
  __device__ __forceinline__ Row row_of(uint32_t turn) const {
    const SumLayer& at = a.layer[l];
    const int n = first_n + int(rank * kGiven + warp + turn * kWarps);
    const bool inside = warp + turn * kWarps < kGiven && n < at.n;
    return {n, inside, inside && int(lane * 4) < at.k, int64_t(n) * at.k + lane * 4};
  }
  // Of the row: the old gradient, and for a weight-normalised layer u = v r and g r. The loads are issued while dz is
  // on its way.
  struct Before {
    float4 dw = {};
    float db = 0, dg = 0, u[4] = {}, scale = 0;
  };
  __device__ __forceinline__ Before load_before(uint32_t turn) const {
    const SumLayer& at = a.layer[l];
    const Row row = row_of(turn);
    Before b;
    if (!row.inside) return b;
    if (row.has_column && at.dw != nullptr) b.dw = *reinterpret_cast<const float4*>(at.dw + row.start);
    if (at.db != nullptr) b.db = at.db[row.n];
    if (at.g == nullptr) return b;
    if (at.dg != nullptr) b.dg = at.dg[row.n];
    const T* v = static_cast<const T*>(at.v);
    const float r = weight_inverse_norm(v + int64_t(row.n) * at.k, at.k);
    b.scale = tile::to_float(static_cast<const T*>(at.g)[row.n]) * r;
    if (!row.has_column) return b;
#pragma unroll
    for (int i = 0; i < 4; ++i) b.u[i] = tile::to_float(v[row.start + i]) * r;
    return b;
  }

  __device__ __forceinline__ void finish_row(uint32_t turn, const Before& before) const {
    const SumLayer& at = a.layer[l];
    const Row row = row_of(turn);
    if (!row.inside) return;
    const uint32_t mine = warp + turn * kWarps;
    float dw[4] = {};
    if (row.has_column) {
      const uint32_t column = dw_column(uint32_t(row.n - first_n), lane * 4);
#pragma unroll
      for (const Part& part : s.taken) {
        const float4 p = *reinterpret_cast<const float4*>(&part.dw[mine][column]);
        dw[0] += p.x, dw[1] += p.y, dw[2] += p.z, dw[3] += p.w;
      }
    }
    if (at.g != nullptr) {  // dW of a row becomes dv, and dg is added
      float dot[1] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) dot[0] = fmaf(dw[i], before.u[i], dot[0]);
      tile::warp_sum(dot, 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) dw[i] = before.scale * (dw[i] - before.u[i] * dot[0]);
      if (lane == 0 && at.dg != nullptr) at.dg[row.n] = before.dg + dot[0];
    }
    if (row.has_column && at.dw != nullptr)
      *reinterpret_cast<float4*>(at.dw + row.start) =
          make_float4(before.dw.x + dw[0], before.dw.y + dw[1], before.dw.z + dw[2], before.dw.w + dw[3]);
    if (at.db == nullptr) return;
    float db[1] = {};
#pragma unroll
    for (uint32_t i = lane; i < uint32_t(kBlocks * kWarps); i += 32) db[0] += s.taken[i / kWarps].db[i % kWarps][mine];
    tile::warp_sum(db, 32);
    if (lane == 0) at.db[row.n] = before.db + db[0];
  }

  // Called by a single thread.
  __device__ void prepare() {
    for (int i = 0; i < kMaxSumStages; ++i) {
      ptx::mbarrier_init(&s.h_full[i], 1);
      ptx::mbarrier_init(&s.dz_full[i], 1);
    }
    ptx::mbarrier_init(&s.taken_full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&s.taken_full, uint32_t((kBlocks - 1) * sizeof(Part)));
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
  block.find_place();
  if (threadIdx.x == 0) block.prepare();
  __syncthreads();
  ptx::cluster_arrive();
  // The chain lets this kernel start when its own wait is over, so only the chain's results may be late.
  if (!a.after_chain) ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  block.start_loading_h();
  constexpr uint32_t kTurns = (Block::kGiven + Block::kWarps - 1) / Block::kWarps;
  typename Block::Before before[kTurns];
#pragma unroll
  for (uint32_t i = 0; i < kTurns; ++i) before[i] = block.load_before(i);
  const bool late = a.after_chain && a.layer[block.l].dz_is_late;
  if (late) ptx::wait_for_earlier_kernels();
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
  block.hand_out(dw, db);
  wait_warp_or_trap(&block.s.taken_full, 0);
  ptx::cluster_arrive();  // all parts for this block have arrived, so their senders may end
#pragma unroll
  for (uint32_t i = 0; i < kTurns; ++i) block.finish_row(i, before[i]);
  if (a.after_chain && !late) ptx::wait_for_earlier_kernels();  // this kernel ends after the chain
  __syncwarp();
  ptx::cluster_wait();
}

// --- launches

template <class T, int kPanels, int kRows, bool kNorm>
void launch_chain_of(const MlpChainMaps& maps, const Chain& a, int64_t rows, int device, Stream stream) {
  using Memory = ChainMemory<kPanels, kRows>;
  const int64_t blocks = (rows + kRows - 1) / kRows;
  gpu::launch("mlp_backward", chain_kernel<T, kPanels, kRows, kNorm>,
              {.grid = blocks,
               .block = threads<kPanels>(kNorm),
               .smem = int64_t(sizeof(Memory)) + (a.stages - 1) * int64_t(sizeof(typename Memory::Stage)),
               .overlap = true,
               .device = device},
              stream, maps, a);
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

template <class T> void launch_chain(const MlpChainMaps& maps, const Chain& a, const ChainLaunch& at, Stream stream) {
  const auto with_rows = [&](auto panels, auto norm) {
    constexpr int kPanels = decltype(panels)::value;
    constexpr bool kNorm = decltype(norm)::value;
    if (at.block_rows == 16) return launch_chain_of<T, kPanels, 16, kNorm>(maps, a, at.rows, at.device, stream);
    if (at.block_rows == 32) return launch_chain_of<T, kPanels, 32, kNorm>(maps, a, at.rows, at.device, stream);
    launch_chain_of<T, kPanels, 64, kNorm>(maps, a, at.rows, at.device, stream);
  };
  const auto with_panels = [&](auto panels) {
    a.has_gain ? with_rows(panels, std::true_type()) : with_rows(panels, std::false_type());
  };
  at.panels == 2 ? with_panels(std::integral_constant<int, 2>()) : with_panels(std::integral_constant<int, 1>());
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
