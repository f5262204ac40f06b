#include "ingot/kernels/residual/columns.cuh"
#include "ingot/kernels/scaled_add/scaled_add.h"

namespace ingot::cuda {
namespace {

template <int N> struct ScaleColumns { float scale[N]; };

template <class T> struct ScaledAddBody {
  static constexpr int kSums = 0;
  residual::Matrix<T> x, branch, y;
  residual::Channels scale;
  template <int N> __device__ ScaleColumns<N> columns(int64_t c) const {
    ScaleColumns<N> k;
    scale.load(c, k.scale);
    return k;
  }
  template <int N> __device__ void row(const ScaleColumns<N>& k, int64_t row, int64_t c, float (&)[1][N]) const {
    float vx[N], vb[N];
    x.load(row, c, vx), branch.load(row, c, vb);
#pragma unroll
    for (int n = 0; n < N; ++n) vx[n] = residual::added(vx[n], k.scale[n], vb[n]);
    y.store(row, c, vx);
  }
};

// kSum: the gradient of the scale is computed, for which the branch is read.
template <class T, int kSum> struct ScaledAddBackwardBody {
  static constexpr int kSums = kSum;
  residual::Matrix<T> dy, branch, dbranch;
  residual::Channels scale, dscale;
  template <int N> __device__ ScaleColumns<N> columns(int64_t c) const {
    ScaleColumns<N> k;
    scale.load(c, k.scale);
    return k;
  }
  template <int N> __device__ void row(const ScaleColumns<N>& k, int64_t row, int64_t c, float (&sums)[1][N]) const {
    float g[N], vb[N];
    dy.load(row, c, g);
    if constexpr (kSum == 1) {
      branch.load(row, c, vb);
#pragma unroll
      for (int n = 0; n < N; ++n) sums[0][n] += vb[n] * g[n];
    }
#pragma unroll
    for (int n = 0; n < N; ++n) g[n] *= k.scale[n];
    dbranch.store(row, c, g);
  }
  __device__ void finish(int64_t c, const double* total) const { dscale.add(c, total[0]); }
};

}  // namespace

void scaled_add(const ScaledAdd& s, Stream stream) {
  with_gpu_float_type(s.x.dtype, "scaled_add", [&](auto scalar) {
    using T = decltype(scalar);
    const ScaledAddBody<T> body{s.x, s.branch, s.y, s.scale};
    residual::run<T>("scaled_add", body, {s.x, s.branch, s.y}, {}, stream);
  });
}

void scaled_add_backward(const ScaledAddBackward& s, Stream stream) {
  const char* op = "scaled_add_backward";
  with_gpu_float_type(s.dy.dtype, op, [&](auto scalar) {
    using T = decltype(scalar);
    if (s.dscale)
      residual::run<T>(op, ScaledAddBackwardBody<T, 1>{s.dy, s.branch, s.dbranch, s.scale, s.dscale},
                       {s.dy, s.branch, s.dbranch}, s.workspace, stream);
    else
      residual::run<T>(op, ScaledAddBackwardBody<T, 0>{s.dy, Tensor(), s.dbranch, s.scale, s.dscale}, {s.dy, s.dbranch},
                       {}, stream);
  });
}

}  // namespace ingot::cuda
