#include "ingot/kernels/mix/mix.h"
#include "ingot/kernels/residual/columns.cuh"

namespace ingot::cuda {
namespace {

template <int N> struct MixColumns { float a[N], b[N]; };

template <class T> struct MixBody {
  static constexpr int kSums = 0;
  residual::Matrix<T> x, x0, y;
  residual::Channels a, b;
  template <int N> __device__ MixColumns<N> columns(int64_t c) const {
    MixColumns<N> k;
    a.load(c, k.a), b.load(c, k.b);
    return k;
  }
  template <int N> __device__ void row(const MixColumns<N>& k, int64_t row, int64_t c, float (&)[1][N]) const {
    float vx[N], v0[N];
    x.load(row, c, vx), x0.load(row, c, v0);
#pragma unroll
    for (int n = 0; n < N; ++n) vx[n] = residual::mixed(k.a[n], vx[n], k.b[n], v0[n]);
    y.store(row, c, vx);
  }
};

template <class T> struct MixBackwardBody {
  static constexpr int kSums = 2;
  residual::Matrix<T> x, x0, dy, dx, dx0;
  residual::Channels a, b, da, db;  // da, db: null where not requested
  template <int N> __device__ MixColumns<N> columns(int64_t c) const {
    MixColumns<N> k;
    a.load(c, k.a), b.load(c, k.b);
    return k;
  }
  template <int N> __device__ void row(const MixColumns<N>& k, int64_t row, int64_t c, float (&sums)[2][N]) const {
    float vx[N], v0[N], g[N], d0[N];
    x.load(row, c, vx), x0.load(row, c, v0), dy.load(row, c, g), dx0.load(row, c, d0);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      sums[0][n] += vx[n] * g[n];
      sums[1][n] += v0[n] * g[n];
      d0[n] += k.b[n] * g[n];
      g[n] *= k.a[n];
    }
    dx0.store(row, c, d0), dx.store(row, c, g);
  }
  __device__ void finish(int64_t c, const double* total) const { da.add(c, total[0]), db.add(c, total[1]); }
};

}  // namespace

void mix(const Mix& m, Stream stream) {
  with_gpu_float_type(m.x.dtype, "mix", [&](auto scalar) {
    using T = decltype(scalar);
    const MixBody<T> body{m.x, m.x0, m.y, m.a, m.b};
    residual::run<T>("mix", body, {m.x, m.x0, m.y}, {}, stream);
  });
}

void mix_backward(const MixBackward& m, Stream stream) {
  with_gpu_float_type(m.x.dtype, "mix_backward", [&](auto scalar) {
    using T = decltype(scalar);
    const MixBackwardBody<T> body{m.x, m.x0, m.dy, m.dx, m.dx0, m.a, m.b, m.da, m.db};
    residual::run<T>("mix_backward", body, {m.x, m.x0, m.dy, m.dx, m.dx0}, m.workspace, stream);
  });
}

}  // namespace ingot::cuda
