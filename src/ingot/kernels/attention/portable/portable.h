#pragma once
// The portable variant of attention (docs/attention.md): mma.sync, ldmatrix and cp.async, for every GPU from compute
// capability 8.0 on. A block takes one tile of queries (or keys) of one head and needs at most 99 KB of shared memory.
#include "ingot/gpu/limits.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/attention/parts/walk.h"

namespace ingot::cuda::attention_portable {

using namespace attention_parts;

// An operand, which is read 16 bytes at a time. Rows and columns that do not exist are read as zeros.
struct Source {
  const void* data;
  Strides strides;
};

struct ForwardArguments {
  ForwardParams common;  // to all variants
  Source q, k, v;
};
struct ForwardKernel {
  void (*kernel)(const ForwardArguments);
  int rows, threads;
  int64_t smem;
};
template <class T> ForwardKernel forward_kernel(int width, const gpu::Limits& limits);

struct BackwardArguments {
  Walk walk;  // over tiles of queries, or of keys
  ScoreParams scores;
  Source q, k, v, dout;
  void *dq, *dk, *dv;
  Strides dq_strides, dk_strides, dv_strides;
  bool add_dv;  // adds to the old value, which was rounded too
};
struct BackwardKernel {
  void (*kernel)(const BackwardArguments);
  int rows, threads;  // rows: of a tile, queries or keys
  int64_t smem;
};
template <class T> BackwardKernel query_gradient_kernel(int width, const gpu::Limits& limits);
template <class T> BackwardKernel key_gradient_kernel(int width, bool capped, const gpu::Limits& limits);

// The bytes of shared memory that a block may have on every GPU from compute capability 8.0 on.
constexpr int64_t kMostMemory = 99 * 1024;
// Whether a multiprocessor has room for two blocks with this much shared memory, so that one block multiplies while the
// other one waits. The system takes 1 KB more for each block.
constexpr bool two_fit(int64_t memory, const gpu::Limits& limits) { return limits.smem_per_sm >= 2 * (memory + 1024); }

void forward(const Attention& a, const gpu::Limits& limits, Stream stream);
// delta: of attention_row_sums(), if there are queries.
void backward(const AttentionBackward& a, float* delta, const gpu::Limits& limits, Stream stream);

}  // namespace ingot::cuda::attention_portable
