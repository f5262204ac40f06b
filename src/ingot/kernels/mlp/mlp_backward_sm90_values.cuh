#pragma once
// Values that the fast backward form (mlp_backward_sm90_forming.cuh) forms itself, where nothing was kept, or fp32
// values: h of a chunk of the cluster's tiles, layer by layer, in the workspace.
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/kernels/mlp/mlp_backward.cuh"
#include "ingot/kernels/mlp/mlp_backward_sm90_forming_block.cuh"

namespace ingot::cuda::backward_sm90 {

// `to` = f(acc) of one panel.
template <class T> __device__ __forceinline__ void form_h(const float (&acc)[kPanel / 2], uint32_t to, Act act) {
  const auto by_values = [&](auto f) {
    using F = decltype(f);
#pragma unroll
    for (uint32_t b = 0; b < 4; ++b) {
      uint32_t h[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        h[i] = ptx::pack(T{}, act_value<F, T>(acc[8 * b + 2 * i]), act_value<F, T>(acc[8 * b + 2 * i + 1]));
        // Without this the compiler weaves long formulas of all elements into each other, and no registers are left.
        if constexpr (F::name == Tanh::name || F::name == Sigmoid::name) asm volatile("" : "+r"(h[i])::"memory");
      }
      ptx::stmatrix(to ^ (b << 5), h);
    }
  };
  with_slope(act, by_values, Activations{});
}

// Until this block's buffers of warpgroup r are free, before its n-th tile.
template <class T, int kPanels>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels>::wait_for_buffers(uint32_t r, uint32_t n) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t next = kSingle ? n + ((n ^ i) & 1) : n;  // the tile that takes buffer i
    wait_or_trap(&s.empty[r][kDz + i], phase_of<kSingle>(next) ^ 1);
    wait_or_trap(&s.empty[r][kH + i], phase_of<kSingle>(next) ^ 1);
  }
}

// Forms h of a chunk of the cluster's tiles, this warpgroup its share of their halves, before this block's n-th tile.
template <class T, int kPanels>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels>::form_chunk(uint32_t r, uint32_t n) {
  wait_for_buffers<kSingle>(r, n);
  uint32_t inputs = forming(r).inputs;
  const int first = int(forming(r).chunk) * kChunk;
  for (int l = 0; l < a.values; ++l)
    if (a.layer[l].kept != nullptr)
      round_values(r, l, first);
    else
      form_values<kSingle>(r, l, first, inputs);
  ptx::fence_proxy_async();  // other blocks' copy engines read what this thread wrote
  ptx::barrier_sync(1 + r, 128);
  if (threadIdx.x % 128 == 0) {
    forming(r).chunk = forming(r).chunk + 1, forming(r).inputs = inputs;
    ptx::bulk_wait_group<0>();
    ptx::fence_proxy_async();
    for (int rank = 0; rank < a.cluster; ++rank)
      ptx::mbarrier_arrive_remote(ptx::cluster_address(&s.chunk_formed, uint32_t(rank)));
  }
  ptx::barrier_sync(1 + r, 128);  // f is back
}

// h of layer l, from its input. The last tile's W is there, or is read into buffers that nobody uses now.
template <class T, int kPanels>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels>::form_values(uint32_t r, int l, int first, uint32_t& inputs) {
  const bool upper = plan().pair && l == plan().upper, resident = upper || l == plan().lower;
  const uint32_t apart = kSingle || resident ? sizeof(s.weight[0][0]) : sizeof(s.buffer[0]);
  uint32_t w = ptx::shared_address(resident  ? s.weight[upper ? 0 : 1][0]
                                   : kSingle ? s.weight[0][0]
                                             : s.buffer[0][kDz + 1][0]);
  if (!resident) load_other_weights<kSingle>(r, l, w, apart);
  const uint32_t fragment = fragment_of(thread_anew()), out = ptx::shared_address(s.buffer[r][kDz]);
  const bool issues = threadIdx.x % 128 == 0;
  const int step = 2 * a.cluster;
  int half = 2 * plan().rank + int(r);
  if (issues && half < halves(first)) {
    ptx::bulk_wait_group<0>();  // what this thread stored of the layer below has landed
    load_input(r, l, first, half, inputs);
  }
  for (; half < halves(first); half += step, ++inputs) {
    tile::wait_warp_or_trap(&s.input_full[r][inputs & 1], inputs >> 1 & 1);
    ptx::settle(w);  // else 16 descriptors stay in registers through the loop
    float acc[kPanels][kPanel / 2];
    start_from_bias(acc, l);
    start_values(acc, ptx::shared_address(s.buffer[r][kH + (inputs & 1)]), w, apart);
    if (issues) ptx::bulk_wait_group_read<0>();
    ptx::barrier_sync(1 + r, 128);  // `out` is free, and the products before these are done
    if (issues && half + step < halves(first)) load_input(r, l, first, half + step, inputs + 1);
    __syncwarp();
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      wait_for_panel(acc, p);
      form_h<T>(acc[p], out + p * kPanelBytes + fragment, a.act);
    }
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(1 + r, 128);
    if (issues) {
#pragma unroll
      for (int p = 0; p < kPanels; ++p)
        ptx::tensor_store(&maps.h[l + 1], p * kPanel, formed_row(first + half / 2, uint32_t(half) & 1),
                          s.buffer[r][kDz][p]);
      ptx::bulk_commit_group();
    }
    __syncwarp();
  }
}

// A layer's W that this block does not hold. Both chain warpgroups.
template <class T, int kPanels>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels>::load_other_weights(uint32_t r, int l, uint32_t to, uint32_t apart) {
  const uint32_t others = forming(r).others;
  ptx::barrier_sync(3, 256);  // nobody reads what lies there, and all have read `others`
  if (a.layer[l].g != nullptr) {
    form_weights<256>(l, thread_anew() - 256, to, apart);
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync(3, 256);
    return;
  }
  if (threadIdx.x % 128 == 0) forming(r).others = others + 1;
  if (threadIdx.x == 256) {
    ptx::mbarrier_arrive_expect_tx(&s.other_weights_full, sizeof(s.weight[0]));
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      ptx::tensor_load(kSingle ? s.weight[0][p] : s.buffer[p][kDz + 1][0], &maps.w[l], p * kPanel, 0,
                       &s.other_weights_full);
  }
  __syncwarp();
  tile::wait_warp_or_trap(&s.other_weights_full, others & 1);
}

// The input of layer l: half a tile, into the buffers that h of this warpgroup takes later. One thread.
template <class T, int kPanels>
__device__ __forceinline__ void Block<T, kPanels>::load_input(uint32_t r, int l, int first, int half, uint32_t number) {
  const int tile = first + half / 2;  // of the cluster
  const uint32_t sub = uint32_t(half) & 1;
  const int row =
      l > 0 ? formed_row(tile, sub) : (plan().cluster + plan().clusters * tile) * kTileRows + int(sub * kRows);
  ptx::mbarrier_arrive_expect_tx(&s.input_full[r][number & 1], kBytes);
#pragma unroll
  for (int p = 0; p < kPanels; ++p)
    ptx::tensor_load(s.buffer[r][kH + (number & 1)][p], &maps.h[l], p * kPanel, row, &s.input_full[r][number & 1]);
}

// Starts acc += h W^T, panel by panel as start_products().
template <class T, int kPanels>
__device__ __forceinline__ void Block<T, kPanels>::start_values(float (&acc)[kPanels][kPanel / 2], uint32_t h,
                                                                uint32_t w, uint32_t apart) {
#pragma unroll
  for (int p = 0; p < kPanels; ++p) ptx::fence_registers(acc[p]);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t p = 0; p < kPanels; ++p) {
#pragma unroll
    for (uint32_t k = 0; k < kWidth; k += 16)
      ptx::wgmma<T, kPanel, Major::k, Major::k>(
          acc[p], operand<Major::k, Swizzle::b128>(h, k, kPanelBytes),
          operand<Major::k, Swizzle::b128>(w + k / kPanel * apart + p * kPanelBytes, k % kPanel, 0), true);
    ptx::wgmma_commit_group();
  }
}

// acc = the bias of layer l; zero outside.
template <class T, int kPanels>
__device__ __forceinline__ void Block<T, kPanels>::start_from_bias(float (&acc)[kPanels][kPanel / 2], int l) {
  const LayerShape& at = a.layer[l];
#pragma unroll
  for (int p = 0; p < kPanels; ++p)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int column = p * kPanel + 8 * j + 2 * int(threadIdx.x % 4);
      uint32_t pair = 0;
      if (at.b != nullptr && column < at.n)
        pair = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const T*>(at.b) + column));
      ptx::unpack(T{}, pair, acc[p][4 * j], acc[p][4 * j + 1]);
      acc[p][4 * j + 2] = acc[p][4 * j], acc[p][4 * j + 3] = acc[p][4 * j + 1];
    }
}

// h of layer l from what was kept of it in fp32.
template <class T, int kPanels>
__device__ __forceinline__ void Block<T, kPanels>::round_values(uint32_t r, int l, int first) {
  constexpr int kChunks = kWidth / 8, kSteps = kRows * kChunks / 128,
                kAtOnce = 4 * kPanels;  // 8 columns a thread and step
  const LayerShape& at = a.layer[l];
  T* const to = static_cast<T*>(a.formed) + int64_t(l) * plan().clusters * a.room * kTileRows * kWidth;
  const int thread = int(thread_anew()), column = thread % kChunks * 8, in_half = thread % 128 / kChunks;
  for (int half = 2 * plan().rank + int(r); half < halves(first); half += 2 * a.cluster) {
    const int tile = plan().cluster + plan().clusters * (first + half / 2);
    const int64_t row = int64_t(tile) * kTileRows + half % 2 * kRows + in_half;
    T* const out = to + int64_t(formed_row(first + half / 2, uint32_t(half) & 1) + in_half) * kWidth + column;
#pragma unroll 1
    for (int i = 0; i < kSteps; i += kAtOnce) {
      float4 v[kAtOnce][2] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t from = row + (i + k) * (128 / kChunks);
        if (from >= a.rows || column >= at.n) continue;
        v[k][0] = __ldcs(reinterpret_cast<const float4*>(at.kept + from * at.n + column));
        v[k][1] = __ldcs(reinterpret_cast<const float4*>(at.kept + from * at.n + column + 4));
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        *reinterpret_cast<uint4*>(out + (i + k) * (128 / kChunks) * kWidth) =
            make_uint4(ptx::pack(T{}, v[k][0].x, v[k][0].y), ptx::pack(T{}, v[k][0].z, v[k][0].w),
                       ptx::pack(T{}, v[k][1].x, v[k][1].y), ptx::pack(T{}, v[k][1].z, v[k][1].w));
    }
  }
}

}  // namespace ingot::cuda::backward_sm90
