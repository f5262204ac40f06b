#include "ingot/kernels/linear/linear.h"

#include <cstdint>
#include <utility>

#include "ingot/core/dispatch.h"
#include "ingot/gpu/cublaslt.h"
#include "ingot/kernels/linear/cpu/gemm_of.h"
#include "ingot/kernels/linear/sign_bits.h"

namespace ingot {
namespace {

void check_matrix(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t cols, const Tensor& like) {
  INGOT_CHECK(t.dtype == like.dtype, op, ": ", name, ": found dtype ", t.dtype, ", expected ", like.dtype);
  INGOT_CHECK(t.device == like.device, op, ": ", name, ": found it on ", t.device, ", expected ", like.device);
  INGOT_CHECK(t.rank() >= 1 && t.rows() == rows && t.cols() == cols, op, ": ", name, ": found ", t.shape, ", expected ",
              rows, " rows of ", cols);
  INGOT_CHECK(t.rows_uniform(), op, ": ", name, ": found rows ", t.shape,
              " that no single stride reaches or whose last stride is not 1, expected row-major with one row stride");
}
// A sum of 16-bit products may be kept in f32.
Tensor sum_like(const Tensor& t, Tensor like) {
  if (t.dtype == DType::f32 && (like.dtype == DType::bf16 || like.dtype == DType::f16)) like.dtype = DType::f32;
  return like;
}
void check_sums(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t cols, const Tensor& like) {
  check_matrix(op, name, t, rows, cols, sum_like(t, like));
}
void check_workspace(const char* op, const Tensor& t, const Tensor& like) {
  if (!t) return;
  INGOT_CHECK(t.device == like.device, op, ": workspace: found it on ", t.device, ", expected ", like.device);
  INGOT_CHECK(t.dtype == DType::u8 && t.contiguous(), op, ": workspace: found ", t.shape, " of ", t.dtype,
              ", expected contiguous bytes");
}
void check_signs(const char* op, const Tensor& t, Act act, int64_t rows, int64_t cols, const Tensor& like) {
  INGOT_CHECK(slope_follows_from_value_and_sign(act), op, ": found signs with ", name_of(act),
              ", expected leaky_relu_squared or relu_squared");
  INGOT_CHECK(like.dtype != DType::f16, op, ": found signs with f16, whose squares underflow; expected pre");
  INGOT_CHECK(t.device == like.device, op, ": signs: found it on ", t.device, ", expected ", like.device);
  const int64_t expected = linear_sign_bytes(rows, cols, like.device);
  INGOT_CHECK(t.dtype == DType::u8 && t.contiguous() && t.numel() == expected, op, ": signs: found ", t.shape, " of ",
              t.dtype, ", expected ", expected, " contiguous bytes");
  INGOT_CHECK(reinterpret_cast<uintptr_t>(t.data) % 8 == 0, op,
              ": signs: found an address not aligned to 8 bytes, expected an aligned one");
}
void check_vector(const char* op, const char* name, const Tensor& t, int64_t n, const Tensor& like) {
  INGOT_CHECK(t.dtype == like.dtype, op, ": ", name, ": found dtype ", t.dtype, ", expected ", like.dtype);
  INGOT_CHECK(t.device == like.device, op, ": ", name, ": found it on ", t.device, ", expected ", like.device);
  INGOT_CHECK(t.rank() == 1 && t.size(0) == n && (n <= 1 || t.stride[0] == 1), op, ": ", name, ": found ", t.shape,
              ", expected a contiguous vector of ", n);
}

}  // namespace

namespace cpu {
void linear(const Linear& a, Stream stream);
void linear_backward(const LinearBackward& a, Stream stream);
void matmul(const MatMul& m, Stream stream);
void matmul_each(const MatMul& m, Stream stream);
int64_t linear_packed_bytes(const Tensor& w, Products products);
void linear_pack(const LinearPack& a);
}  // namespace cpu

namespace cuda {
void linear(const Linear& a, Stream stream);
void linear_backward(const LinearBackward& a, Stream stream);
void matmul(const MatMul& m, Stream stream);
void matmul_each(const MatMul& m, Stream stream);
}  // namespace cuda

void linear(const Linear& a, Stream stream) {
  const int64_t rows = a.x.rows(), n = a.w.rows(), k = a.x.cols();
  check_matrix("linear", "x", a.x, rows, k, a.x);
  check_matrix("linear", "w", a.w, n, k, a.x);
  check_matrix("linear", "y", a.y, rows, n, a.x);
  check_workspace("linear", a.workspace, a.x);
  if (a.b) check_vector("linear", "b", a.b, n, a.x);
  if (a.pre) check_matrix("linear", "pre", a.pre, rows, n, a.x);
  if (a.signs) check_signs("linear", a.signs, a.act, rows, n, a.x);
  if (a.w_packed) {
    INGOT_CHECK(a.w_packed.device.kind == Device::cpu && a.x.device.kind == Device::cpu,
                "linear: w_packed: found it on ", a.w_packed.device, " beside x on ", a.x.device,
                ", expected both on a cpu");
    INGOT_CHECK_GE(a.w_packed.bytes(), linear_packed_bytes(a.w, a.products), "linear: w_packed bytes");
  }
  if (a.accumulate)
    INGOT_CHECK(a.act == Act::identity && !a.b && !a.pre, "linear: found accumulate with ",
                a.b     ? "a bias"
                : a.pre ? "pre"
                        : "an activation",
                ", expected the identity, no bias and no pre");
  INGOT_DISPATCH(LINEAR, a.x.device, linear, a, stream);
}

void linear_backward(const LinearBackward& a, Stream stream) {
  const int64_t rows = a.dy.rows(), n = a.dy.cols();
  check_matrix("linear_backward", "dy", a.dy, rows, n, a.dy);
  if (a.dx) {
    INGOT_CHECK(a.w, "linear_backward: found dx without w, expected w");
    check_matrix("linear_backward", "w", a.w, n, a.dx.cols(), a.dy);
    check_matrix("linear_backward", "dx", a.dx, rows, a.w.cols(), a.dy);
    if (a.pre) check_matrix("linear_backward", "pre", a.pre, rows, a.w.cols(), a.dy);
    INGOT_CHECK(a.pre || a.signs || a.act == Act::identity, "linear_backward: found activation ", name_of(a.act),
                " without pre, expected pre, or x and signs");
    if (a.signs) {
      INGOT_CHECK(a.x && !a.pre && !a.form_x && !a.accumulate_dx, "linear_backward: found signs with ",
                  !a.x       ? "no x"
                  : a.pre    ? "pre"
                  : a.form_x ? "form_x"
                             : "accumulate_dx",
                  ", expected x and none of the others");
      check_matrix("linear_backward", "x", a.x, rows, a.w.cols(), a.dy);
      check_signs("linear_backward", a.signs, a.act, rows, a.w.cols(), a.dy);
    }
  }
  if (a.dw) {
    INGOT_CHECK(a.x, "linear_backward: found dw without x, expected x");
    check_matrix("linear_backward", "x", a.x, rows, a.dw.cols(), a.dy);
    check_sums("linear_backward", "dw", a.dw, n, a.x.cols(), a.dy);
  }
  if (a.db) check_vector("linear_backward", "db", a.db, n, sum_like(a.db, a.dy));
  check_workspace("linear_backward", a.workspace, a.dy);
  if (a.form_x) {
    INGOT_CHECK(a.x && a.pre, "linear_backward: found form_x without x or pre, expected both");
    check_matrix("linear_backward", "x", a.x, rows, a.x.cols(), a.dy);
    check_matrix("linear_backward", "pre", a.pre, rows, a.x.cols(), a.dy);
    if (a.dy.device.kind != Device::cpu) activate({.act = a.act, .x = a.pre, .y = a.x}, stream);
  }
  INGOT_DISPATCH(LINEAR, a.dy.device, linear_backward, a, stream);
}

namespace {
void check(const MatMul& m) {
  const int64_t rows = m.transpose_a ? m.a.cols() : m.a.rows(), k = m.transpose_a ? m.a.rows() : m.a.cols();
  const int64_t cols = m.transpose_b ? m.b.rows() : m.b.cols();
  check_matrix("matmul", "a", m.a, m.a.rows(), m.a.cols(), m.a);
  check_matrix("matmul", "b", m.b, m.transpose_b ? cols : k, m.transpose_b ? k : cols, m.a);
  check_sums("matmul", "c", m.c, rows, cols, m.a);
  if (m.add) check_matrix("matmul", "add", m.add, rows, cols, m.c);
  check_workspace("matmul", m.workspace, m.a);
  if (m.bias) {
    check_vector("matmul", "bias", m.bias, cols, m.c);
    INGOT_CHECK(!m.symmetric, "matmul: found a bias in a symmetric product, expected none");
  }
  if (m.symmetric) INGOT_CHECK_EQ(rows, cols, "matmul: rows of a symmetric product");
}
}  // namespace

void matmul(const MatMul& m, Stream stream) {
  check(m);
  INGOT_DISPATCH(LINEAR, m.a.device, matmul, m, stream);
}

void matmul_each(const MatMul& m, Stream stream) {
  for (const auto& [name, t] : {std::pair{"a", &m.a}, {"b", &m.b}, {"c", &m.c}})
    INGOT_CHECK(t->rank() == 3 && t->size(0) == m.a.size(0), "matmul_each: ", name, ": found shape ", t->shape,
                ", expected rank 3 and as many matrices as a of shape ", m.a.shape);
  INGOT_CHECK(!m.bias && !m.symmetric, "matmul_each: found ", m.bias ? "a bias" : "symmetric", ", expected none");
  INGOT_CHECK(!m.add || m.add.rank() == 2, "matmul_each: found add of shape ", m.add.shape,
              ", expected one matrix for all");
  if (m.a.size(0) == 0) return;
  check(detail::matmul_of(m, 0));
  INGOT_DISPATCH(LINEAR, m.a.device, matmul_each, m, stream);
}

void matmul_plain(const MatMul& m) {
  check(m);
  with_wide_float_type(m.a.dtype, "matmul_plain", [&](auto type) {
    using T = decltype(type);
    detail::Gemm<T> g = detail::gemm_of<T>(m.a, m.transpose_a, m.b, m.transpose_b, m.c, Products::fp32);
    const Tensor& add = m.add ? m.add : m.c;
    for (int64_t i = 0; i < g.m; ++i)
      for (int64_t j = 0; j < g.n; ++j) {
        T sum = 0;
        for (int64_t p = 0; p < g.k; ++p) sum += g.a[i * g.a_row + p * g.a_col] * g.b[p * g.b_row + j * g.b_col];
        sum *= T(m.alpha);
        if (m.bias) sum += m.bias.ptr<T>()[j];
        if (m.beta != 0) sum += T(m.beta) * add.ptr<T>()[i * add.row_stride() + j];
        g.c[i * g.ldc + j] = sum;
      }
  });
}

int64_t linear_packed_bytes(const Tensor& w, Products products) { return cpu::linear_packed_bytes(w, products); }
void linear_pack(const LinearPack& a) {
  INGOT_CHECK(a.w.device.kind == Device::cpu, "linear_pack: found w on ", a.w.device, ", expected the CPU");
  check_matrix("linear_pack", "w", a.w, a.w.rows(), a.w.cols(), a.w);
  INGOT_CHECK_GE(a.packed.bytes(), linear_packed_bytes(a.w, a.products), "linear_pack: packed bytes");
  cpu::linear_pack(a);
}

int64_t linear_sign_bytes(int64_t rows, int64_t cols, Device device) {
  return device.kind == Device::cuda ? sign_bits::words(rows, cols) * int64_t(sizeof(uint64_t)) : rows * cols;
}
int64_t linear_workspace_bytes(Device device) { return device.kind == Device::cuda ? gpu::kLtWorkspaceBytes : 0; }
int64_t bytes(const Linear& a) {
  const int64_t outputs = (a.pre ? 2 : 1) + (a.accumulate ? 1 : 0);
  return a.x.bytes() + a.w.bytes() + (a.b ? a.b.bytes() : 0) + outputs * a.y.bytes();
}
int64_t flops(const Linear& a) { return 2 * a.x.rows() * a.w.rows() * a.w.cols(); }

}  // namespace ingot
