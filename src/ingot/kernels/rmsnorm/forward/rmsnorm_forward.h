#pragma once
// The parameters and the table of the forward kernels.
#include "ingot/gpu/tile/early_reads.cuh"
#include "ingot/kernels/rmsnorm/parts/row_map.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"

namespace ingot::cuda {

struct RmsNormParams {
  const void *x, *residual, *w;
  void *sum, *y;
  float* rstd;
  RowMap x_rows, residual_rows, sum_rows, y_rows;
  int64_t first_row, rows, cols;
  uint32_t inner;  // rows per outer index; 0: a single stride for all rows
  uint32_t vecs, group, cluster;
  float eps, scale, w_offset;
  uint32_t early_blocks;  // blocks that may start while an earlier kernel ends
  DType w_dtype;
  bool streaming;
  // Once a block has its row in registers, the block prefetches the first `ahead_bytes` of the row that its SM is
  // likely to take next, `ahead` rows on, so that memory is read while the block writes.
  uint32_t ahead, ahead_bytes;
};
// The parameters of the kernels for tensors larger than L2.
struct LargeParams {
  const void *x, *residual, *w;
  void *sum, *y;
  float* rstd;
  int64_t x_stride, residual_stride, sum_stride, y_stride;
  int64_t first_row, rows;
  uint32_t vecs, group, group_bits;  // group: the whole block, or a power of two up to a warp, 1 << group_bits
  float cols, eps, scale, w_offset;
  uint32_t cluster;  // blocks of a cluster, in the kernel that walks over rows
  tile::EarlyReads early;
};

// The kernel for x of type X, y and a configuration. An error names a configuration without a kernel.
template <class X> auto pick_rmsnorm(DType y, const RmsNormConfig& c, bool residual) -> void (*)(RmsNormParams);
template <class X> auto pick_rmsnorm_large(DType w, const RmsNormConfig& c, bool residual) -> void (*)(LargeParams);

}  // namespace ingot::cuda
