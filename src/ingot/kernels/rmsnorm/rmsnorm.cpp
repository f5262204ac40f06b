#include "ingot/kernels/rmsnorm/rmsnorm.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/rmsnorm/rmsnorm.simd.h"

INGOT_SIMD_DECLARE(float rmsnorm_rstd(const float* s, int64_t n, float eps);
                   void rmsnorm_backward_row(const detail::RmsNormBackwardRow<float>& r);)

namespace ingot {
namespace {

// --- checks ------------------------------------------------------------------------------------------------

bool is_float(DType t) { return t == DType::f64 || t == DType::f32 || t == DType::bf16 || t == DType::f16; }
DType sum_dtype(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

// f64 mixes with no narrower type, so an oracle never uses rounded numbers unnoticed; the narrower types mix freely.
void check_dtype(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  INGOT_CHECK(is_float(t.dtype) && sum_dtype(t.dtype) == sum_dtype(x.dtype), op, ": found dtype ", t.dtype, " of ",
              name, " beside ", x.dtype, ", expected ", x.dtype == DType::f64 ? "f64" : "f32, bf16 or f16");
  INGOT_CHECK(t.device == x.device, op, ": found ", name, " on ", t.device, ", expected ", x.device);
}
void check_matrix(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  check_dtype(op, name, t, x);
  INGOT_CHECK(t.shape == x.shape, op, ": found ", name, " of shape ", t.shape, ", expected ", x.shape);
  INGOT_CHECK(t.cols() <= 1 || t.step(-1) == 1, op, ": found ", name, " with last stride ", t.step(-1), ", expected 1");
}
void check_vector(const char* op, const char* name, const Tensor& t, int64_t length, const Tensor& x) {
  INGOT_CHECK(t.device == x.device, op, ": found ", name, " on ", t.device, ", expected ", x.device);
  INGOT_CHECK_EQ(t.numel(), length, op, ": length of ", name);
  INGOT_CHECK(t.contiguous(), op, ": found ", name, " with gaps, expected it contiguous");
}
void check_weight(const char* op, const Tensor& w, const Tensor& x) {
  if (!w) return;
  check_dtype(op, "w", w, x);
  INGOT_CHECK_EQ(w.rank(), 1, op, ": rank of w");
  check_vector(op, "w", w, x.cols(), x);
}
void check_rank(const char* op, const Tensor& x) {
  INGOT_CHECK(x.rank() >= 1 && x.rank() <= 3, op, ": found rank ", x.rank(), ", expected 1 to 3");
  INGOT_CHECK(is_float(x.dtype), op, ": found dtype ", x.dtype, ", expected f64, f32, bf16 or f16");
}
void check_rstd(const char* op, const Tensor& rstd, const Tensor& x) {
  if (!rstd) return;
  INGOT_CHECK_EQ(rstd.dtype, sum_dtype(x.dtype), op, ": dtype of rstd");
  check_vector(op, "rstd", rstd, x.rows(), x);
}

// --- rows in the type of the sums ---------------------------------------------------------------------------------

int64_t row_offset(const Tensor& t, int64_t row) {
  if (t.rank() == 1) return 0;
  if (t.rank() == 2) return row * t.stride[0];
  return row / t.shape.dim[1] * t.stride[0] + row % t.shape.dim[1] * t.stride[1];
}

// The row itself where its type is A, else a converted copy in `buffer`.
template <class A> const A* read_row(const Tensor& t, int64_t row, A* buffer) {
  return with_float_type(t.dtype, "rmsnorm", [&](auto type) -> const A* {
    using T = decltype(type);
    const T* from = static_cast<const T*>(t.data) + row_offset(t, row);
    if constexpr (std::is_same_v<T, A>) return from;
    for (int64_t c = 0; c < t.cols(); ++c) buffer[c] = A(from[c]);
    return buffer;
  });
}
// The memory for a row's result: the row itself, or `buffer` until write_row rounds it to the row's type.
template <class A> A* open_row(const Tensor& t, int64_t row, A* buffer) {
  return t.dtype == dtype_of<A> ? static_cast<A*>(t.data) + row_offset(t, row) : buffer;
}
template <class A> void write_row(const Tensor& t, int64_t row, const A* buffer) {
  with_float_type(t.dtype, "rmsnorm", [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, A>) {
      T* to = static_cast<T*>(t.data) + row_offset(t, row);
      for (int64_t c = 0; c < t.cols(); ++c) to[c] = T(accum_t<T>(buffer[c]));
    }
  });
}

// --- one row -----------------------------------------------------------------------------------------------

template <class A> A sum_of_squares(const A* s, int64_t n) {
  A sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += s[c] * s[c];
  return sum;
}

// y = s * factor * (offset + w), or s * factor without a weight; y may be s.
template <class A> void scale_row(const A* s, const A* w, A* y, int64_t n, A factor, A offset) {
  if (w == nullptr)
    for (int64_t c = 0; c < n; ++c) y[c] = s[c] * factor;
  else
    for (int64_t c = 0; c < n; ++c) y[c] = s[c] * factor * (offset + w[c]);
}

template <class A> A rstd_of(const A* s, int64_t n, double eps) {
  if constexpr (std::is_same_v<A, float>)
    return INGOT_SIMD_CALL(rmsnorm_rstd, s, n, float(eps));
  else
    return 1 / std::sqrt(sum_of_squares(s, n) / A(n) + A(eps));
}

// The weight in the sums' type; the conversion is made once per task, not once per row.
template <class A> const A* weight_row(const Tensor& w, A* buffer) { return w ? read_row(w, 0, buffer) : nullptr; }

// --- forward -----------------------------------------------------------------------------------------------

constexpr int64_t kForwardRows = 32;  // rows per task

template <class A> void forward_rows(const RmsNorm& a, int64_t begin, int64_t end) {
  const int64_t n = a.x.cols();
  A* buffer = static_cast<A*>(thread_scratch(0, 4 * n * int64_t(sizeof(A))));
  const A* w = weight_row(a.w, buffer + 3 * n);
  for (int64_t row = begin; row < end; ++row) {
    const A* s = read_row(a.x, row, buffer);
    if (a.residual) {
      const A* residual = read_row(a.residual, row, buffer + n);
      A* sum = open_row(a.sum, row, buffer + 2 * n);
      for (int64_t c = 0; c < n; ++c) sum[c] = s[c] + residual[c];
      write_row(a.sum, row, sum);
      s = read_row(a.sum, row, sum);  // y is the norm of the stored sum, which the backward pass reads
    }
    const A rstd = rstd_of(s, n, a.eps);
    A* y = open_row(a.y, row, buffer + n);
    scale_row(s, w, y, n, rstd * A(a.scale), A(a.unit_offset ? 1 : 0));
    write_row(a.y, row, y);
    if (a.rstd) static_cast<A*>(a.rstd.data)[row] = rstd;
  }
}

// --- backward ----------------------------------------------------------------------------------------------

// dw is summed over blocks of rows, then over blocks in order. The cut depends on the number of rows alone.
int64_t rows_per_block(int64_t rows) { return std::max<int64_t>(32, (rows + 63) / 64); }
int64_t row_blocks(int64_t rows) { return (rows + rows_per_block(rows) - 1) / rows_per_block(rows); }

// dx may be dy or dsum: each element is read before being written.
void backward_row(const detail::RmsNormBackwardRow<double>& r) {
  const auto slope = [&](int64_t c) { return r.w ? r.dy[c] * r.scale * (r.offset + r.w[c]) : r.dy[c] * r.scale; };
  double mean = 0;
  if (r.dx) {
    for (int64_t c = 0; c < r.n; ++c) mean += slope(c) * r.s[c];
    mean *= r.rstd / double(r.n);
  }
  if (r.dw)
    for (int64_t c = 0; c < r.n; ++c) r.dw[c] += r.dy[c] * (r.scale * r.rstd) * r.s[c];
  if (!r.dx) return;
  for (int64_t c = 0; c < r.n; ++c) {
    double ds = r.rstd * (slope(c) - r.s[c] * r.rstd * mean);
    if (r.dsum) ds += r.dsum[c];
    r.dx[c] = r.accumulate ? r.dx[c] + ds : ds;
  }
}
void backward_row(const detail::RmsNormBackwardRow<float>& r) { INGOT_SIMD_CALL(rmsnorm_backward_row, r); }

template <class A> void backward_rows(const RmsNormBackward& a, int64_t begin, int64_t end, A* dw) {
  const int64_t n = a.s.cols();
  A* buffer = static_cast<A*>(thread_scratch(0, 5 * n * int64_t(sizeof(A))));
  const A* w = weight_row(a.w, buffer + 4 * n);
  if (dw) std::fill(dw, dw + n, A(0));
  for (int64_t row = begin; row < end; ++row) {
    detail::RmsNormBackwardRow<A> r{};
    r.n = n, r.w = w, r.dw = dw, r.scale = A(a.scale), r.offset = A(a.unit_offset ? 1 : 0);
    r.accumulate = a.accumulate_dx;
    r.dy = read_row(a.dy, row, buffer), r.s = read_row(a.s, row, buffer + n);
    r.rstd = a.rstd ? static_cast<const A*>(a.rstd.data)[row] : rstd_of(r.s, n, a.eps);
    if (a.dsum) r.dsum = read_row(a.dsum, row, buffer + 2 * n);
    if (a.dx) r.dx = open_row(a.dx, row, buffer + 3 * n);
    if (a.dx && a.accumulate_dx) read_row(a.dx, row, r.dx);
    backward_row(r);
    if (a.dx) write_row(a.dx, row, r.dx);
  }
}

template <class A> void backward(const RmsNormBackward& a) {
  const int64_t rows = a.s.rows(), n = a.s.cols(), grain = rows_per_block(rows);
  A* partial = a.dw ? static_cast<A*>(a.workspace.data) : nullptr;
  parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
    backward_rows(a, begin, end, partial ? partial + begin / grain * n : nullptr);
  });
  if (!a.dw) return;
  A* dw = static_cast<A*>(a.dw.data);
  for (int64_t block = 0; block < row_blocks(rows); ++block)
    for (int64_t c = 0; c < n; ++c) dw[c] += partial[block * n + c];
}

template <class Use> void with_sum_type(DType t, Use&& use) {
  if (t == DType::f64)
    use(double{});
  else
    use(float{});
}

}  // namespace

namespace cpu {
void rmsnorm(const RmsNorm& a, Stream) {
  if (a.x.numel() == 0) return;
  with_sum_type(a.x.dtype, [&](auto type) {
    parallel_for(a.x.rows(), kForwardRows,
                 [&](int64_t begin, int64_t end) { forward_rows<decltype(type)>(a, begin, end); });
  });
}
void rmsnorm_backward(const RmsNormBackward& a, Stream) {
  if (a.s.numel() == 0) return;
  with_sum_type(a.s.dtype, [&](auto type) { backward<decltype(type)>(a); });
}
}  // namespace cpu

namespace cuda {
void rmsnorm(const RmsNorm& a, Stream stream);
void rmsnorm_backward(const RmsNormBackward& a, Stream stream);
int64_t rmsnorm_backward_workspace_bytes(int64_t rows, int64_t cols, DType dtype, Device device);
}  // namespace cuda

void rmsnorm(const RmsNorm& a, Stream stream) {
  const char* op = "rmsnorm";
  check_rank(op, a.x);
  check_matrix(op, "x", a.x, a.x);
  check_matrix(op, "y", a.y, a.x);
  check_weight(op, a.w, a.x);
  INGOT_CHECK(bool(a.residual) == bool(a.sum), op, ": found ",
              a.residual ? "a residual without a sum" : "a sum without a residual", ", expected both or neither");
  if (a.residual) {
    check_matrix(op, "residual", a.residual, a.x);
    check_matrix(op, "sum", a.sum, a.x);
  }
  check_rstd(op, a.rstd, a.x);
  INGOT_DISPATCH(RMSNORM, a.x.device, rmsnorm, a, stream);
}

void rmsnorm_backward(const RmsNormBackward& a, Stream stream) {
  const char* op = "rmsnorm_backward";
  check_rank(op, a.s);
  check_matrix(op, "s", a.s, a.s);
  check_matrix(op, "dy", a.dy, a.s);
  check_weight(op, a.w, a.s);
  check_rstd(op, a.rstd, a.s);
  if (a.dsum) check_matrix(op, "dsum", a.dsum, a.s);
  if (a.dx) check_matrix(op, "dx", a.dx, a.s);
  if (a.dw) {
    INGOT_CHECK_EQ(a.dw.dtype, sum_dtype(a.s.dtype), op, ": dtype of dw");
    check_vector(op, "dw", a.dw, a.s.cols(), a.s);
    const int64_t need = rmsnorm_backward_workspace_bytes(a.s.rows(), a.s.cols(), a.s.dtype, a.s.device);
    const int64_t have = a.workspace ? a.workspace.bytes() : 0;
    INGOT_CHECK_GE(have, need, op, ": bytes of workspace");
    INGOT_CHECK(need == 0 || a.workspace.device == a.s.device, op, ": found workspace on ", a.workspace.device,
                ", expected ", a.s.device);
  }
  INGOT_DISPATCH(RMSNORM, a.s.device, rmsnorm_backward, a, stream);
}

int64_t rmsnorm_backward_workspace_bytes(int64_t rows, int64_t cols, DType dtype, Device device) {
  if (cols == 0) return 0;
  if constexpr (INGOT_HAS_CUDA(RMSNORM))
    if (device.kind == Device::cuda) return cuda::rmsnorm_backward_workspace_bytes(rows, cols, dtype, device);
  return row_blocks(rows) * cols * size_of(sum_dtype(dtype));
}

int64_t bytes(const RmsNorm& a) {
  int64_t total = a.x.bytes() + a.y.bytes();
  if (a.w) total += a.w.bytes();
  if (a.residual) total += a.residual.bytes() + a.sum.bytes();
  if (a.rstd) total += a.rstd.bytes();
  return total;
}
int64_t flops(const RmsNorm& a) { return a.x.numel() * (a.residual ? 5 : 4); }

}  // namespace ingot
