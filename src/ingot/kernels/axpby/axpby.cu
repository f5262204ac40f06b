#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/residual/columns.cuh"

namespace ingot::cuda {
namespace {

template <class T> struct AxpbyBody {
  static constexpr int kSums = 0;
  template <int N> struct Columns {};
  residual::Matrix<T> x, y;
  float alpha, beta;
  template <int N> __device__ Columns<N> columns(int64_t) const { return {}; }
  template <int N> __device__ void row(const Columns<N>&, int64_t row, int64_t c, float (&)[1][N]) const {
    float vx[N], vy[N] = {};
    x.load(row, c, vx);
    if (beta != 0) y.load(row, c, vy);  // for beta = 0 y may have any contents
#pragma unroll
    for (int n = 0; n < N; ++n) vy[n] = alpha * vx[n] + beta * vy[n];
    y.store(row, c, vy);
  }
};

}  // namespace

void axpby(const Axpby& a, Stream stream) {
  with_gpu_float_type(a.x.dtype, "axpby", [&](auto scalar) {
    using T = decltype(scalar);
    const AxpbyBody<T> body{a.x, a.y, float(a.alpha), float(a.beta)};
    residual::run<T>("axpby", body, {a.x, a.y}, {}, stream);
  });
}

}  // namespace ingot::cuda
