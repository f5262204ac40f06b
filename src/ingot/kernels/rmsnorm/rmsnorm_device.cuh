#pragma once
// Device code shared by the forward and the backward kernels.
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/rmsnorm/parts/row_map.h"

namespace ingot::cuda {

struct RowIndex {
  uint32_t outer, inner;
};

// Rows are numbered over (outer, inner) when the leading dimensions do not collapse into a single dimension: `inner`
// above 0.
__device__ inline RowIndex row_index(uint32_t inner, int64_t row) {
  if (inner == 0) return {uint32_t(row), 0};
  return {uint32_t(row) / inner, uint32_t(row) % inner};
}
__device__ inline int64_t offset(const RowMap& map, RowIndex at) {
  return at.outer * map.outer_stride + at.inner * map.inner_stride;
}

// Calls use(T{}) with the weight's type. Uniform over the grid; cheaper than three times as many kernels.
template <class Use> __device__ inline void with_weight_type(DType t, Use&& use) {
  if (t == DType::f32)
    use(float{});
  else if (t == DType::bf16)
    use(bf16{});
  else
    use(f16{});
}

__device__ inline float rstd_of(float sum_of_squares, float cols, float eps) {
  return __frsqrt_rn(__fdiv_rn(sum_of_squares, cols) + eps);
}

}  // namespace ingot::cuda
