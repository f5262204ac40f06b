#pragma once
// What the few-rows kernels share: rows of a batch as tiles in shared memory, and the weights that they meet.
//
// A tile of activations or gradients lies row by row in panels of 64 columns, swizzled; so does W, by its inputs. A
// block has a warpgroup for every 64 features; warp w multiplies features 16 w .. 16 w + 15 by all rows of the tile.
// One more warp does all copies, in the order in which they are needed: an SM takes in 64 bytes a cycle, so what is
// needed first must not share that with what is needed last, and a thread that asks for more than is coming waits. With
// weight norm, four more form the layers' weights.
#include <cuda.h>

#include <cstdint>

#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/mlp/mlp_few_rows.h"
#include "ingot/kernels/mlp/mlp_weights.cuh"

namespace ingot::cuda::few_rows {

using ptx::Major;
using tile::operand;
using tile::Swizzle;
using tile::wait_warp_or_trap;

template <int kPanels> constexpr int kMultipliers = 128 * kPanels;  // threads, the first of a block
constexpr int kFormers = 128;                                       // more would leave the others too few registers
template <int kPanels> constexpr int threads(bool weight_norm) {
  return kMultipliers<kPanels> + 32 + (weight_norm ? kFormers : 0);
}
enum class Role { multiply, copy, form_weights };
template <int kPanels> __device__ __forceinline__ Role role_of(uint32_t warp) {
  constexpr uint32_t kWarps = kMultipliers<kPanels> / 32;
  return warp < kWarps ? Role::multiply : warp == kWarps ? Role::copy : Role::form_weights;
}
__device__ __forceinline__ uint32_t warp_of_block() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }  // known uniform

// Where in a tile of kRows rows the transposing ldmatrix and stmatrix find rows 0 .. 15 of a warp's 16 features: a
// fragment of features by rows.
template <int kRows> __device__ __forceinline__ uint32_t tile_fragment(uint32_t warp, uint32_t lane) {
  return warp / 4 * kRows * 128 + (lane / 16 * 8 + lane % 8) * 128 +
         ((warp % 4 * 32 + lane / 8 % 2 * 16) ^ (lane % 8 << 4));
}

// A panel of 64 columns a copy. One thread.
template <int kPanels, uint32_t kBytes>
__device__ __forceinline__ void load_tile(uint8_t (&to)[kPanels][kBytes], const CUtensorMap& map, int row,
                                          uint64_t* full) {
  ptx::mbarrier_arrive_expect_tx(full, kPanels * kBytes);
#pragma unroll
  for (int p = 0; p < kPanels; ++p) ptx::tensor_load(to[p], &map, p * kPanel, row, full);
}
template <int kPanels, uint32_t kBytes>
__device__ __forceinline__ void store_tile(const CUtensorMap& map, int row, const uint8_t (&from)[kPanels][kBytes]) {
#pragma unroll
  for (int p = 0; p < kPanels; ++p) ptx::tensor_store(&map, p * kPanel, row, from[p]);
}

// W = g v / |v| in place: 16 neighbouring lanes see 8 rows whole, and sum as weight_inverse_norm() does, except that
// each step of the butterfly leaves half of the rows to the other lane. By the threads of Role::form_weights, which
// others see only after a barrier.
template <class T, int kPanels> __device__ void normalise(uint32_t w, const float* gain) {
  constexpr uint32_t kWidth = kPanels * kPanel, kEach = 8, kApart = kFormers / 16;
  const uint32_t thread = threadIdx.x - kMultipliers<kPanels> - 32, chunk = thread % 16, lane = thread % 32;
  const uint32_t panel = w + chunk / 8 * kWidth * 128;
#pragma unroll 1
  for (uint32_t first = thread / 16; first < kWidth; first += kEach * kApart) {
    const auto address = [&](uint32_t i) {
      return panel + tile::swizzled<Swizzle::b128>(first + i * kApart, chunk % 8 * 16);
    };
    WeightChunk<T> v[kEach];
    float sum[kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if (chunk / 8 < kPanels) ptx::load_shared(v[i].word[0], address(i));
      sum[i] = squares(v[i]);
    }
#pragma unroll
    for (uint32_t bit = 8, half = kEach / 2; half > 0; bit /= 2, half /= 2)
#pragma unroll
      for (uint32_t i = 0; i < half; ++i) {
        const float mine = lane & bit ? sum[i + half] : sum[i], other = lane & bit ? sum[i] : sum[i + half];
        sum[i] = mine + __shfl_xor_sync(~0u, other, int(bit));
      }
    sum[0] += __shfl_xor_sync(~0u, sum[0], 1);
    // Bits 3, 2, 1 of the lane are those of its row's turn.
    const float scale = gain[first + chunk / 2 * kApart] * inverse_norm(sum[0]);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      v[i] = scaled(v[i], __shfl_sync(~0u, scale, int((lane & 16) + 2 * i)));
      if (chunk / 8 < kPanels) ptx::store_shared(address(i), v[i].word[0]);
    }
  }
  ptx::fence_proxy_async_shared();
}

}  // namespace ingot::cuda::few_rows
