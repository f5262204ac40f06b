#pragma once
// The products of tensors as the CPU code computes them.
#include <type_traits>

#include "ingot/core/tensor.h"
#include "ingot/kernels/linear/cpu/linear.simd.h"
#include "ingot/kernels/linear/linear.h"

namespace ingot::detail {

// The product c = op(a) op(b), where op transposes if requested.
template <class T>
Gemm<T> gemm_of(const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c,
                Products products) {
  Gemm<T> g;
  g.m = c.rows();
  g.n = c.cols();
  g.k = transpose_a ? a.rows() : a.cols();
  g.a = a.ptr<T>();
  (transpose_a ? g.a_col : g.a_row) = a.row_stride();
  (transpose_a ? g.a_row : g.a_col) = 1;
  g.b = b.ptr<T>();
  (transpose_b ? g.b_col : g.b_row) = b.row_stride();
  (transpose_b ? g.b_row : g.b_col) = 1;
  g.c = c.ptr<T>();
  g.ldc = c.row_stride();
  g.add = g.c;
  g.ld_add = g.ldc;
  g.round = products == Products::bf16 && std::is_same_v<T, float>;
  return g;
}

// Product i of matmul_each().
inline MatMul matmul_of(const MatMul& m, int64_t i) {
  MatMul one = m;
  for (Tensor* t : {&one.a, &one.b, &one.c}) *t = t->row(i);
  return one;
}

}  // namespace ingot::detail
