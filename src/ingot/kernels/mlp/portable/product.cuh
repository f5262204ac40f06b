#pragma once
// The products of a tile of activations with a tile of a weight, both in shared memory.
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/kernels/mlp/portable/elements.cuh"
#include "ingot/kernels/mlp/portable/portable.h"

namespace ingot::cuda {
namespace {

// acc += in (kRows x reduction, shared memory) * tile (reduction x 128). A thread's sums are pairs of neighbouring
// columns: pair p is at (row(p), col(p)).

// The layout of the tile in shared memory, 16-bit types: forward [128 out][kRed], backward [kRed][128 out], in rows of
// 256 or 128 bytes whose 16-byte chunks are exchanged so that ldmatrix meets all banks.
template <bool kBackward, int kRed> __device__ inline uint32_t weight_offset(int row, int chunk) {
  constexpr int kRowBytes = 2 * (kBackward ? kPortableOut : kRed);
  return uint32_t(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
}

template <class T, int kRows> struct Product {
  static constexpr int kAcross = kRows >= 64 ? 2 : 1;                 // warps along the rows
  static constexpr int kRowTiles = kRows / kAcross / 16;              // 16 rows each, per warp
  static constexpr int kColTiles = kPortableOut / (8 / kAcross) / 8;  // 8 columns each, per warp
  static constexpr int kPairs = kRowTiles * kColTiles * 2;
  float acc[kRowTiles * kColTiles][4];

  __device__ static int warp_row() { return kAcross == 2 ? int(threadIdx.x / 128) * (kRows / 2) : 0; }
  __device__ static int warp_col() { return int(threadIdx.x / 32 % (8 / kAcross)) * kColTiles * 8; }
  __device__ static int row(int p) {
    return warp_row() + p / 2 / kColTiles * 16 + p % 2 * 8 + int(threadIdx.x % 32 / 4);
  }
  __device__ static int col(int p) { return warp_col() + p / 2 % kColTiles * 8 + int(threadIdx.x % 4) * 2; }
  __device__ float& value(int p, int i) { return acc[p / 2][p % 2 * 2 + i]; }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kRowTiles * kColTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] = 0;
  }

  template <bool kBackward, int kRed>
  __device__ void multiply(const T* in, int stride, int red0, int reduction, const T* weights) {
    const int lane = int(threadIdx.x % 32);
    const uint32_t a0 = ptx::shared_address(in + int64_t(warp_row() + lane % 16) * stride + red0 + lane / 16 * 8);
    const uint32_t w0 = ptx::shared_address(weights);
    for (int k = 0; k < reduction; k += 16) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix(a[m], a0 + uint32_t((m * 16 * stride + k) * sizeof(T)));
#pragma unroll
      for (int n = 0; n < kColTiles; n += 2) {
        uint32_t b[4];
        const int out = warp_col() + n * 8;
        if constexpr (kBackward)
          ptx::ldmatrix_trans(b, w0 + weight_offset<kBackward, kRed>(k + lane % 16, out / 8 + lane / 16));
        else
          ptx::ldmatrix(b, w0 + weight_offset<kBackward, kRed>(out + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          ptx::mma_m16n8k16(T{}, acc[m * kColTiles + n], a[m], {b[0], b[1]});
          ptx::mma_m16n8k16(T{}, acc[m * kColTiles + n + 1], a[m], {b[2], b[3]});
        }
      }
    }
  }
};

// f32: backward [32 reduction][128 out + 4]; forward [128 out][32 reduction + 4], where row n is found at
// (n % 4) * 32 + n / 4: a lane owns four neighbouring columns, and the lanes' rows then meet all banks.
constexpr int kF32Backward = kPortableOut + 4, kF32Forward = portable_reduction(4) + 4;
__device__ inline int f32_place(int n) { return n % 4 * 32 + n / 4; }
template <int kRows> struct Product<float, kRows> {
  static constexpr int kPerThread = kRows / 8, kPairs = kPerThread * 2;
  float acc[kPerThread][4];

  __device__ static int row(int p) { return int(threadIdx.x / 32) * kPerThread + p / 2; }
  __device__ static int col(int p) { return int(threadIdx.x % 32) * 4 + p % 2 * 2; }
  __device__ float& value(int p, int i) { return acc[p / 2][p % 2 * 2 + i]; }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] = 0;
  }

  template <bool kBackward, int kRed>
  __device__ void multiply(const float* in, int stride, int red0, int reduction, const float* weights) {
    const float* a = in + row(0) * stride + red0;
    const int lane = int(threadIdx.x % 32);
    // Sums of 32 products, then sums of these sums: several short sums lose less to rounding than a long sum.
    float part[kPerThread][4] = {};
#pragma unroll 1
    for (int k = 0; k < reduction; k += 4) {
      float w[4][4];  // w[k][out]
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float4 four;
        if constexpr (kBackward) {
          four = *reinterpret_cast<const float4*>(weights + (k + j) * kF32Backward + lane * 4);
          w[j][0] = four.x, w[j][1] = four.y, w[j][2] = four.z, w[j][3] = four.w;
        } else {
          four = *reinterpret_cast<const float4*>(weights + (j * 32 + lane) * kF32Forward + k);
          w[0][j] = four.x, w[1][j] = four.y, w[2][j] = four.z, w[3][j] = four.w;
        }
      }
      const float* at = a + k;  // a single register for all rows' addresses
#pragma unroll
      for (int i = 0; i < kPerThread; ++i, at += stride) {
        const float4 four = *reinterpret_cast<const float4*>(at);
        const float h[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int q = 0; q < 4; ++q)
#pragma unroll
          for (int j = 0; j < 4; ++j) part[i][j] = fmaf(h[q], w[q][j], part[i][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] += part[i][j];
  }
};

}  // namespace
}  // namespace ingot::cuda
