#include "ingot/kernels/residual/columns.cuh"
#include "ingot/kernels/skip_merge/skip_merge.h"

namespace ingot::cuda {
namespace {

__device__ inline float logistic(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0 ? e : 1.f) / (1.f + e);
}

// y = keep * x + take * skip per channel: keep = g, rest = 1 - g and take = (1 - g) w with a gate; 1, 1 and w without.
template <int N> struct SkipColumns { float keep[N], rest[N], take[N], w[N]; };
template <int N>
__device__ SkipColumns<N> skip_columns(const residual::Channels& w, const residual::Channels& gate, int64_t c) {
  SkipColumns<N> k;
  w.load(c, k.w);
  float g[N];
  gate.load(c, g);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    k.keep[n] = gate.data != nullptr ? logistic(g[n]) : 1.f;
    k.rest[n] = gate.data != nullptr ? logistic(-g[n]) : 1.f;
    k.take[n] = k.rest[n] * k.w[n];
  }
  return k;
}

template <class T> struct SkipMergeBody {
  static constexpr int kSums = 0;
  residual::Matrix<T> x, skip, y;
  residual::Channels w, gate;
  template <int N> __device__ SkipColumns<N> columns(int64_t c) const { return skip_columns<N>(w, gate, c); }
  template <int N> __device__ void row(const SkipColumns<N>& k, int64_t row, int64_t c, float (&)[1][N]) const {
    float vx[N], vs[N];
    x.load(row, c, vx), skip.load(row, c, vs);
#pragma unroll
    for (int n = 0; n < N; ++n) vx[n] = k.keep[n] * vx[n] + k.take[n] * vs[n];
    y.store(row, c, vx);
  }
};

// Frozen: no sums over tokens are computed, and operands of these sums alone are not read.
template <class T, bool kFrozen> struct SkipMergeBackwardBody {
  static constexpr int kSums = kFrozen ? 0 : 2, kHeld = kFrozen ? 1 : 2;
  residual::Matrix<T> x, skip, dy, dx, dskip;
  residual::Channels w, gate, dw, dgate;
  bool write_dskip;
  template <int N> __device__ SkipColumns<N> columns(int64_t c) const { return skip_columns<N>(w, gate, c); }
  template <int N> __device__ void row(const SkipColumns<N>& k, int64_t row, int64_t c, float (&sums)[kHeld][N]) const {
    float g[N], ds[N] = {};
    dy.load(row, c, g);
    if (!write_dskip) dskip.load(row, c, ds);
    if constexpr (!kFrozen) {
      float vx[N], vs[N];
      x.load(row, c, vx), skip.load(row, c, vs);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        sums[0][n] += vs[n] * g[n];
        sums[1][n] += (vx[n] - k.w[n] * vs[n]) * g[n];
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      ds[n] += k.take[n] * g[n];
      g[n] *= k.keep[n];
    }
    dskip.store(row, c, ds), dx.store(row, c, g);
  }
  __device__ void finish(int64_t c, const double* total) const {
    const SkipColumns<1> k = skip_columns<1>(w, gate, c);
    dw.add(c, double(k.rest[0]) * total[0]);
    dgate.add(c, double(k.keep[0]) * double(k.rest[0]) * total[1]);
  }
};

}  // namespace

void skip_merge(const SkipMerge& s, Stream stream) {
  with_gpu_float_type(s.x.dtype, "skip_merge", [&](auto scalar) {
    using T = decltype(scalar);
    const SkipMergeBody<T> body{s.x, s.skip, s.y, s.w, s.gate};
    residual::run<T>("skip_merge", body, {s.x, s.skip, s.y}, {}, stream);
  });
}

void skip_merge_backward(const SkipMergeBackward& s, Stream stream) {
  with_gpu_float_type(s.x.dtype, "skip_merge_backward", [&](auto scalar) {
    using T = decltype(scalar);
    const auto run = [&]<bool kFrozen>() {
      const SkipMergeBackwardBody<T, kFrozen> body{s.x, s.skip, s.dy, s.dx,    s.dskip,
                                                   s.w, s.gate, s.dw, s.dgate, s.write_dskip};
      residual::run<T>("skip_merge_backward", body, {s.x, s.skip, s.dy, s.dx, s.dskip}, s.workspace, stream);
    };
    if (s.dw || s.dgate) return run.template operator()<false>();
    run.template operator()<true>();
  });
}

}  // namespace ingot::cuda
