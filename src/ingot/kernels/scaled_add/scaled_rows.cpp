#include "ingot/kernels/scaled_add/scaled_rows.h"

#include "ingot/core/dispatch.h"

namespace ingot {
namespace cpu {
namespace {

template <class T, class Y> void scaled_rows_typed(const ScaledRows& a) {
  for (int64_t n = 0; n < a.x.rows(); ++n) {
    const T* x = a.x.ptr<T>() + n * a.x.row_stride();
    Y* y = a.y.ptr<Y>() + n * a.y.row_stride();
    for (int64_t k = 0; k < a.x.cols(); ++k) y[k] = Y(a.scale.ptr<T>()[n] * x[k]);
  }
}

template <class T> void scaled_rows_backward_typed(const ScaledRowsBackward& a) {
  for (int64_t n = 0; n < a.x.rows(); ++n) {
    const T *x = a.x.ptr<T>() + n * a.x.row_stride(), *dy = a.dy.ptr<T>() + n * a.dy.row_stride();
    T* dx = a.dx.ptr<T>() + n * a.dx.row_stride();
    double sum = 0;
    for (int64_t k = 0; k < a.x.cols(); ++k) {
      sum += double(x[k]) * double(dy[k]);
      dx[k] += a.scale.ptr<T>()[n] * dy[k];
    }
    if (a.dscale) a.dscale.ptr<T>()[n] += T(sum);
  }
}

}  // namespace

void scaled_rows(const ScaledRows& a, Stream) {
  if (a.x.dtype == DType::f64) return scaled_rows_typed<double, double>(a);
  if (a.y.dtype == DType::f32) return scaled_rows_typed<float, float>(a);
  if (a.y.dtype == DType::bf16) return scaled_rows_typed<float, bf16>(a);
  scaled_rows_typed<float, f16>(a);
}
void scaled_rows_backward(const ScaledRowsBackward& a, Stream) {
  if (a.x.dtype == DType::f64) return scaled_rows_backward_typed<double>(a);
  scaled_rows_backward_typed<float>(a);
}

}  // namespace cpu

namespace cuda {
void scaled_rows(const ScaledRows& a, Stream stream);
void scaled_rows_backward(const ScaledRowsBackward& a, Stream stream);
}  // namespace cuda

namespace {

void check_x(const char* op, const Tensor& x, const Tensor& scale) {
  INGOT_CHECK(x.rank() == 2 && scale.rank() == 1 && scale.size(0) == x.size(0), op, ": found x of shape ", x.shape,
              " and scale of shape ", scale.shape, ", expected (N, K) and (N)");
  INGOT_CHECK(x.dtype == DType::f32 || (x.dtype == DType::f64 && x.device.kind == Device::cpu), op, ": found x of ",
              x.dtype, " on ", x.device, ", expected f32, or f64 on the CPU");
  INGOT_CHECK(scale.numel() <= 1 || scale.stride[0] == 1, op, ": found a scale with gaps");
  INGOT_CHECK_EQ(scale.dtype, x.dtype, op, ": dtype of scale");
  INGOT_CHECK_EQ(scale.device, x.device, op, ": device of scale");
}
void check_matrix(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  INGOT_CHECK(t.shape == x.shape, op, ": found ", name, " of shape ", t.shape, ", expected ", x.shape, ", that of x");
  INGOT_CHECK_EQ(t.device, x.device, op, ": device of ", name);
  INGOT_CHECK(t.rows_uniform() || t.numel() == 0, op, ": found ", name,
              " with strides that one row stride cannot express, shape ", t.shape);
}

}  // namespace

void scaled_rows(const ScaledRows& a, Stream stream) {
  const char* const op = "scaled_rows";
  check_x(op, a.x, a.scale);
  check_matrix(op, "x", a.x, a.x);
  check_matrix(op, "y", a.y, a.x);
  const bool narrow = a.x.dtype == DType::f32 && (a.y.dtype == DType::bf16 || a.y.dtype == DType::f16);
  INGOT_CHECK(a.y.dtype == a.x.dtype || narrow, op, ": found y of ", a.y.dtype, " and x of ", a.x.dtype,
              ", expected one type, or bf16 or f16 beside f32");
  INGOT_DISPATCH(SCALED_ADD, a.x.device, scaled_rows, a, stream);
}

void scaled_rows_backward(const ScaledRowsBackward& a, Stream stream) {
  const char* const op = "scaled_rows_backward";
  check_x(op, a.x, a.scale);
  check_matrix(op, "x", a.x, a.x);
  for (const auto& [name, t] : {std::pair("dy", &a.dy), {"dx", &a.dx}}) {
    check_matrix(op, name, *t, a.x);
    INGOT_CHECK_EQ(t->dtype, a.x.dtype, op, ": dtype of ", name);
  }
  if (a.dscale) check_x(op, a.x, a.dscale);
  INGOT_DISPATCH(SCALED_ADD, a.x.device, scaled_rows_backward, a, stream);
}

}  // namespace ingot
