#pragma once
// Shared code of the few-rows kernels: rows of a batch as tiles in shared memory, and the weights.
//
// A tile of activations or gradients lies row by row in panels of 64 columns, swizzled; so does W, by its inputs. A
// block has a warpgroup for every 64 features; warp w multiplies features 16 w .. 16 w + 15 by all rows of the tile. An
// additional warp issues all copies in the order of need: an SM receives 64 bytes per cycle, so data needed first must
// not share this rate with data needed last, and a thread waits when all possible copies are in flight. With weight
// norm, eight more warps compute the layers' weights.
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
#include "ingot/kernels/mlp/parts/weight_norm_tile.cuh"
#include "ingot/kernels/mlp/to_128/few_rows.h"

namespace ingot::cuda::to_128_few_rows {

using namespace mlp_parts;

using ptx::Major;
using tile::operand;
using tile::Swizzle;
using tile::wait_warp_or_trap;

template <int kPanels> constexpr int kMultipliers = 128 * kPanels;  // threads, the first of a block
constexpr int kFormers = 256;
template <int kPanels> constexpr int threads(bool weight_norm) {
  return kMultipliers<kPanels> + 32 + (weight_norm ? kFormers : 0);
}
template <int kPanels> constexpr uint32_t kNormArrivals = kPanels* kPanel / kNormalisedRows;  // of a layer
enum class Role { multiply, copy, form_weights };
template <int kPanels> __device__ __forceinline__ Role role_of(uint32_t warp) {
  constexpr uint32_t kWarps = kMultipliers<kPanels> / 32;
  return warp < kWarps ? Role::multiply : warp == kWarps ? Role::copy : Role::form_weights;
}
__device__ __forceinline__ uint32_t warp_of_block() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }  // known uniform

// The addresses, in a tile of kRows rows, where the transposing ldmatrix and stmatrix find rows 0 .. 15 of a warp's 16
// features: a fragment of features by rows.
template <int kRows> __device__ __forceinline__ uint32_t tile_fragment(uint32_t warp, uint32_t lane) {
  return warp / 4 * kRows * 128 + (lane / 16 * 8 + lane % 8) * 128 +
         ((warp % 4 * 32 + lane / 8 % 2 * 16) ^ (lane % 8 << 4));
}

// A copy per panel of 64 columns, by a single thread.
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

// W = g v / |v| in place, by `warps` warps; this is warp number `warp`. Each 16 rows arrive at `normed`.
template <class T, int kPanels>
__device__ __forceinline__ void normalise(uint32_t w, const float* gain, uint64_t* normed, uint32_t warp,
                                          uint32_t warps) {
#pragma unroll 1
  for (uint32_t i = warp; i < kNormArrivals<kPanels>; i += warps) {
    normalise_rows<T, kPanels * kPanel>(w, i * kNormalisedRows, [&](uint32_t n) { return gain[n]; });
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(normed);
  }
}

}  // namespace ingot::cuda::to_128_few_rows
