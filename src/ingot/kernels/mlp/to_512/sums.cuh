#pragma once
// dW_l = dz_l^T h_{l-1} and db_l where layers are up to 512 wide. A pair of blocks sums 256 x 256 of a dW over a part
// of the rows: each block 128 rows of dW, each warpgroup 64 x 256 in registers. Where no layer is wider than 384, a
// pair sums 384 x 192 and a block has three warpgroups. The blocks fetch their own columns of dz, and half of h for
// both. A team of four pairs, or two, sums all of a dW and takes the same rows at the same time, so memory delivers
// each row once and L2 twice; for a smaller dW the team's pairs share the rows. The total cost of all layers' rows is
// divided equally among the teams, so a team may end one layer and begin the next. Every part goes to memory; when all
// parts have been written, each warp adds the parts of some rows of dW in their order. Blocks wait for each other, so
// the launch is cooperative.
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/kernels/mlp/to_512/halves.cuh"

namespace ingot::cuda::to_512_backward {

constexpr uint32_t kSumStages = 4;
template <class Cut> constexpr int kSumThreads = Cut::kSumGroups * 128 + 32;
constexpr uint32_t kChunkBytes = kChunk * 128;  // of a panel

template <class Cut> struct SumBuffers {
  struct Stage {
    uint8_t dz[Cut::kSumGroups][kChunkBytes];
    uint8_t h[Cut::kHalfPanels][kChunkBytes];
  };
  alignas(1024) Stage stage[kSumStages];
  float db[Cut::kSumGroups][4][kMlpPanel];  // of each warp
};
struct SumBarriers {
  uint64_t full[kSumStages], empty[kSumStages];
};
template <class Cut> struct SumMemory {
  SumBuffers<Cut> buffers;
  SumBarriers barriers;
};

// The distribution of a layer's dW over the pairs of a team.
template <class Cut> struct Tiles {
  int across, all;  // pairs' areas of dW: side by side, and in total
  __device__ explicit Tiles(const MlpSumLayer& at)
      : across(Cut::halves_of(at.k)), all(Cut::squares_of(at.n) * across) {}
  __device__ int shares() const { return Cut::kTeam / all; }  // of the rows
};

// A pair's work for a layer: chunks first, ..., end - 1 of a tile.
struct Task {
  int l, row, column;  // of dW
  int first, end;
};

template <class T, class Cut> struct SumBlock {
  static constexpr int kHalf = Cut::kHalf, kSquare = Cut::kSquare, kTeam = Cut::kTeam, kGroups = Cut::kSumGroups;
  static constexpr uint32_t kGroupWarps = 4 * kGroups;
  static_assert(sizeof(SumMemory<Cut>) <= size_t(kMlpSharedBytes), "the sums must fit the shared memory");

  SumBuffers<Cut>& s;
  SumBarriers& barriers;
  const MlpSumMaps& maps;
  const Sums& a;
  const uint32_t warp = warp_of_block(), lane = threadIdx.x % 32, rank = ptx::cluster_rank(), group = warp / 4;
  const int team = int(ptx::cluster_index()) / kTeam, pair = int(ptx::cluster_index()) % kTeam;
  tile::RingCursor<kSumStages> at = {};

  static __device__ bool trained(const MlpSumLayer& at) {
    return at.dw != nullptr || at.db != nullptr || at.dg != nullptr;
  }
  __device__ bool takes_part(int team, int l) const { return a.cut[team][l] < a.cut[team + 1][l]; }
  // Calls each(task) for this pair's work, from the first layer to the last.
  template <class Each> __device__ __forceinline__ void each_task(Each&& each) {
#pragma unroll 1
    for (int l = 0; l < a.layers; ++l) {
      if (!takes_part(team, l) || !trained(a.layer[l])) continue;
      const Tiles<Cut> tiles(a.layer[l]);
      const int tile = pair % tiles.all, share = pair / tiles.all, begin = a.cut[team][l],
                chunks = a.cut[team + 1][l] - begin;
      each(Task{.l = l,
                .row = tile / tiles.across * 2 * kSquare + int(rank) * kSquare,
                .column = tile % tiles.across * kHalf,
                .first = begin + chunks * share / tiles.shares(),
                .end = begin + chunks * (share + 1) / tiles.shares()});
    }
  }
  __device__ int64_t part(int team, int l, int pair, int rank) const {
    return (int64_t(team + l) * kTeam + pair) * kPair + rank;
  }

  // Called by a single thread.
  static __device__ void prepare(SumBarriers& barriers) {
    for (uint32_t i = 0; i < kSumStages; ++i) {
      ptx::mbarrier_init(&barriers.full[i], 1);
      ptx::mbarrier_init(&barriers.empty[i], kGroupWarps * kPair);
    }
    ptx::fence_mbarrier_init();
  }
  __device__ void load() {
    each_task([&](const Task& task) {
      for (int i = task.first; i < task.end; ++i, at.advance()) {
        auto& to = s.stage[at.stage];
        uint64_t* const full = &barriers.full[at.stage];
        const int row = (a.chunks - 1 - i) * kChunk;  // from the end, because the chain has written these rows last
        wait_or_trap(&barriers.empty[at.stage], at.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, uint32_t(sizeof(to)));
        for (int g = 0; g < kGroups; ++g)
          ptx::tensor_load(to.dz[g], &maps.dz[task.l], task.row + g * kMlpPanel, row, full);
        load_for_pair<Cut, kChunk>(to.h[0], maps.h[task.l], task.column, row, full, rank);
      }
    });
  }

  __device__ bool has_bias(const Task& task) const { return a.layer[task.l].db != nullptr && task.column == 0; }
  __device__ __forceinline__ void add_rows(const Task& task, float (&dw)[kHalf / 2], float (&db)[2]) {
    const bool bias = has_bias(task);
    uint32_t before = 0;
#pragma unroll 1
    for (int i = task.first; i < task.end; ++i, at.advance()) {
      wait_warp_or_trap(&barriers.full[at.stage], at.phase);
      const uint32_t dz = ptx::shared_address(s.stage[at.stage].dz[group]),
                     h = ptx::shared_address(s.stage[at.stage].h);
      multiply_chunk<T, kHalf, kChunk>(dw, dz, h, true);
      if (bias) add_bias<T, kChunk>(db, dz, warp, lane);
      ptx::wgmma_wait_group<1>();
      if (i > task.first) release_to_pair(&barriers.empty[before], lane);
      before = at.stage;
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(dw);
    if (task.first < task.end) release_to_pair(&barriers.empty[before], lane);
  }

  // The place of a row's columns in a part (see put_rows): a lane has one group of four columns, or two, 128 columns
  // apart.
  __device__ __forceinline__ bool has_four(int four) const { return four == 0 || 128 + int(lane) * 4 < kHalf; }
  __device__ __forceinline__ int column(int half, int two) const {
    return half * kHalf + int(lane / 4 * 16 + lane % 4 * 2) + two / 2 * 128 + two % 2 * 8;
  }
  __device__ __forceinline__ void put_part(const Task& task, const float (&dw)[kHalf / 2], const float (&db)[2]) const {
    const int64_t number = part(team, task.l, pair, int(rank));
    put_rows<kHalf>(a.part + number * Cut::kPartFloats, dw, warp, lane);
    if (!has_bias(task)) return;
    put_bias(a.bias_part, number * kSquare, s.db[group], db, group, warp, lane);
    ptx::barrier_sync(1 + group, 128);
  }
  __device__ __forceinline__ void sum() {
    each_task([&](const Task& task) {
      // The sums are set to zero here, because a first product that ignores the old sums would be a choice at run time.
      float dw[kHalf / 2] = {}, db[2] = {};
      add_rows(task, dw, db);
      put_part(task, dw, db);
    });
  }

  // The parts of half of row `n` of layer l, from column `half * kHalf` on, are added by a warp: a lane has four
  // columns twice.
  __device__ __forceinline__ void add_parts(int l, int n, int half, float (&dw)[2][4], float& db) const {
    constexpr int kAtOnce = 8;
    const MlpSumLayer& layer = a.layer[l];
    const Tiles<Cut> tiles(layer);
    const int tile = n / (2 * kSquare) * tiles.across + half, block = n / kSquare % 2, row = n % kSquare;
    int first = 0, end = a.teams;  // the pairs with parts
    while (!takes_part(first, l)) ++first;
    while (!takes_part(end - 1, l)) --end;
    const int shares = tiles.shares(), shift = __ffs(shares) - 1, parts = (end - first) * shares;
#pragma unroll 1
    for (int i = 0; i < parts; i += kAtOnce) {
      float4 v[kAtOnce][2] = {};
      float b[kAtOnce] = {};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (i + j < parts) {
          const int64_t number =
              part(first + ((i + j) >> shift), l, tile + ((i + j) & (shares - 1)) * tiles.all, block);
          const float* const from = a.part + number * Cut::kPartFloats + row * kHalf + lane * 4;
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (has_four(e)) v[j][e] = __ldcg(reinterpret_cast<const float4*>(from + e * 128));
          if (layer.db != nullptr && half == 0) b[j] = __ldcg(a.bias_part + number * kSquare + row);
        }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        db += b[j];
#pragma unroll
        for (int e = 0; e < 2; ++e)
          dw[e][0] += v[j][e].x, dw[e][1] += v[j][e].y, dw[e][2] += v[j][e].z, dw[e][3] += v[j][e].w;
      }
    }
  }
  // Calls each(pair of the lane's adjacent columns, their first column) for all columns of the layer.
  template <class Each>
  __device__ __forceinline__ void each_pair(const MlpSumLayer& layer, int half, Each&& each) const {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (has_four(e / 2) && column(half, e) < layer.k) each(e, column(half, e));
  }
  __device__ __forceinline__ void finish_half(int l, int n, int half) const {
    const MlpSumLayer& layer = a.layer[l];
    float* const to = layer.dw == nullptr ? nullptr : layer.dw + int64_t(n) * layer.k;
    float2 old[4] = {};
    if (to != nullptr) each_pair(layer, half, [&](int e, int k) { old[e] = *reinterpret_cast<const float2*>(to + k); });
    float dw[2][4] = {}, db = 0;
    add_parts(l, n, half, dw, db);
    if (to != nullptr)
      each_pair(layer, half, [&](int e, int k) {
        const float* const d = &dw[e / 2][e % 2 * 2];
        *reinterpret_cast<float2*>(to + k) = make_float2(old[e].x + d[0], old[e].y + d[1]);
      });
    if (layer.db != nullptr && half == 0 && lane == 0) layer.db[n] += db;
  }
  // A whole row of a weight-normalised layer: dW becomes dv, and dg is added.
  __device__ __forceinline__ void finish_normed(int l, int n) const {
    const MlpSumLayer& layer = a.layer[l];
    const T* const v = static_cast<const T*>(layer.v) + int64_t(n) * layer.k;
    const float r = weight_inverse_norm(v, layer.k);
    float dw[2][2][4] = {}, u[2][2][4] = {}, db = 0, along[1] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (half * kHalf < layer.k) {
        add_parts(l, n, half, dw[half], db);
        each_pair(layer, half, [&](int e, int k) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& at = u[half][e / 2][e % 2 * 2 + i];
            at = tile::to_float(v[k + i]) * r;
            along[0] = fmaf(dw[half][e / 2][e % 2 * 2 + i], at, along[0]);
          }
        });
      }
    tile::warp_sum(along, 32);
    const float scale = tile::to_float(static_cast<const T*>(layer.g)[n]) * r;
    if (layer.dw != nullptr)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        each_pair(layer, half, [&](int e, int k) {
          float2* const to = reinterpret_cast<float2*>(layer.dw + int64_t(n) * layer.k + k);
          const float *const d = &dw[half][e / 2][e % 2 * 2], *const at = &u[half][e / 2][e % 2 * 2];
          const float2 old = *to;
          *to = make_float2(old.x + scale * (d[0] - at[0] * along[0]), old.y + scale * (d[1] - at[1] * along[0]));
        });
    if (lane != 0) return;
    if (layer.dg != nullptr) layer.dg[n] += along[0];
    if (layer.db != nullptr) layer.db[n] += db;
  }
  __device__ __forceinline__ void finish() const {
    int row = int(blockIdx.x + gridDim.x * warp);
#pragma unroll 1
    for (int l = 0; l < a.layers; ++l) {
      const MlpSumLayer& layer = a.layer[l];
      const int halves = layer.g != nullptr ? 1 : Cut::halves_of(layer.k), rows = layer.n * halves;
      for (; row < rows; row += int(gridDim.x * kGroupWarps)) {
        if (!trained(layer)) continue;
        if (layer.g != nullptr)
          finish_normed(l, row);
        else
          finish_half(l, row / halves, row % halves);
      }
      row -= rows;
    }
  }
  // Waits until all blocks have written their parts. Called by all kThreads of the block.
  template <uint32_t kThreads> __device__ __forceinline__ void wait_for_parts() const {
    __threadfence();
    ptx::barrier_sync_unaligned(0, kThreads);
    if (threadIdx.x == 0) {
      ptx::add_release(a.counter, 1u);
      tile::poll_or_trap([&] { return ptx::load_acquire(a.counter) >= gridDim.x; });
    }
    ptx::barrier_sync_unaligned(0, kThreads);
    __threadfence();
  }
  // Called by all warps, multiplying or not, when this block's parts have been written.
  template <bool kMultiplies, uint32_t kThreads> __device__ __forceinline__ void finish_together() const {
    wait_for_parts<kThreads>();
    ptx::cluster_arrive_relaxed();  // the neighbour has finished its writes and reads
    if constexpr (kMultiplies) finish();
    __syncwarp();
    ptx::cluster_wait();
  }
};

template <class T, class Cut>
__global__ void __launch_bounds__(kSumThreads<Cut>, 1)
    sum_kernel(const __grid_constant__ MlpSumMaps maps, const __grid_constant__ Sums a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& s = *reinterpret_cast<SumMemory<Cut>*>(memory);
  SumBlock<T, Cut> block{s.buffers, s.barriers, maps, a};
  if (threadIdx.x == 0) block.prepare(s.barriers);
  __syncwarp();
  tile::sync_cluster();  // the neighbour's barriers are ready
  if (block.warp < block.kGroupWarps) {
    block.sum();
    block.template finish_together<true, kSumThreads<Cut>>();
  } else {
    if (block.lane == 0) block.load();
    __syncwarp();
    block.template finish_together<false, kSumThreads<Cut>>();
  }
}

template <class T, int kHalf> void launch_sums(const MlpSumMaps& maps, const Sums& a, int device, Stream stream) {
  using Cut = Cut<kHalf>;
  gpu::launch("mlp_backward: sums", sum_kernel<T, Cut>,
              {.grid = int64_t(a.teams) * Cut::kTeam * kPair,
               .block = kSumThreads<Cut>,
               .smem = sizeof(SumMemory<Cut>),
               .cluster = kPair,
               .device = device,
               .cooperative = true},
              stream, maps, a);
}

}  // namespace ingot::cuda::to_512_backward
