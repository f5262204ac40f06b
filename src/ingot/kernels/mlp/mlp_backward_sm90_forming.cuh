#pragma once
// The backward pass of a whole MLP in one kernel where no values were kept, or fp32 ones: gradients of activations
// never leave the SMs, dW stays in registers.
//
//     dz_L = dy (. f'(z_L))    dz_{l-1} = (dz_l W_l) . f'(z_{l-1})    dx = dz_1 W_1    dW_l += dz_l^T h_{l-1}
//
// The depth is spread over the blocks of a cluster: a stage is one or two layers, and a block runs one stage for the
// whole launch. It holds that stage's W in shared memory and its dW in registers, takes tiles of 128 rows of dz from
// the stage above and pushes what it forms into the shared memory of the stage below. Where one stage has a single
// layer, the others run in two blocks, which take turns, so that all are busy. A cluster walks over every so many
// tiles.
//
// Of a block's four warpgroups two run the chain, 64 rows of the tile each; the other two hold a layer's dW each (of a
// single layer, the sums of one chain warpgroup's rows each) and give the copy engine its work. They lag behind the
// chain and fill the gaps of its epilogues. The second kernel adds the blocks' partial sums in fixed order.
//
// A cluster's tiles come in chunks: before the gradients of a chunk its blocks'
// chain warpgroups share out its rows and form h, layer by layer (or round what was kept), in a workspace that L2
// holds. From there on all is as with values kept in 16 bits.
#include "ingot/core/dtype.h"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/kernels/mlp/mlp_backward.cuh"
#include "ingot/kernels/mlp/mlp_backward_sm90_forming_block.cuh"
#include "ingot/kernels/mlp/mlp_backward_sm90_values.cuh"

namespace ingot::cuda::backward_sm90 {

// --- dW, and the filling of the buffers ---

template <class T, int kPanels>
__device__ __forceinline__ void Block<T, kPanels>::load(uint32_t r, uint32_t buffer, const CUtensorMap& map, int row) {
  ptx::mbarrier_arrive_expect_tx(&s.full[r][buffer], kBytes);
#pragma unroll
  for (int p = 0; p < kPanels; ++p) ptx::tensor_load(s.buffer[r][buffer][p], &map, p * kPanel, row, &s.full[r][buffer]);
}

// Fills the buffers that dW warpgroup w reads for this block's n-th tile, but for the dz that the chain writes. The dz
// of a stage that is not the top is pushed by the one above, which is told that there is room. One thread.
template <class T, int kPanels>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels>::refill(uint32_t w, uint32_t r, uint32_t n, int tile) {
  if (tile >= a.tiles) return;
  const uint32_t b = buffer_of<kSingle>(w, n), phase = phase_of<kSingle>(n);
  const int row = tile * kTileRows + int(r * kRows), l = kSingle || w == 1 ? plan().lower : plan().upper;
  const int in_cluster = tile_of_cluster(n);
  if (chunk_starts(n)) {
    tile::wait_cluster_or_trap(&s.chunk_formed, uint32_t(in_cluster) / kChunk % 2);
    ptx::fence_proxy_async();
  }
  if (kSingle || w == 0) {
    wait_or_trap(&s.empty[r][kDz + b], phase ^ 1);
    if (plan().top) {
      load(r, kDz + b, maps.dy, row);
    } else {
      ptx::mbarrier_arrive_expect_tx(&s.full[r][kDz + b], kBytes);
      ptx::mbarrier_arrive_remote_relaxed(ptx::cluster_address(&s.room[r][b], plan().above + (kSingle ? b : 0)));
    }
  }
  wait_or_trap(&s.empty[r][kH + b], phase ^ 1);
  load(r, kH + b, maps.h[l], l > 0 ? formed_row(in_cluster, r) : row);
}

// The products that read a tile's buffers are done.
template <class T, int kPanels>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels>::release(uint32_t w, uint32_t r, uint32_t n) {
  const uint32_t b = buffer_of<kSingle>(w, n);
  if (threadIdx.x % 32 == 0) {
    ptx::mbarrier_arrive(&s.empty[r][kDz + b]);
    ptx::mbarrier_arrive(&s.empty[r][kH + b]);
  }
  __syncwarp();
}

// The buffers behind tile n; between chunks all run empty. One thread.
template <class T, int kPanels>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels>::fill_behind(uint32_t w, uint32_t n, int tile) {
  if (kSingle && !chunk_starts(n + 1) && chunk_starts(n + 2)) return;
  const uint32_t first = kSingle && chunk_starts(n + 1) ? 1 : 2;
#pragma unroll 1
  for (uint32_t i = kSingle ? first : 1; i <= 2; ++i)
    if (kSingle)
      refill<true>(w, w, n + i, tile + int(i) * plan().tile_step);
    else
      refill<false>(w, i - 1, n + 1, tile + plan().tile_step);
}

// Starts dw += dz^T h of the rows of chain warpgroup r.
template <class T, int kPanels>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels>::add_products(float (&dw)[kPanels][kWidth / 2], float (&db)[2],
                                                                uint32_t w, uint32_t r, uint32_t n) {
  const uint32_t b = buffer_of<kSingle>(w, n), phase = phase_of<kSingle>(n);
  wait_or_trap(&s.full[r][kDz + b], phase);
  wait_or_trap(&s.full[r][kH + b], phase);
  const uint32_t dz = ptx::shared_address(s.buffer[r][kDz + b]), h = ptx::shared_address(s.buffer[r][kH + b]);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < kRows; k += 16) {
#pragma unroll
    for (uint32_t m = 0; m < kPanels; ++m)
      ptx::wgmma<T, kWidth, Major::mn, Major::mn>(
          dw[m], operand<Major::mn, Swizzle::b128>(dz + m * kPanelBytes, k, kPanelBytes),
          operand<Major::mn, Swizzle::b128>(h, k, kPanelBytes), true);
    ptx::wgmma_commit_group();
    if (k + 16 < kRows) ptx::wgmma_wait_group<kDwAhead>();
  }
  if (a.want_db) add_bias_gradient<T, kPanels, 8>(db, dz);
}

// Warpgroup w adds dz^T h of every tile: with two layers of layer w, with one of the rows of chain warpgroup w.
template <class T, int kPanels> template <bool kSingle> __device__ void Block<T, kPanels>::hold_dw(uint32_t w) {
  float dw[kPanels][kWidth / 2], db[2] = {};
#pragma unroll
  for (int m = 0; m < kPanels; ++m)
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) dw[m][i] = 0;
  if (threadIdx.x % 128 == 0) fill_behind<kSingle>(w, ~0u, plan().first_tile - plan().tile_step);
  __syncwarp();
  uint32_t n = 0;
  for (int tile = plan().first_tile; tile < a.tiles; tile += plan().tile_step, ++n) {
    if (kSingle) {
      add_products<true>(dw, db, w, w, n);
      ptx::wgmma_wait_group<0>();
      release<true>(w, w, n);
    } else {
      add_products<false>(dw, db, w, 0, n);
      add_products<false>(dw, db, w, 1, n);
      ptx::wgmma_wait_group<kDwAhead>();
      release<false>(w, 0, n);
      ptx::wgmma_wait_group<0>();
      release<false>(w, 1, n);
    }
    if (threadIdx.x % 128 == 0) fill_behind<kSingle>(w, n, tile);
    __syncwarp();
  }
#pragma unroll
  for (int m = 0; m < kPanels; ++m) ptx::fence_registers(dw[m]);
  // Of the two that hold the same layer one gives, so that fewer partial sums reach memory.
  block_ends();
  if (w == plan().giver) give(dw, db);
  block_ends();
  if (w != plan().giver) store_partial(dw, db, kSingle || w == 1 ? plan().lower : plan().upper);
}

// What hold_dw() does for other warpgroups where there is no dW: above the top layer.
template <class T, int kPanels> __device__ void Block<T, kPanels>::only_fill(uint32_t w) {
  if (threadIdx.x % 128 == 0) fill_behind<false>(w, ~0u, plan().first_tile - plan().tile_step);
  __syncwarp();
  uint32_t n = 0;
  for (int tile = plan().first_tile; tile < a.tiles; tile += plan().tile_step, ++n) {
    for (uint32_t r = 0; r < 2; ++r) {
      wait_or_trap(&s.full[r][kDz + w], n & 1);
      wait_or_trap(&s.full[r][kH + w], n & 1);
      release<false>(w, r, n);
    }
    if (threadIdx.x % 128 == 0) fill_behind<false>(w, n, tile);
    __syncwarp();
  }
  block_ends();
  block_ends();
}

// The sums of a warpgroup through the memory of the block that takes them, a thread's by 16 bytes, 128 threads apart.
template <class T, int kPanels>
__device__ __forceinline__ void Block<T, kPanels>::give(const float (&dw)[kPanels][kWidth / 2], const float (&db)[2]) {
  const uint32_t to = ptx::cluster_address(s.weight, plan().taker) + threadIdx.x % 128 * 16;
#pragma unroll
  for (int m = 0; m < kPanels; ++m)
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) {
      const uint32_t v[4] = {__float_as_uint(dw[m][4 * i]), __float_as_uint(dw[m][4 * i + 1]),
                             __float_as_uint(dw[m][4 * i + 2]), __float_as_uint(dw[m][4 * i + 3])};
      ptx::cluster_store(to + (m * kWidth / 8 + i) * 2048, v);
    }
  const uint32_t v[4] = {__float_as_uint(db[0]), __float_as_uint(db[1]), 0, 0};
  ptx::cluster_store(to + kPanels * kWidth / 8 * 2048, v);
}
// A warpgroup's sums, and those it was given, in the same order: the second kernel knows where a row lies.
template <class T, int kPanels>
__device__ __forceinline__ void Block<T, kPanels>::store_partial(const float (&dw)[kPanels][kWidth / 2],
                                                                 const float (&db)[2], int l) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int part = int(blockIdx.x) / a.cluster;
  const uint32_t given = ptx::shared_address(s.weight) + threadIdx.x % 128 * 16;
  const bool adds = plan().giver != kNobody;
  float* out = a.partial + (a.layer[l].first_part + part) * part_floats(kPanels);
  float4* to = reinterpret_cast<float4*>(out) + threadIdx.x % 128;
  uint32_t v[4] = {};
#pragma unroll
  for (int m = 0; m < kPanels; ++m)
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) {
      if (adds) ptx::load_shared(v, given + (m * kWidth / 8 + i) * 2048);
      to[(m * kWidth / 8 + i) * 128] =
          make_float4(dw[m][4 * i] + __uint_as_float(v[0]), dw[m][4 * i + 1] + __uint_as_float(v[1]),
                      dw[m][4 * i + 2] + __uint_as_float(v[2]), dw[m][4 * i + 3] + __uint_as_float(v[3]));
    }
  if (!a.want_db) return;
  if (adds) ptx::load_shared(v, given + kPanels * kWidth / 8 * 2048);
  *reinterpret_cast<float2*>(out + kWidth * (kWidth + warp / kPanels) + warp % kPanels * kPanel + 2 * lane) =
      make_float2(db[0] + __uint_as_float(v[0]), db[1] + __uint_as_float(v[1]));
}

// --- the chain ---

// Starts acc = dz W of the layer in `slot`, panel by panel: the first is finished while the second still runs.
template <class T, int kPanels>
__device__ __forceinline__ void Block<T, kPanels>::start_products(float (&acc)[kPanels][kPanel / 2], uint32_t dz,
                                                                  uint32_t slot) {
  const uint32_t w = ptx::shared_address(s.weight[slot]);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t p = 0; p < kPanels; ++p) {
#pragma unroll
    for (uint32_t k = 0; k < kWidth; k += 16)
      ptx::wgmma<T, kPanel, Major::k, Major::mn>(
          acc[p], operand<Major::k, Swizzle::b128>(dz, k, kPanelBytes),
          operand<Major::mn, Swizzle::b128>(w + p * kWidth * 128, k, kPanelBytes), k > 0);
    ptx::wgmma_commit_group();
  }
}
template <class T, int kPanels>
__device__ __forceinline__ void Block<T, kPanels>::wait_for_panel(float (&acc)[kPanels][kPanel / 2], int p) {
  if (p + 1 < kPanels)
    ptx::wgmma_wait_group<1>();
  else
    ptx::wgmma_wait_group<0>();
  ptx::fence_registers(acc[p]);
}

// Until what this tile's step forms may be written: its buffer is free, and of kOut also what it goes to.
template <class T, int kPanels>
__device__ __forceinline__ void Block<T, kPanels>::wait_for_room(uint32_t step, uint32_t r, uint32_t n) {
  if (step == 0) {
    wait_or_trap(&s.empty[r][kDz + 1], (n & 1) ^ 1);
  } else if (plan().bottom) {
    if (threadIdx.x % 128 == 0) ptx::bulk_wait_group_read<0>();
    ptx::barrier_sync(1 + r, 128);
  } else {
    // Room for this one also says that the last one has been read: no other block feeds that buffer.
    wait_or_trap(&s.room[r][plan().below_buffer], n & 1);
  }
}

// `to` = acc . f'(h), or acc where h is 0, of one panel. Addresses of this lane's fragment.
template <class T>
__device__ __forceinline__ void form_dz(const float (&acc)[kPanel / 2], uint32_t h, uint32_t to, Act act) {
  if (h == 0) {
#pragma unroll
    for (uint32_t b = 0; b < 4; ++b) {
      uint32_t dz[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) dz[i] = ptx::pack(T{}, acc[8 * b + 2 * i], acc[8 * b + 2 * i + 1]);
      ptx::stmatrix(to ^ (b << 5), dz);
    }
    return;
  }
  // Two chunks at a time: the latencies of one hide behind the other's.
  const auto by_slopes = [&](auto f) {
#pragma unroll
    for (uint32_t b = 0; b < 4; b += 2) {
      uint32_t v[2][4];
      float slope[2][4][2];
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) ptx::ldmatrix(v[c], h ^ ((b + c) << 5));
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) slopes_of<decltype(f), T>(v[c][i], slope[c][i]);
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          v[c][i] =
              ptx::pack(T{}, acc[8 * (b + c) + 2 * i] * slope[c][i][0], acc[8 * (b + c) + 2 * i + 1] * slope[c][i][1]);
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) ptx::stmatrix(to ^ ((b + c) << 5), v[c]);
    }
  };
  with_slope(act, by_slopes, Activations{});
}

// What a step has written, to whoever waits for it. One thread of the warpgroup, after its barrier.
template <class T, int kPanels>
__device__ __forceinline__ void Block<T, kPanels>::send(uint32_t step, uint32_t r, int tile) {
  if (step == 0) {
    ptx::mbarrier_arrive(&s.full[r][kDz + 1]);
  } else if (plan().bottom) {
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
      ptx::tensor_store(&maps.dx, p * kPanel, tile * kTileRows + int(r) * kRows, s.buffer[r][kOut][p]);
    ptx::bulk_commit_group();
  } else {
    const uint32_t below = plan().below, to = kDz + plan().below_buffer;
    ptx::bulk_copy_to_cluster(ptx::cluster_address(s.buffer[r][to], below), s.buffer[r][kOut], kBytes,
                              ptx::cluster_address(&s.full[r][to], below));
  }
}

// Rows 64 r .. of a tile through this block's layers.
template <class T, int kPanels>
template <bool kSingle>
__device__ __forceinline__ void Block<T, kPanels>::take_tile(uint32_t r, uint32_t n, int tile) {
  const uint32_t fragment = fragment_of(thread_anew());
#pragma unroll 1
  for (uint32_t step = kSingle ? 1 : 0; step < 2; ++step) {
    const uint32_t b = buffer_of<kSingle>(step, n), phase = phase_of<kSingle>(n);
    const uint32_t dz = ptx::shared_address(s.buffer[r][kDz + b]), h = ptx::shared_address(s.buffer[r][kH + b]);
    const bool slopes = !kSingle && (step == 0 || !plan().bottom),  // a single layer is the lowest
        forms = slopes || a.want_dx;
    wait_or_trap(&s.full[r][kDz + b], phase);
    if (forms) {
      float acc[kPanels][kPanel / 2];
      start_products(acc, dz, step);
      wait_for_room(step, r, n);
      wait_or_trap(&s.full[r][kH + b], phase);
      const uint32_t to = ptx::shared_address(s.buffer[r][step == 0 ? kDz + 1 : uint32_t(kOut)]);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        wait_for_panel(acc, p);
        form_dz<T>(acc[p], slopes ? h + p * kPanelBytes + fragment : 0, to + p * kPanelBytes + fragment, a.act);
      }
      ptx::fence_proxy_async_shared();
      ptx::barrier_sync(1 + r, 128);
      if (threadIdx.x % 128 == 0) send(step, r, tile);
    } else {
      wait_or_trap(&s.full[r][kH + b], phase);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive(&s.empty[r][kDz + b]);
      ptx::mbarrier_arrive(&s.empty[r][kH + b]);
    }
  }
}

// Warpgroup r takes rows 64 r .. of every tile.
template <class T, int kPanels> template <bool kSingle> __device__ void Block<T, kPanels>::run_chain(uint32_t r) {
  wait_or_trap(&s.weights_full, 0);
  uint32_t n = 0;
  do {
    apart().template form_chunk<kSingle>(r, n);
    Block block = apart();
    for (; block.tile_of(n) < a.tiles && !block.in_next_chunk(n, r); ++n)
      block.template take_tile<kSingle>(r, n, block.tile_of(n));
    // Of the last chunk this block may have rows to form, and no tile.
  } while (int(forming(r).chunk) * kChunk < plan().tiles);
  if (threadIdx.x % 128 == 0) ptx::bulk_wait_group<0>();
  __syncwarp();
  block_ends();
  block_ends();
}

// --- the kernel ---

template <int kPanels> __device__ void initialise(SharedMemory<kPanels>& s, int cluster) {
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < kOut; ++i) {
      ptx::mbarrier_init(&s.full[r][i], 1);
      ptx::mbarrier_init(&s.empty[r][i], 8);  // warps: of the chain and of a dW warpgroup
    }
    for (uint64_t& room : s.room[r]) ptx::mbarrier_init(&room, 1);
  }
  ptx::mbarrier_init(&s.weights_full, 1);
  for (auto& of_warpgroup : s.input_full)
    for (uint64_t& full : of_warpgroup) ptx::mbarrier_init(&full, 1);
  ptx::mbarrier_init(&s.other_weights_full, 1);
  ptx::mbarrier_init(&s.chunk_formed, 2 * uint32_t(cluster));
  s.forming[0] = s.forming[1] = {};
  ptx::fence_mbarrier_init();
}

template <class T, int kPanels>
__global__ void __launch_bounds__(kThreads, 1)
    mlp_backward_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  uint32_t base = ptx::shared_address(memory);
  ptx::settle(base);  // else the compiler forms the address of the block's window anew at every access
  auto& s = *static_cast<SharedMemory<kPanels>*>(__cvta_shared_to_generic(base));
  Block<T, kPanels> block{s, maps, a};
  if (threadIdx.x == 0) {
    initialise(s, a.cluster);
    block.make_plan(a.cluster > 1 ? ptx::cluster_rank() : 0);
  }
  __syncwarp();
  ptx::cluster_arrive();
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  if (threadIdx.x == 0) block.start_loading_weights();
  __syncwarp();
  ptx::cluster_wait();  // the barriers are ready, also the neighbours'
  const Plan& plan = s.plan;
  const bool upper_normed = plan.pair && a.layer[plan.upper].g != nullptr,
             lower_normed = a.layer[plan.lower].g != nullptr;
  if (plan.entry) block.form_identity();
  const auto form = [&](int slot, int layer) {
    block.template form_weights<kThreads>(layer, threadIdx.x, ptx::shared_address(s.weight[slot]),
                                          sizeof(s.weight[0][0]));
  };
  if (upper_normed) form(0, plan.upper);
  if (lower_normed) form(1, plan.lower);
  if (plan.entry || upper_normed || lower_normed) {
    ptx::fence_proxy_async_shared();
    __syncthreads();
  }
  const uint32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler then knows it for uniform
  if (warpgroup < 2) {
    ptx::increase_registers<kDwRegisters>();
    if (block.single())
      block.template hold_dw<true>(warpgroup);
    else if (warpgroup == 1 || block.plan().pair)
      block.template hold_dw<false>(warpgroup);
    else
      block.only_fill(warpgroup);
  } else {
    ptx::decrease_registers<kChainRegisters>();
    block.single() ? block.template run_chain<true>(warpgroup - 2) : block.template run_chain<false>(warpgroup - 2);
  }
}

using Kernel = void (*)(Maps, Arguments);
Kernel forming_kernel(DType type, int panels);

}  // namespace ingot::cuda::backward_sm90
