#pragma once
// Weight norm of a W in shared memory in the layout of the tensor cores: panels of 64 columns, swizzled by 128 bytes.
// The tensor cores sum the squares, as the diagonal of 16 rows times themselves. A row's scale may therefore differ
// from g weight_inverse_norm() in the last bits of fp32, and about 0.1 % of the elements of W by a rounding.
#include <cstdint>

#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/mlp/parts/forward_params.h"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"

namespace ingot::cuda::mlp_parts {

// Prefetches a layer's weights into L2, each block a part, while kernels with possible writes to the weights still run:
// all writes go through L2, so no stale data can be read later. One thread.
__device__ __forceinline__ void prefetch_weights(const MlpForwardParams& p, uint32_t l) {
  constexpr uint32_t kPart = 512;
  const uint32_t bytes = p.layer[l].n * p.layer[l].k * 2;  // a multiple of 128
  for (uint32_t at = blockIdx.x * kPart; at < bytes; at += gridDim.x * kPart)
    ptx::prefetch_to_l2(static_cast<const char*>(p.layer[l].w) + at, min(kPart, bytes - at));
}

constexpr uint32_t kNormalisedRows = 16;  // rows per warp at a time

// A warp loads 16 rows of v, `row` for lane % 16, in the layout of A: registers 0 and 2 of a step belong to lane / 4's
// row, 1 and 3 to the row of the lane 8 further.
template <class T, int kWidth> struct RowsOfV {
  static constexpr int kSteps = kWidth / 16;
  uint32_t from, v[kSteps][4];

  __device__ __forceinline__ uint32_t place(int k) const { return (from ^ k % 4 * 32) + k / 4 * kWidth * 128; }
  __device__ __forceinline__ static uint32_t first_place(uint32_t panels, uint32_t row) {
    return panels + tile::swizzled<tile::Swizzle::b128>(row, threadIdx.x % 32 / 16 * 16);
  }
  __device__ __forceinline__ RowsOfV(uint32_t panels, uint32_t row) : from(first_place(panels, row)) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) ptx::ldmatrix(v[k], place(k));
  }
  // 1 / |v| of both rows.
  __device__ __forceinline__ void inverse_norms(float (&of)[2]) const {
    const uint32_t lane = threadIdx.x % 32, row = lane / 4;
    // The upper and the lower 8 rows, each in two chains of products.
    float products[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::mma_m16n8k16(T{}, products[half][k % 2], v[k], {v[k][half], v[k][2 + half]});
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto sum = [&](int i) { return products[half][0][2 * half + i] + products[half][1][2 * half + i]; };
      // Column `row` of the product's 8 lies in lane row / 2 of the row's four lanes.
      const float squares = __shfl_sync(~0u, row % 2 ? sum(1) : sum(0), int(lane / 4 * 4 + row / 2));
      of[half] = ptx::rsqrt_approx(squares + kWeightNormEps);
    }
  }
  __device__ __forceinline__ void multiply(int k, const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[k][i] = scaled(v[k][i], {scale[i % 2], scale[i % 2]});
  }
  static __device__ __forceinline__ uint32_t scaled(uint32_t two, float2 by) {
    float x[2];
    ptx::unpack(T{}, two, x[0], x[1]);
    return ptx::pack(T{}, x[0] * by.x, x[1] * by.y);
  }
  // Writes both rows' W over v. Readers through the copy engine's or the tensor cores' proxy need their fence.
  __device__ __forceinline__ void store_times(const float (&scale)[2]) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      multiply(k, scale);
      ptx::stmatrix(place(k), v[k]);
    }
  }
};

// W = gain(row) v / |v| in place, of rows first .. first + 15 by a warp.
template <class T, int kWidth, class Gain>
__device__ __forceinline__ void normalise_rows(uint32_t panels, uint32_t first, Gain&& gain) {
  RowsOfV<T, kWidth> rows(panels, first + threadIdx.x % 16);
  float scale[2];
  rows.inverse_norms(scale);
#pragma unroll
  for (int half = 0; half < 2; ++half) scale[half] *= gain(first + threadIdx.x % 32 / 4 + 8 * half);
  rows.store_times(scale);
}

}  // namespace ingot::cuda::mlp_parts
