#pragma once
// The addresses of an operand's rows, for the CUDA kernels: the leading dimensions of all operands of a call are merged
// into at most (outer, inner).
#include <algorithm>
#include <cstdint>

#include "ingot/core/tensor.h"

namespace ingot::cuda {

struct RowMap {
  int64_t outer_stride = 0, inner_stride = 0;
};  // in elements

// The first `N` operands of a call, null where left out; all have the same shape.
template <int N> struct RowMaps {
  int64_t inner = 0;  // rows per outer index; 0: a single stride for all rows
  RowMap of[N];
};

template <int N> RowMaps<N> merge_rows(const char* op, const Tensor (&operand)[N]) {
  const Shape& shape = operand[0].shape;
  int64_t size[kMaxRank] = {}, stride[N][kMaxRank] = {};
  int groups = 0;
  for (int d = 0; d + 1 < shape.rank; ++d) {
    if (shape.dim[d] == 1) continue;  // the stride of a single row does not matter
    bool merge = groups > 0;
    for (int o = 0; o < N && merge; ++o)
      if (operand[o]) merge = stride[o][groups - 1] == operand[o].stride[d] * shape.dim[d];
    if (merge) --groups;
    size[groups] = (merge ? size[groups] : 1) * shape.dim[d];
    for (int o = 0; o < N; ++o)
      if (operand[o]) stride[o][groups] = operand[o].stride[d];
    ++groups;
  }
  if (groups > 2)
    fail(ErrorCode::unsupported, op, ": found rows of shape ", shape,
         " whose leading dimensions need three strides, expected at most two on a GPU");
  RowMaps<N> maps;
  maps.inner = groups == 2 ? size[1] : 0;
  for (int o = 0; o < N; ++o)
    maps.of[o] = groups == 2 ? RowMap{stride[o][0], stride[o][1]} : RowMap{groups == 1 ? stride[o][0] : 0, 0};
  return maps;
}

// Whether vectors of `per_vec` elements can be moved at the start of every row; true for an operand left out.
inline bool rows_aligned(const Tensor& t, int64_t per_vec) {
  if (!t) return true;
  const int64_t width = std::min<int64_t>(16, per_vec * size_of(t.dtype));
  if (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(width) != 0) return false;
  for (int d = 0; d + 1 < t.rank(); ++d)
    if (t.shape.dim[d] > 1 && t.stride[d] * size_of(t.dtype) % width != 0) return false;
  return true;
}

template <class Use> auto with_cuda_float_type(const char* op, DType t, Use&& use) {
  switch (t) {
    case DType::f32: return use(float{});
    case DType::bf16: return use(bf16{});
    case DType::f16: return use(f16{});
    default: fail(ErrorCode::unsupported, op, ": found dtype ", t, " on a GPU, expected f32, bf16 or f16");
  }
}

}  // namespace ingot::cuda
