#pragma once
// 64 rows in the registers of a warpgroup: loading of x, and products with W in shared memory.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/mlp/parts/forward_params.h"
#include "ingot/kernels/mlp/parts/weight_norm_tile.cuh"

namespace ingot::cuda::mlp_parts {

using Params = MlpForwardParams;
using LayerParams = MlpLayerParams;

constexpr uint32_t kTileRows = 64, kWarpRows = 16;  // rows per warpgroup and per warp

// The stored values of a layer in a training forward pass: in the network's type, or in a type known only at run time.
enum class Save { nothing, own_type, any_type };

template <int kWidth> constexpr uint32_t weight_bytes() { return kWidth * kWidth * 2; }
template <int kWidth> constexpr uint32_t panel_bytes() { return kWidth * 128; }        // 64 of the columns
template <int kWidth> constexpr uint32_t x_bytes() { return kWarpRows * kWidth * 2; }  // staging memory of a warp
constexpr uint32_t kStagingBytes = kWarpRows * 64;  // 32 columns of a warp's saved values

// One warpgroup's 64 rows in the layout of A: step k / 16, then the four registers of a step.
template <int kWidth> using Rows = uint32_t[kWidth / 16][4];
template <int kWidth> using Sums = float[kWidth / 2];

__device__ inline uint32_t lane() { return threadIdx.x % 32; }
// The warp's first row in a tile.
__device__ inline int64_t first_row(uint32_t tile) {
  return int64_t(tile) * kTileRows + threadIdx.x % 128 / 32 * kWarpRows;
}
// The place of the lane's row of matrix lane / 8 in A's 16 rows and 16 columns, for ldmatrix and stmatrix: matrices 0
// and 2 are the upper 8 rows, 2 and 3 the right 8 columns.
__device__ inline uint32_t matrix_row() { return lane() % 16; }
__device__ inline uint32_t matrix_chunk() { return lane() / 16; }

// Loads the warp's 16 rows of x into its own shared memory: panels of 64 columns, swizzled by 128 bytes.
template <int kWidth> struct ArrivingRows {
  static constexpr uint32_t kPanel = kWarpRows * 128;
  char* rows;
  uint64_t* barrier;
  uint32_t parity = 0;

  __device__ __forceinline__ void prefetch(const CUtensorMap& x, uint32_t tile) const {
    if (lane() != 0) return;
#pragma unroll
    for (int i = 0; i < kWidth / 64; ++i) ptx::tensor_prefetch(&x, 64 * i, int(first_row(tile)));
  }
  __device__ __forceinline__ void load(const CUtensorMap& x, uint32_t tile) const {
    if (lane() != 0) return;
    ptx::mbarrier_arrive_expect_tx(barrier, x_bytes<kWidth>());
#pragma unroll
    for (int i = 0; i < kWidth / 64; ++i)
      ptx::tensor_load(rows + i * kPanel, &x, 64 * i, int(first_row(tile)), barrier);
  }
  __device__ __forceinline__ void take(Rows<kWidth>& a) {
    tile::wait_warp_or_trap(barrier, parity);
    parity ^= 1;
    const uint32_t from =
        ptx::shared_address(rows) + tile::swizzled<tile::Swizzle::b128>(matrix_row(), matrix_chunk() * 16);
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k) ptx::ldmatrix(a[k], (from ^ k % 4 * 32) + k / 4 * kPanel);
  }
};

// The feature of column (or weight row) c of the last product.
__device__ inline uint32_t last_feature(uint32_t c) { return c / 32 * 32 + c % 8 / 2 * 8 + c / 8 % 4 * 2 + c % 2; }

// An element of a bias or a gain: zero where absent, and beyond the last feature.
template <class T> __device__ __forceinline__ T element(const void* vector, const LayerParams& of, uint32_t n) {
  return vector != nullptr && n < of.n ? static_cast<const T*>(vector)[n] : tile::from_float<T>(0.f);
}

// The factor of a layer's sums and bias. Softplus in pairs with a bias works on h log2 e, so that the factor of its
// exponentials costs nothing.
struct Domain {
  float sums, bias;
};
template <bool kTimesLog2e> __device__ __forceinline__ Domain domain_of(int l, int layers) {
  if (!kTimesLog2e) return {1, 1};
  if (l + 1 == layers) return {l == 0 ? 1 : 1 / detail::kLog2e, 1};
  return {l == 0 ? detail::kLog2e : 1, detail::kLog2e};
}

// The linear map of the sums' columns before the activation: none; times the layer's factor plus the bias; or times a
// scale per column plus the bias.
enum class Finish { none, bias, scale_and_bias };
struct Vectors {
  const float *bias, *scale;  // for all layers' columns
};
template <int kWidth, Finish kFinish>
__device__ __forceinline__ void finish_block(Sums<kWidth>& d, int i, const Vectors& of, int l, float factor) {
  if constexpr (kFinish == Finish::none) return;
  const uint32_t from = uint32_t(l) * kWidth + 32 * i + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 b = *reinterpret_cast<const float2*>(of.bias + from + 8 * j);
    float2 s = {factor, factor};
    if constexpr (kFinish == Finish::scale_and_bias) s = *reinterpret_cast<const float2*>(of.scale + from + 8 * j);
    float* const at = d + 4 * (4 * i + j);
    at[0] = fmaf(at[0], s.x, b.x), at[1] = fmaf(at[1], s.y, b.y);
    at[2] = fmaf(at[2], s.x, b.x), at[3] = fmaf(at[3], s.y, b.y);
  }
}

// Issues d = a W^T without waiting. Only the lower half of a descriptor depends on the address.
template <class T, int kWidth>
__device__ __forceinline__ void multiply(Sums<kWidth>& d, const Rows<kWidth>& a, uint32_t weights, uint32_t upper) {
  using tile::Swizzle;
  ptx::fence_registers(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    const uint32_t lower =
        weights + uint32_t(tile::descriptor_step<tile::Major::k, Swizzle::b128>(16 * k, panel_bytes<kWidth>()));
    ptx::wgmma<T, kWidth>(d, a[k], uint64_t(upper) << 32 | lower, k > 0);
  }
  ptx::wgmma_commit_group();
}
template <int kWidth> __device__ __forceinline__ void wait(Sums<kWidth>& d, Rows<kWidth>& a) {
  ptx::wgmma_wait_group<0>();
  ptx::fence_registers(d);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) ptx::fence_registers(a[k]);
}

}  // namespace ingot::cuda::mlp_parts
