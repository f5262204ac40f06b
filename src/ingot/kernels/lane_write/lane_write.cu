#include "ingot/kernels/lane_write/lane_write.h"
#include "ingot/kernels/residual/columns.cuh"

namespace ingot::cuda {
namespace {

template <int N> struct LaneColumns { float a[N], b[N], r[2], p[4]; };
struct LaneFactors {
  residual::Channels scale_a, scale_b;
  const float *r, *p;
  template <int N> __device__ LaneColumns<N> columns(int64_t c) const {
    LaneColumns<N> k;
    scale_a.load(c, k.a), scale_b.load(c, k.b);
    for (int i = 0; i < 2; ++i) k.r[i] = r[i];
    for (int i = 0; i < 4; ++i) k.p[i] = p[i];
    return k;
  }
};

template <class T> struct LaneWriteBody : LaneFactors {
  static constexpr int kSums = 0;
  residual::Matrix<T> lane0, lane1, a, b, out0, out1;
  LaneWriteBody(const LaneWrite& l)
      : LaneFactors{l.scale_a, l.scale_b, l.r.ptr<float>(), l.p.ptr<float>()},
        lane0(l.lane0),
        lane1(l.lane1),
        a(l.a),
        b(l.b),
        out0(l.out0),
        out1(l.out1) {}
  template <int N> __device__ void row(const LaneColumns<N>& k, int64_t row, int64_t c, float (&)[1][N]) const {
    float v0[N], v1[N], va[N], vb[N];
    lane0.load(row, c, v0), lane1.load(row, c, v1), a.load(row, c, va), b.load(row, c, vb);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float sa = k.a[n] * va[n], sb = k.b[n] * vb[n];
      v0[n] = k.r[0] * v0[n] + k.p[0] * sa + k.p[2] * sb;
      v1[n] = k.r[1] * v1[n] + k.p[1] * sa + k.p[3] * sb;
    }
    out0.store(row, c, v0), out1.store(row, c, v1);
  }
};

// Six sums over tokens give every gradient of a vector or scalar: lane_i dout_i, a dout_i, b dout_i. Frozen: no sums
// over tokens are computed, and operands of these sums alone are not read.
template <class T, bool kFrozen> struct LaneWriteBackwardBody : LaneFactors {
  static constexpr int kSums = kFrozen ? 0 : 6, kHeld = kFrozen ? 1 : 6;
  residual::Matrix<T> lane0, lane1, a, b, dout0, dout1, dlane0, dlane1, da, db;
  residual::Channels dscale_a, dscale_b;
  LaneWriteBackwardBody(const LaneWriteBackward& l)
      : LaneFactors{l.scale_a, l.scale_b, l.r.ptr<float>(), l.p.ptr<float>()},
        lane0(l.lane0),
        lane1(l.lane1),
        a(l.a),
        b(l.b),
        dout0(l.dout0),
        dout1(l.dout1),
        dlane0(l.dlane0),
        dlane1(l.dlane1),
        da(l.da),
        db(l.db),
        dscale_a(l.dscale_a),
        dscale_b(l.dscale_b) {}
  template <int N> __device__ void row(const LaneColumns<N>& k, int64_t row, int64_t c, float (&sums)[kHeld][N]) const {
    float g0[N], g1[N], v[N];
    dout0.load(row, c, g0), dout1.load(row, c, g1);
    const auto add_sum = [&]<int kSum>(const residual::Matrix<T>& of, const float(&g)[N]) {
      of.load(row, c, v);
#pragma unroll
      for (int n = 0; n < N; ++n) sums[kSum][n] += v[n] * g[n];
    };
    const auto add_both = [&]<int kSum>(const residual::Matrix<T>& of) {
      of.load(row, c, v);
#pragma unroll
      for (int n = 0; n < N; ++n) sums[kSum][n] += v[n] * g0[n], sums[kSum + 1][n] += v[n] * g1[n];
    };
    if constexpr (!kFrozen) {
      add_sum.template operator()<0>(lane0, g0), add_sum.template operator()<1>(lane1, g1);
      add_both.template operator()<2>(a);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) v[n] = k.a[n] * (k.p[0] * g0[n] + k.p[1] * g1[n]);
    da.store(row, c, v);
    if constexpr (!kFrozen) add_both.template operator()<4>(b);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      v[n] = k.b[n] * (k.p[2] * g0[n] + k.p[3] * g1[n]);
      g0[n] *= k.r[0], g1[n] *= k.r[1];
    }
    db.store(row, c, v);
    dlane0.store(row, c, g0), dlane1.store(row, c, g1);
  }
  __device__ void finish(int64_t c, const double* total) const {
    dscale_a.add(c, double(p[0]) * total[2] + double(p[1]) * total[3]);
    dscale_b.add(c, double(p[2]) * total[4] + double(p[3]) * total[5]);
  }
};

// Computes dr and dp: the six totals are added over columns, those of the branches times their scales. A warp adds up
// one total.
struct ScalarParams {
  const double* total;  // (6, cols)
  int64_t cols;
  residual::Channels scale_a, scale_b;
  float *dr, *dp;
};
__global__ void __launch_bounds__(6 * 32) add_scalars(const __grid_constant__ ScalarParams s) {
  const int which = int(threadIdx.x) / 32;
  double sum = 0;
  for (int64_t c = threadIdx.x % 32; c < s.cols; c += 32) {
    float scale[1] = {1};
    if (which >= 2) (which < 4 ? s.scale_a : s.scale_b).load(c, scale);
    sum += double(scale[0]) * s.total[which * s.cols + c];
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  float* to = which < 2 ? s.dr : s.dp;
  if (threadIdx.x % 32 == 0 && to != nullptr) to[which < 2 ? which : which - 2] += float(sum);
}

}  // namespace

void lane_write(const LaneWrite& l, Stream stream) {
  with_gpu_float_type(l.lane0.dtype, "lane_write", [&](auto scalar) {
    using T = decltype(scalar);
    residual::run<T>("lane_write", LaneWriteBody<T>(l), {l.lane0, l.lane1, l.a, l.b, l.out0, l.out1}, {}, stream);
  });
}

void lane_write_backward(const LaneWriteBackward& l, Stream stream) {
  const char* op = "lane_write_backward";
  with_gpu_float_type(l.lane0.dtype, op, [&](auto scalar) {
    using T = decltype(scalar);
    const auto run = [&]<bool kFrozen>() {
      return residual::run<T>(op, LaneWriteBackwardBody<T, kFrozen>(l),
                              {l.lane0, l.lane1, l.a, l.b, l.dout0, l.dout1, l.dlane0, l.dlane1, l.da, l.db},
                              l.workspace, stream);
    };
    if (!(l.dscale_a || l.dscale_b || l.dr || l.dp)) {
      run.template operator()<true>();
      return;
    }
    const residual::Walk w = run.template operator()<false>();
    if (w.rows == 0 || !(l.dr || l.dp)) return;
    gpu::launch(op, add_scalars, {.block = 6 * 32, .device = l.lane0.device.index}, stream,
                ScalarParams{w.total, w.cols, l.scale_a, l.scale_b, l.dr ? l.dr.ptr<float>() : nullptr,
                             l.dp ? l.dp.ptr<float>() : nullptr});
  });
}

}  // namespace ingot::cuda
