#pragma once
// The products of experts without tensor cores: any type, any strides, any GPU, and the kernel that the emulator runs.
// A block of 256 threads computes tiles of 64 x 64 sums in fp32, 16 each, from panels of 16 steps of K in shared
// memory. Every sum is formed by one thread in the order of K, so results repeat bit for bit.
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"

namespace ingot::cuda::expert_portable {

constexpr int kThreads = 256, kSide = 64, kSteps = 16, kAcross = 16, kEach = kSide / kAcross;

// A matrix of (rows, K), or one for each expert: element (i, k) lies at i * row + k * step.
template <class T> struct Operand {
  const T* data = nullptr;
  int64_t row = 0, step = 0, matrix = 0;
};
template <class T> struct Product {
  Operand<T> a, b;
  T* c = nullptr;
  int64_t c_row = 0, c_matrix = 0;
  const T* bias = nullptr;  // (experts, n)
  gemm::GroupOffsets at;
  int64_t m = 0, n = 0, k = 0;  // the rows of all experts are m, or with sums_rows k
  bool sums_rows = false;       // every expert has a product, which sums over the rows of the expert
  bool adds = false;
};

// The place of a tile: its product, its first row and column, the end of its rows, and the rows of K.
struct TileAt {
  uint32_t expert, m, n, m_end;
  int64_t k_begin, k_end;
};
// Tiles of 64 rows of one expert, expert after expert, and then of the rows behind the last expert's; or the tiles of
// every expert's matrix.
template <class T> __device__ bool find_tile(const Product<T>& p, uint32_t i, TileAt& t) {
  const uint32_t n_tiles = uint32_t((p.n + kSide - 1) / kSide);
  if (p.sums_rows) {
    const uint32_t m_tiles = uint32_t((p.m + kSide - 1) / kSide), expert = i / (m_tiles * n_tiles);
    if (expert >= p.at.groups) return false;
    const uint32_t in = i - expert * m_tiles * n_tiles;
    const int64_t begin = p.at.begin(expert);
    t = {expert, in / n_tiles * kSide, in % n_tiles * kSide, uint32_t(p.m), begin, begin + p.at.size(expert)};
    return true;
  }
  for (uint32_t expert = 0; expert <= p.at.groups; ++expert) {
    const uint32_t here = (p.at.size(expert) + kSide - 1) / kSide * n_tiles;
    if (i < here) {
      t = {expert,
           p.at.begin(expert) + i / n_tiles * kSide,
           i % n_tiles * kSide,
           p.at.end(expert),
           0,
           expert < p.at.groups ? p.k : 0};
      return true;
    }
    i -= here;
  }
  return false;
}

// One panel of an operand: 64 rows by 16 steps, zeros beyond the ends. Neighbouring threads read neighbouring elements.
using Panel = float[kSteps][kSide + 1];
template <class T>
__device__ void load_panel(Panel& to, const Operand<T>& from, const T* data, int64_t row, int64_t rows, int64_t k,
                           int64_t k_end) {
  const bool along_k = from.step == 1;
  for (int i = int(threadIdx.x); i < kSide * kSteps; i += kThreads) {
    const int r = along_k ? i / kSteps : i % kSide, s = along_k ? i % kSteps : i / kSide;
    const bool inside = row + r < rows && k + s < k_end;
    to[s][r] = inside ? tile::to_float(data[(row + r) * from.row + (k + s) * from.step]) : 0.f;
  }
}

template <class T> __global__ void __launch_bounds__(kThreads) product_kernel(const Product<T> p) {
  struct Memory {
    Panel a, b;
  };
  auto& memory = tile::shared<Memory>();
  ptx::wait_for_earlier_kernels();
  const int down = int(threadIdx.x) / kAcross, across = int(threadIdx.x) % kAcross;
  TileAt t;
  for (uint32_t i = blockIdx.x; find_tile(p, i, t); i += gridDim.x) {
    // a has the rows of x or dy, b the expert's matrix. With sums_rows a is dy and b is x, and their rows are K.
    const T* const a = p.a.data;
    const T* const b = p.b.data + (p.sums_rows ? 0 : int64_t(t.expert) * p.b.matrix);
    float sums[kEach][kEach] = {};
    for (int64_t k = t.k_begin; k < t.k_end; k += kSteps) {
      __syncthreads();  // all threads have read the preceding panels
      load_panel(memory.a, p.a, a, t.m, t.m_end, k, t.k_end);
      load_panel(memory.b, p.b, b, t.n, p.n, k, t.k_end);
      __syncthreads();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float of_a[kEach], of_b[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          of_a[j] = memory.a[s][down + kAcross * j];
          of_b[j] = memory.b[s][across + kAcross * j];
        }
#pragma unroll
        for (int r = 0; r < kEach; ++r)
#pragma unroll
          for (int c = 0; c < kEach; ++c) sums[r][c] = fmaf(of_a[r], of_b[c], sums[r][c]);
      }
    }
    T* const c = p.c + (p.sums_rows ? int64_t(t.expert) * p.c_matrix : 0);
#pragma unroll
    for (int r = 0; r < kEach; ++r)
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t row = t.m + down + kAcross * r, column = t.n + across + kAcross * j;
        if (row >= t.m_end || column >= p.n) continue;
        float v = sums[r][j];
        if (p.bias != nullptr && t.expert < p.at.groups) v += tile::to_float(p.bias[t.expert * p.n + column]);
        T* const to = c + row * p.c_row + column;
        *to = tile::from_float<T>(p.adds ? tile::to_float(*to) + v : v);
      }
  }
}

template <class T> void launch(const char* name, const Product<T>& p, int device, Stream stream) {
  const int64_t n_tiles = (p.n + kSide - 1) / kSide;
  const int64_t m_tiles = p.sums_rows ? int64_t(p.at.groups) * ((p.m + kSide - 1) / kSide)
                                      : (int64_t(p.at.rows) + kSide - 1) / kSide + p.at.groups;
  if (m_tiles * n_tiles == 0) return;
  gpu::launch(name, product_kernel<T>,
              {.grid = m_tiles * n_tiles, .block = kThreads, .overlap = true, .device = device}, stream, p);
}

// db[e] (+)= the sum of expert e's rows of dy. A block has 32 columns of one expert; eight warps share the rows, and
// their sums are added in order.
constexpr int kColumns = 32, kWarps = kThreads / kColumns;
template <class T>
__global__ void __launch_bounds__(kThreads)
    bias_gradient_kernel(const T* dy, int64_t stride, gemm::GroupOffsets at, int64_t n, T* db, bool adds) {
  struct Memory {
    float sum[kWarps][kColumns];
  };
  auto& memory = tile::shared<Memory>();
  ptx::wait_for_earlier_kernels();
  const int64_t blocks = (n + kColumns - 1) / kColumns;
  const uint32_t expert = uint32_t(blockIdx.x / blocks), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = blockIdx.x % blocks * kColumns + lane, end = int64_t(at.begin(expert)) + at.size(expert);
  float sum = 0;
  if (column < n)
#pragma unroll 4
    for (int64_t r = at.begin(expert) + warp; r < end; r += kWarps) sum += tile::to_float(dy[r * stride + column]);
  memory.sum[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= n) return;
  for (int w = 1; w < kWarps; ++w) sum += memory.sum[w][lane];
  T* const to = db + int64_t(expert) * n + column;
  *to = tile::from_float<T>(adds ? tile::to_float(*to) + sum : sum);
}
template <class T>
void launch_bias_gradient(const char* name, const Tensor& dy, const gemm::GroupOffsets& at, const Tensor& db, bool adds,
                          Stream stream) {
  if (db.numel() == 0) return;
  gpu::launch(name, bias_gradient_kernel<T>,
              {.grid = int64_t(at.groups) * ((db.cols() + kColumns - 1) / kColumns),
               .block = kThreads,
               .overlap = true,
               .device = db.device.index},
              stream, dy.ptr<T>(), dy.row_stride(), at, db.cols(), db.ptr<T>(), adds);
}

}  // namespace ingot::cuda::expert_portable
