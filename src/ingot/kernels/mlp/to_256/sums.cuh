#pragma once
// dW_l = dz_l^T h_{l-1} and db_l where layers are up to 256 wide. A pair of blocks computes a whole dW over a part of
// the rows: each block 128 rows of dW, each warpgroup 64 x 256. The blocks fetch their own columns of dz, and half of h
// for both. Every part goes to memory; when all parts of a layer have been written, each block adds a share of the rows
// of dW in the order of the parts. Blocks wait for each other, so the launch is cooperative.
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/kernels/mlp/parts/slopes.cuh"
#include "ingot/kernels/mlp/to_256/memory.cuh"

namespace ingot::cuda::to_256_backward {

constexpr uint32_t kAllGroups = 1 + kGroups;  // named barrier of all multiplying warps; warpgroups' own are lower

template <class T> struct SumBlock {
  Memory& s;
  const Maps& maps;
  const Arguments& a;
  const uint32_t warp = warp_of_block(), lane = threadIdx.x % 32, rank = ptx::cluster_rank(), group = warp / 4;
  const int l = int(ptx::cluster_index()) / a.splits, split = int(ptx::cluster_index()) % a.splits;
  const bool has_work =
      l < a.layers && (a.layer[l].dw != nullptr || a.layer[l].db != nullptr || a.layer[l].dg != nullptr);

  __device__ int chunks() const { return (a.chunks - split + a.splits - 1) / a.splits; }  // of this block
  // From the end, because the chain has written these rows last.
  __device__ int first_row(int i) const { return (a.chunks - 1 - split - i * a.splits) * kChunk; }
  __device__ int64_t part(int of) const { return (int64_t(l) * a.splits + of) * kPair + rank; }

  __device__ const CUtensorMap& map_of_dz() const { return a.layer[l].keeps_dz ? maps.dz[l] : maps.dy; }

  // Called by a single thread.
  static __device__ void prepare(Memory& s) {
    for (uint32_t i = 0; i < kSumStages; ++i) {
      ptx::mbarrier_init(&s.sum_full[i], 1);
      ptx::mbarrier_init(&s.sum_empty[i], kReaders);
    }
  }
  __device__ void prefetch_maps() const {
    ptx::prefetch_tensor_map(&map_of_dz());
    ptx::prefetch_tensor_map(&maps.input[l]);
  }
  __device__ void load() const {
    tile::RingCursor<kSumStages> at;
    for (int i = 0; i < chunks(); ++i, at.advance()) {
      auto& to = s.sums[at.stage];
      uint64_t* full = &s.sum_full[at.stage];
      wait_or_trap(&s.sum_empty[at.stage], at.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, uint32_t(sizeof(to)));
      for (int g = 0; g < kGroups; ++g)
        ptx::tensor_load(to.dz[g], &map_of_dz(), int(rank) * kSquare + g * kMlpPanel, first_row(i), full);
      load_for_pair(to.h, maps.input[l], first_row(i), full, rank);
    }
  }

  __device__ __forceinline__ void add_rows(float (&dw)[kWidth / 2], float (&db)[2]) const {
    const bool bias = a.layer[l].db != nullptr;
    tile::RingCursor<kSumStages> at;
    uint32_t before = 0;
    ptx::fence_registers(dw);  // dw is set before the products begin
    for (int i = 0; i < chunks(); ++i, at.advance()) {
      wait_warp_or_trap(&s.sum_full[at.stage], at.phase);
      const uint32_t dz = ptx::shared_address(s.sums[at.stage].dz[group]), h = ptx::shared_address(s.sums[at.stage].h);
      multiply_chunk<T, kWidth, kChunk>(dw, dz, h, true);
      if (bias) add_bias<T, kChunk>(db, dz, warp, lane);
      ptx::wgmma_wait_group<1>();
      if (i > 0) release_to_pair(&s.sum_empty[before], lane);
      before = at.stage;
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(dw);
  }

  // The place of a row's columns in a part: see put_rows.
  static __device__ __forceinline__ int column(uint32_t four) { return int(four / 4 * 16 + four % 4 * 2); }
  __device__ __forceinline__ void put_part(const float (&dw)[kWidth / 2], const float (&db)[2]) const {
    put_rows<kWidth>(a.part + part(split) * kPartFloats, dw, warp, lane);
    put_bias(a.bias_part, part(split) * kSquare, s.db[group], db, group, warp, lane);
  }

  // Row `row` of this block, by a warp: a lane has two times four columns.
  __device__ __forceinline__ void finish_row(int row) const {
    const MlpSumLayer& at = a.layer[l];
    const int n = int(rank) * kSquare + row;
    if (n >= at.n) return;
    constexpr int kAtOnce = 11;
    const float* from = a.part + part(0) * kPartFloats + row * kWidth + lane * 4;
    constexpr int64_t kNext = kPair * kPartFloats;
    float dw[2][4] = {};
    for (int first = 0; first < a.splits; first += kAtOnce) {
      float4 v[kAtOnce][2] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < a.splits)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            v[i][e] = __ldcg(reinterpret_cast<const float4*>(from + (first + i) * kNext + e * kWidth / 2));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          dw[e][0] += v[i][e].x, dw[e][1] += v[i][e].y, dw[e][2] += v[i][e].z, dw[e][3] += v[i][e].w;
    }
    if (at.g != nullptr) through_norm(dw, n);
    if (at.dw != nullptr)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int k = column(lane + e / 2 * 32) + e % 2 * 8;
        float2* const to = reinterpret_cast<float2*>(at.dw + int64_t(n) * at.k + k);
        if (k >= at.k) continue;
        const float2 old = *to;
        *to = make_float2(old.x + dw[e / 2][e % 2 * 2], old.y + dw[e / 2][e % 2 * 2 + 1]);
      }
    if (at.db == nullptr) return;
    float db[1] = {};
    for (int i = int(lane); i < a.splits; i += 32) db[0] += __ldcg(a.bias_part + part(i) * kSquare + row);
    tile::warp_sum(db, 32);
    if (lane == 0) at.db[n] += db[0];
  }
  // dW of a row becomes dv, and dg is added.
  __device__ __forceinline__ void through_norm(float (&dw)[2][4], int n) const {
    const MlpSumLayer& at = a.layer[l];
    const T* v = static_cast<const T*>(at.v) + int64_t(n) * at.k;
    const float r = weight_inverse_norm(v, at.k);
    float u[2][4] = {}, along[1] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int k = column(lane + e / 4 * 32) + e / 2 % 2 * 8 + e % 2;
      if (k < at.k) u[e / 4][e % 4] = tile::to_float(v[k]) * r;
      along[0] = fmaf(dw[e / 4][e % 4], u[e / 4][e % 4], along[0]);
    }
    tile::warp_sum(along, 32);
    if (lane == 0 && at.dg != nullptr) at.dg[n] += along[0];
    const float scale = tile::to_float(static_cast<const T*>(at.g)[n]) * r;
#pragma unroll
    for (int e = 0; e < 8; ++e) dw[e / 4][e % 4] = scale * (dw[e / 4][e % 4] - u[e / 4][e % 4] * along[0]);
  }

  // --- of the block

  // The loop of the copying warp.
  __device__ void serve() const {
    if (lane == 0 && has_work) load();
    __syncwarp();
  }
  // The loop of the multiplying warps.
  __device__ __forceinline__ void run() const {
    if (!has_work) return;
    float dw[kWidth / 2] = {}, db[2] = {};
    add_rows(dw, db);
    put_part(dw, db);
    __threadfence();
    ptx::barrier_sync(kAllGroups, kGroups * 128);
    // Waits for the blocks with parts of this block's rows of dW.
    if (threadIdx.x == 0) meet_at_counter(a.counter + 1 + l * kPair + int(rank), uint32_t(a.splits));
    ptx::barrier_sync(kAllGroups, kGroups * 128);
    __threadfence();
    for (int row = split + int(warp) * a.splits; row < kSquare; row += int(kGroupWarps) * a.splits) finish_row(row);
    __syncwarp();
  }
};

}  // namespace ingot::cuda::to_256_backward
