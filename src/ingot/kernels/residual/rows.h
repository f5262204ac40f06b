#pragma once
// Shared code of the pointwise operations of residual streams on the CPU: rows, blocks of rows, sums over tokens,
// checks.
#include <algorithm>
#include <cmath>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/residual/workspace.h"

// These loops read each operand once and do a few operations per element, so their speed is the speed of memory. An
// output may be an input at the same index only. ivdep states this; otherwise the compiler uses scalar code for y = x.
#define INGOT_POINTWISE _Pragma("GCC ivdep")

namespace ingot::residual {

constexpr int64_t kBlock = 16384;  // elements per operand and task: with five operands, about an L2 cache
constexpr int64_t kMaxBlocks = 128;

// Rows per task; a function of the sizes alone, so that sums over tokens never depend on the number of threads.
inline int64_t block_rows(int64_t rows, int64_t cols) {
  const int64_t by_cache = std::max<int64_t>(8, kBlock / std::max<int64_t>(1, cols));
  return std::max(by_cache, (rows + kMaxBlocks - 1) / kMaxBlocks);
}
inline int64_t block_count(int64_t rows, int64_t cols) {
  return (rows + block_rows(rows, cols) - 1) / block_rows(rows, cols);
}

template <class T> struct Rows {
  explicit Rows(const Tensor& t) : data(t ? t.ptr<T>() : nullptr), stride(t ? t.row_stride() : 0) {}
  T* operator[](int64_t t) const { return data + t * stride; }
  T* data;
  int64_t stride;
};

// Memory for one call: N sums per block and channel, and `vectors` vectors with a number per channel.
template <class T> T* workspace(int64_t rows, int64_t cols, int sums, int vectors) {
  const int64_t n = (block_count(rows, cols) * sums + vectors) * cols;
  return static_cast<T*>(thread_scratch(0, std::max<int64_t>(1, n) * int64_t(sizeof(T))));
}

template <class T> const T* or_ones(const Tensor& t, int64_t cols, T* ones) {
  if (t) return t.ptr<T>();
  std::fill(ones, ones + cols, T(1));
  return ones;
}

template <class T> T logistic(T x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }

// Calls block(begin, end, sums) for blocks of rows, sums being N vectors over channels, initially zero; then finish(c,
// total) for every channel, each total the blocks' sums added in order, in fp64.
template <int N, class T, class Block, class Finish>
void reduce_columns(int64_t rows, int64_t cols, T* partials, Block&& block, Finish&& finish) {
  const int64_t step = block_rows(rows, cols), blocks = block_count(rows, cols);
  parallel_for(rows, step, [&](int64_t begin, int64_t end) {
    T* sums = partials + begin / step * N * cols;
    std::fill(sums, sums + N * cols, T(0));
    block(begin, end, sums);
  });
  constexpr int64_t kChunk = 64;
  for (int64_t first = 0; first < cols; first += kChunk) {
    const int64_t width = std::min(kChunk, cols - first);
    double total[N][kChunk] = {};
    for (int64_t b = 0; b < blocks; ++b)
      for (int n = 0; n < N; ++n)
        for (int64_t c = 0; c < width; ++c) total[n][c] += double(partials[(b * N + n) * cols + first + c]);
    for (int64_t c = 0; c < width; ++c) {
      double one[N];
      for (int n = 0; n < N; ++n) one[n] = total[n][c];
      finish(first + c, one);
    }
  }
}

template <class Block> void for_blocks(int64_t rows, int64_t cols, Block&& block) {
  parallel_for(rows, block_rows(rows, cols), [&](int64_t begin, int64_t end) { block(begin, end); });
}

inline void check_matrix(const Tensor& t, const Tensor& like, const char* what) {
  INGOT_CHECK(t.shape == like.shape && t.rank() > 0, what, ": found shape ", t.shape, ", expected ", like.shape);
  INGOT_CHECK_EQ(t.dtype, like.dtype, what, " dtype");
  INGOT_CHECK_EQ(t.device, like.device, what, " device");
  INGOT_CHECK(t.rows_uniform() || t.numel() == 0, what, ": found strides that one row stride cannot express, shape ",
              t.shape);
}
inline void check_vector(const Tensor& t, const Tensor& like, Shape shape, const char* what) {
  INGOT_CHECK(t.shape == shape, what, ": found shape ", t.shape, ", expected ", shape);
  INGOT_CHECK_EQ(t.dtype, like.dtype == DType::f64 ? DType::f64 : DType::f32, what, " dtype");
  INGOT_CHECK_EQ(t.device, like.device, what, " device");
  INGOT_CHECK(t.contiguous(), what, ": found a strided vector, expected a contiguous one");
}
inline void check_channels(const Tensor& t, const Tensor& like, const char* what) {
  check_vector(t, like, Shape{like.cols()}, what);
}
inline void check_channels_or_none(const Tensor& t, const Tensor& like, const char* what) {
  if (t) check_channels(t, like, what);
}

inline void check_workspace(const Tensor& workspace, const Tensor& like, const char* op) {
  const int64_t need = residual_workspace_bytes(like.rows(), like.cols(), like.device);
  if (need == 0) return;
  INGOT_CHECK_GE(workspace ? workspace.bytes() : 0, need, op, ": bytes of workspace");
  INGOT_CHECK(workspace.device == like.device && workspace.contiguous(), op, ": found a workspace on ",
              workspace.device, ", expected it contiguous on ", like.device);
}

}  // namespace ingot::residual
