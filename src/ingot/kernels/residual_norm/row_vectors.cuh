#pragma once
// A row in the registers of a warp: every lane has V vectors of eight columns, 32 vectors apart.
#include <cstdint>

#include "ingot/gpu/tile/row_units.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/residual/columns.cuh"

namespace ingot::cuda::residual_norm_kernels {

using residual::Channels;
using residual::kThreads;

constexpr int kWarps = kThreads / 32, kVector = 8;  // columns of a vector
constexpr int kMostVectors = 4;                     // vectors of a lane, which allows rows of 1,024
constexpr int64_t kBlocks = 528;                    // four per SM of an H200; sums over tokens have this many parts

// The rows of a matrix, read and written a vector at a time; or none.
template <class T> struct Rows {
  Rows(const Tensor& t) : data(t ? static_cast<T*>(t.data) : nullptr), stride(t ? t.row_stride() : 0) {}
  T* data;
  int64_t stride;
  __device__ void load(int64_t row, int c, tile::Vec<T, kVector>& v) const {
    tile::load_streaming(v, data + row * stride + c);
  }
  __device__ void store(int64_t row, int c, const tile::Vec<T, kVector>& v) const {
    tile::store(data + row * stride + c, v, false);
  }
};

// The factors of a lane's columns: 1 where there are no factors, 0 behind the last column.
template <int V> struct Factors {
  float of[V][kVector];
  __device__ void load(const Channels& from, int cols) {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const int c = (v * 32 + int(threadIdx.x % 32)) * kVector;
        of[v][k] = c >= cols ? 0.f : from.data != nullptr ? from.data[c + k] : 1.f;
      }
  }
};

// x rounded to T, as the next reader sees x.
template <class T> __device__ inline tile::Vec<T, kVector> rounded(float (&x)[kVector]) {
  const tile::Vec<T, kVector> v = tile::from_float<T>(x);
  tile::to_float(v, x);
  return v;
}

// The first column of a lane's vector v.
__device__ inline int column_of(int lane, int v) { return (v * 32 + lane) * kVector; }

}  // namespace ingot::cuda::residual_norm_kernels
