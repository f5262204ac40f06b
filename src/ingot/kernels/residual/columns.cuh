#pragma once
// The pointwise ops of residual streams on a GPU: blocks of threads walk down the rows, each thread with a vector of
// columns and their factors, and add up the columns' sums over tokens on the way.
//
// A body defines an op by these members:
//   static constexpr int kSums;                                 the number of sums over tokens
//   template <int N> struct Columns { float ...[N]; };          a thread's state for its columns
//   template <int N> Columns<N> columns(int64_t c) const;
//   template <int N> void row(const Columns<N>&, int64_t row, int64_t c, float (&sums)[kSums or 1][N]) const;
//   void finish(int64_t c, const double* total) const;          where kSums > 0
#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/elements.cuh"
#include "ingot/gpu/tile/row_units.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/residual/workspace.h"

namespace ingot::residual {

constexpr int kThreads = 256;

// A sum that several kernels must compute with the same bits.
__device__ inline float added(float x, float scale, float branch) { return fmaf(scale, branch, x); }
__device__ inline float mixed(float a, float x, float b, float x0) { return fmaf(a, x, b * x0); }

// (T, C) with any row stride; null where left out.
template <class T> struct Matrix {
  Matrix(const Tensor& t) : data(t ? static_cast<T*>(t.data) : nullptr), stride(t ? t.row_stride() : 0) {}
  T* data;
  int64_t stride;
  template <int N> __device__ void load(int64_t row, int64_t c, float (&x)[N]) const {
    tile::load_elements(x, data + row * stride + c);
  }
  template <int N> __device__ void store(int64_t row, int64_t c, const float (&x)[N]) const {
    tile::store_elements(data + row * stride + c, x);
  }
};

// A factor per channel; ones where left out.
struct Channels {
  Channels(const Tensor& t) : data(t ? static_cast<float*>(t.data) : nullptr) {}
  float* data;
  template <int N> __device__ void load(int64_t c, float (&x)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = data != nullptr ? data[c + n] : 1.f;
  }
  __device__ void add(int64_t c, double x) const {
    if (data != nullptr) data[c] += float(x);
  }
};

struct Walk {
  int64_t rows, cols;
  int vectors;                    // vectors of a row
  int tile, lanes;                // a block's vectors of a row, and rows, at a time
  int column_blocks, row_blocks;  // of the grid
  float* partial;                 // (row_blocks, sums, cols)
  double* total;                  // (sums, cols)
};

template <int N, class Body>
__global__ void __launch_bounds__(kThreads)
    walk_rows(const __grid_constant__ Body body, const __grid_constant__ Walk w) {
  constexpr int kSums = Body::kSums, kHeld = kSums > 0 ? kSums : 1;
  const int lane = int(threadIdx.x) / w.tile, here = int(threadIdx.x) % w.tile;
  const int vector = int(blockIdx.x % w.column_blocks) * w.tile + here;
  const int64_t row_block = blockIdx.x / w.column_blocks, c = int64_t(vector) * N;
  const bool works = lane < w.lanes && vector < w.vectors;
  float sums[kHeld][N] = {};
  if (works) {
    const auto columns = body.template columns<N>(c);
    for (int64_t row = row_block * w.lanes + lane; row < w.rows; row += int64_t(w.row_blocks) * w.lanes)
      body.template row<N>(columns, row, c, sums);
  }
  if constexpr (kSums > 0) {
    struct Memory {
      float of_threads[kThreads][N];
    };
    Memory& memory = tile::shared<Memory>();
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      __syncthreads();
#pragma unroll
      for (int n = 0; n < N; ++n) memory.of_threads[threadIdx.x][n] = sums[s][n];
      __syncthreads();
      if (!works || lane > 0) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float sum = 0;
        for (int l = 0; l < w.lanes; ++l) sum += memory.of_threads[l * w.tile + here][n];
        w.partial[(row_block * kSums + s) * w.cols + c + n] = sum;
      }
    }
  }
}

// Adds up the row blocks' sums: a warp's lanes are 32 columns, and the warps take blocks in turn. Only few blocks of
// threads have work, so each thread must have many loads in flight to hide the memory's latency.
constexpr int kPartialThreads = 1024;
template <class Body>
__global__ void __launch_bounds__(kPartialThreads)
    add_partials(const __grid_constant__ Body body, const __grid_constant__ Walk w) {
  constexpr int kSums = Body::kSums, kWarps = kPartialThreads / 32;
  struct Memory {
    double of_warps[kWarps][32];
  };
  Memory& memory = tile::shared<Memory>();
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int64_t c = int64_t(blockIdx.x) * 32 + lane;
  constexpr int kAhead = kSums > 2 ? 2 : 4;  // limited by the registers of a multiprocessor that is full of threads
  double total[kSums] = {};
  if (c < w.cols)
#pragma unroll kAhead
    for (int b = warp; b < w.row_blocks; b += kWarps)
#pragma unroll
      for (int s = 0; s < kSums; ++s) total[s] += double(w.partial[(int64_t(b) * kSums + s) * w.cols + c]);
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    memory.of_warps[warp][lane] = total[s];
    __syncthreads();
    if (warp == 0) {
      total[s] = 0;
      for (int i = 0; i < kWarps; ++i) total[s] += memory.of_warps[i][lane];
      if (c < w.cols) w.total[s * w.cols + c] = total[s];
    }
    __syncthreads();
  }
  if (warp == 0 && c < w.cols) body.finish(c, total);
}

inline Walk walk_of(int64_t rows, int64_t cols, int per_vector, int sums, const Tensor& workspace) {
  Walk w{.rows = rows, .cols = cols, .vectors = int(cols / per_vector)};
  w.tile = std::min(w.vectors, kThreads);
  w.lanes = kThreads / w.tile;
  w.column_blocks = (w.vectors + w.tile - 1) / w.tile;
  w.row_blocks = int(std::min((rows + w.lanes - 1) / w.lanes, kMostRowBlocks));
  if (sums > 0) {
    w.total = static_cast<double*>(workspace.data);
    w.partial = reinterpret_cast<float*>(w.total + kMostSums * cols);
  }
  return w;
}

// Runs `body` over all rows of the matrices, which have the first matrix's shape. Returns the launched grid.
template <class T, class Body>
Walk run(const char* op, const Body& body, std::initializer_list<Tensor> matrices, const Tensor& workspace,
         Stream stream) {
  constexpr int kVector = 16 / int(sizeof(T));
  const Tensor& like = *matrices.begin();
  const int64_t rows = like.rows(), cols = like.cols();
  if (rows == 0 || cols == 0) return {};
  INGOT_CHECK(cols <= INT32_MAX, op, ": found ", cols, " columns on a GPU, expected at most ", INT32_MAX);
  bool vectors = cols % kVector == 0;
  for (const Tensor& t : matrices) vectors = vectors && tile::rows_start_aligned(t, 16);
  const Walk w = walk_of(rows, cols, vectors ? kVector : 1, Body::kSums, workspace);
  const gpu::Launch grid{
      .grid = int64_t(w.column_blocks) * w.row_blocks, .block = kThreads, .device = like.device.index};
  if (vectors)
    gpu::launch(op, walk_rows<kVector, Body>, grid, stream, body, w);
  else
    gpu::launch(op, walk_rows<1, Body>, grid, stream, body, w);
  if constexpr (Body::kSums > 0)
    gpu::launch(op, add_partials<Body>,
                {.grid = (cols + 31) / 32, .block = kPartialThreads, .device = like.device.index}, stream, body, w);
  return w;
}

}  // namespace ingot::residual
