#include "ingot/kernels/residual/residual.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/dispatch.h"
#include "ingot/core/thread_pool.h"

// These loops read each operand once and do a few operations per element, so they run at the speed of memory. Outputs
// may be inputs, at the same index only: ivdep tells the compiler so, which else falls back to scalar code for y = x.
#define INGOT_POINTWISE _Pragma("GCC ivdep")

namespace ingot {
namespace {

constexpr int64_t kBlock = 16384;  // elements per operand and task: with five operands, about an L2 cache
constexpr int64_t kMaxBlocks = 128;

// Rows per task; a function of the sizes alone, so that sums over tokens never depend on the number of threads.
int64_t block_rows(int64_t rows, int64_t cols) {
  const int64_t by_cache = std::max<int64_t>(8, kBlock / std::max<int64_t>(1, cols));
  return std::max(by_cache, (rows + kMaxBlocks - 1) / kMaxBlocks);
}
int64_t block_count(int64_t rows, int64_t cols) { return (rows + block_rows(rows, cols) - 1) / block_rows(rows, cols); }

template <class T> struct Rows {
  explicit Rows(const Tensor& t) : data(t ? t.ptr<T>() : nullptr), stride(t ? t.row_stride() : 0) {}
  T* operator[](int64_t t) const { return data + t * stride; }
  T* data;
  int64_t stride;
};

// Memory for one call: N sums per block and channel, and `vectors` vectors of one number per channel.
template <class T> T* workspace(int64_t rows, int64_t cols, int sums, int vectors) {
  const int64_t n = (block_count(rows, cols) * sums + vectors) * cols;
  return static_cast<T*>(thread_scratch(0, std::max<int64_t>(1, n) * int64_t(sizeof(T))));
}

template <class T> const T* or_ones(const Tensor& t, int64_t cols, T* ones) {
  if (t) return t.ptr<T>();
  std::fill(ones, ones + cols, T(1));
  return ones;
}

template <class T> T logistic(T x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }

// Calls block(begin, end, sums) for blocks of rows, sums being N vectors over channels that start at zero; then
// finish(c, total) for every channel, each total the blocks' sums added in order, in fp64.
template <int N, class T, class Block, class Finish>
void reduce_columns(int64_t rows, int64_t cols, T* partials, Block&& block, Finish&& finish) {
  const int64_t step = block_rows(rows, cols), blocks = block_count(rows, cols);
  parallel_for(rows, step, [&](int64_t begin, int64_t end) {
    T* sums = partials + begin / step * N * cols;
    std::fill(sums, sums + N * cols, T(0));
    block(begin, end, sums);
  });
  constexpr int64_t kChunk = 64;
  for (int64_t first = 0; first < cols; first += kChunk) {
    const int64_t width = std::min(kChunk, cols - first);
    double total[N][kChunk] = {};
    for (int64_t b = 0; b < blocks; ++b)
      for (int n = 0; n < N; ++n)
        for (int64_t c = 0; c < width; ++c) total[n][c] += double(partials[(b * N + n) * cols + first + c]);
    for (int64_t c = 0; c < width; ++c) {
      double one[N];
      for (int n = 0; n < N; ++n) one[n] = total[n][c];
      finish(first + c, one);
    }
  }
}

template <class Block> void for_blocks(int64_t rows, int64_t cols, Block&& block) {
  parallel_for(rows, block_rows(rows, cols), [&](int64_t begin, int64_t end) { block(begin, end); });
}

void check_matrix(const Tensor& t, const Tensor& like, const char* what) {
  INGOT_CHECK(t.shape == like.shape && t.rank() > 0, what, ": found shape ", t.shape, ", expected ", like.shape);
  INGOT_CHECK_EQ(t.dtype, like.dtype, what, " dtype");
  INGOT_CHECK_EQ(t.device, like.device, what, " device");
  INGOT_CHECK(t.rows_uniform() || t.numel() == 0, what, ": found strides that one row stride cannot express, shape ",
              t.shape);
}
void check_vector(const Tensor& t, const Tensor& like, Shape shape, const char* what) {
  INGOT_CHECK(t.shape == shape, what, ": found shape ", t.shape, ", expected ", shape);
  INGOT_CHECK_EQ(t.dtype, like.dtype, what, " dtype");
  INGOT_CHECK_EQ(t.device, like.device, what, " device");
  INGOT_CHECK(t.contiguous(), what, ": found a strided vector, expected a contiguous one");
}
void check_channels(const Tensor& t, const Tensor& like, const char* what) {
  check_vector(t, like, Shape{like.cols()}, what);
}
void check_channels_or_none(const Tensor& t, const Tensor& like, const char* what) {
  if (t) check_channels(t, like, what);
}

}  // namespace

namespace cpu {
namespace {

template <class T> void mix_typed(const Mix& m) {
  const int64_t C = m.x.cols();
  const Rows<T> X(m.x), X0(m.x0), Y(m.y);
  const T *a = m.a.ptr<T>(), *b = m.b.ptr<T>();
  for_blocks(m.x.rows(), C, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T *x = X[t], *x0 = X0[t];
      T* y = Y[t];
      INGOT_POINTWISE
      for (int64_t c = 0; c < C; ++c) y[c] = a[c] * x[c] + b[c] * x0[c];
    }
  });
}

template <class T> void mix_backward_typed(const MixBackward& m) {
  const int64_t C = m.x.cols(), rows = m.x.rows();
  const Rows<T> X(m.x), X0(m.x0), DY(m.dy), DX(m.dx), DX0(m.dx0);
  const T *a = m.a.ptr<T>(), *b = m.b.ptr<T>();
  T* partials = workspace<T>(rows, C, 2, 0);
  reduce_columns<2>(
      rows, C, partials,
      [&](int64_t begin, int64_t end, T* sums) {
        T *sum_a = sums, *sum_b = sums + C;
        for (int64_t t = begin; t < end; ++t) {
          const T *x = X[t], *x0 = X0[t], *dy = DY[t];
          T *dx = DX[t], *dx0 = DX0[t];
          INGOT_POINTWISE
          for (int64_t c = 0; c < C; ++c) {
            const T g = dy[c];
            sum_a[c] += x[c] * g;
            sum_b[c] += x0[c] * g;
            dx0[c] += b[c] * g;
            dx[c] = a[c] * g;
          }
        }
      },
      [&](int64_t c, const double* total) {
        if (m.da) m.da.ptr<T>()[c] += T(total[0]);
        if (m.db) m.db.ptr<T>()[c] += T(total[1]);
      });
}

template <class T> void scaled_add_typed(const ScaledAdd& s) {
  const int64_t C = s.x.cols(), rows = s.x.rows();
  const Rows<T> X(s.x), B(s.branch), Y(s.y);
  const T* scale = or_ones(s.scale, C, workspace<T>(rows, C, 0, 1));
  for_blocks(rows, C, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T *x = X[t], *branch = B[t];
      T* y = Y[t];
      INGOT_POINTWISE
      for (int64_t c = 0; c < C; ++c) y[c] = x[c] + scale[c] * branch[c];
    }
  });
}

template <class T> void scaled_add_backward_typed(const ScaledAddBackward& s) {
  const int64_t C = s.dy.cols(), rows = s.dy.rows();
  const Rows<T> DY(s.dy), B(s.branch), D(s.dbranch);
  T* memory = workspace<T>(rows, C, 1, 1);
  const T* scale = or_ones(s.scale, C, memory);
  if (!s.dscale) {
    for_blocks(rows, C, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* dy = DY[t];
        T* d = D[t];
        INGOT_POINTWISE
        for (int64_t c = 0; c < C; ++c) d[c] = scale[c] * dy[c];
      }
    });
    return;
  }
  reduce_columns<1>(
      rows, C, memory + C,
      [&](int64_t begin, int64_t end, T* sum) {
        for (int64_t t = begin; t < end; ++t) {
          const T *dy = DY[t], *branch = B[t];
          T* d = D[t];
          INGOT_POINTWISE
          for (int64_t c = 0; c < C; ++c) {
            const T g = dy[c];
            sum[c] += branch[c] * g;
            d[c] = scale[c] * g;
          }
        }
      },
      [&](int64_t c, const double* total) { s.dscale.ptr<T>()[c] += T(total[0]); });
}

// y = keep * x + take * skip per channel: keep = g, take = (1 - g) w with a gate; 1 and w without.
template <class T> struct SkipFactors {
  SkipFactors(const Tensor& w, const Tensor& gate, int64_t C, T* memory)
      : keep(memory), rest(memory + C), take(memory + 2 * C) {
    for (int64_t c = 0; c < C; ++c) {
      keep[c] = gate ? logistic(gate.ptr<T>()[c]) : T(1);
      rest[c] = gate ? logistic(-gate.ptr<T>()[c]) : T(1);
      take[c] = rest[c] * w.ptr<T>()[c];
    }
  }
  T *keep, *rest, *take;  // g, 1 - g (1 without a gate), (1 - g) w
};

template <class T> void skip_merge_typed(const SkipMerge& s) {
  const int64_t C = s.x.cols(), rows = s.x.rows();
  const Rows<T> X(s.x), S(s.skip), Y(s.y);
  const SkipFactors<T> f(s.w, s.gate, C, workspace<T>(rows, C, 0, 3));
  const T *keep = f.keep, *take = f.take;
  for_blocks(rows, C, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T *x = X[t], *skip = S[t];
      T* y = Y[t];
      INGOT_POINTWISE
      for (int64_t c = 0; c < C; ++c) y[c] = keep[c] * x[c] + take[c] * skip[c];
    }
  });
}

template <class T> void skip_merge_backward_typed(const SkipMergeBackward& s) {
  const int64_t C = s.x.cols(), rows = s.x.rows();
  const Rows<T> X(s.x), S(s.skip), DY(s.dy), DX(s.dx), DS(s.dskip);
  T* memory = workspace<T>(rows, C, 2, 3);
  const SkipFactors<T> f(s.w, s.gate, C, memory);
  const T *keep = f.keep, *take = f.take, *w = s.w.ptr<T>();
  reduce_columns<2>(
      rows, C, memory + 3 * C,
      [&](int64_t begin, int64_t end, T* sums) {
        T *sum_skip = sums, *sum_difference = sums + C;
        for (int64_t t = begin; t < end; ++t) {
          const T *x = X[t], *skip = S[t], *dy = DY[t];
          T *dx = DX[t], *dskip = DS[t];
          INGOT_POINTWISE
          for (int64_t c = 0; c < C; ++c) {
            const T g = dy[c];
            sum_skip[c] += skip[c] * g;
            sum_difference[c] += (x[c] - w[c] * skip[c]) * g;
            dskip[c] += take[c] * g;
            dx[c] = keep[c] * g;
          }
        }
      },
      [&](int64_t c, const double* total) {
        if (s.dw) s.dw.ptr<T>()[c] += T(double(f.rest[c]) * total[0]);
        if (s.dgate) s.dgate.ptr<T>()[c] += T(double(f.keep[c]) * double(f.rest[c]) * total[1]);
      });
}

template <class T> void lane_write_typed(const LaneWrite& l) {
  const int64_t C = l.lane0.cols(), rows = l.lane0.rows();
  const Rows<T> L0(l.lane0), L1(l.lane1), A(l.a), B(l.b), O0(l.out0), O1(l.out1);
  T* memory = workspace<T>(rows, C, 0, 2);
  const T *scale_a = or_ones(l.scale_a, C, memory), *scale_b = or_ones(l.scale_b, C, memory + C);
  const T *r = l.r.ptr<T>(), *p = l.p.ptr<T>();
  const T r0 = r[0], r1 = r[1], p00 = p[0], p01 = p[1], p10 = p[2], p11 = p[3];
  for_blocks(rows, C, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T *lane0 = L0[t], *lane1 = L1[t], *a = A[t], *b = B[t];
      T *out0 = O0[t], *out1 = O1[t];
      INGOT_POINTWISE
      for (int64_t c = 0; c < C; ++c) {
        const T va = scale_a[c] * a[c], vb = scale_b[c] * b[c], v0 = lane0[c], v1 = lane1[c];
        out0[c] = r0 * v0 + p00 * va + p10 * vb;
        out1[c] = r1 * v1 + p01 * va + p11 * vb;
      }
    }
  });
}

// Six sums over tokens give every gradient of a vector or scalar: lane_i dout_i, a dout_i, b dout_i.
template <class T> void lane_write_backward_typed(const LaneWriteBackward& l) {
  const int64_t C = l.lane0.cols(), rows = l.lane0.rows();
  const Rows<T> L0(l.lane0), L1(l.lane1), A(l.a), B(l.b), G0(l.dout0), G1(l.dout1), D0(l.dlane0), D1(l.dlane1),
      DA(l.da), DB(l.db);
  T* memory = workspace<T>(rows, C, 6, 2);
  const T *scale_a = or_ones(l.scale_a, C, memory), *scale_b = or_ones(l.scale_b, C, memory + C);
  const T *r = l.r.ptr<T>(), *p = l.p.ptr<T>();
  const T r0 = r[0], r1 = r[1], p00 = p[0], p01 = p[1], p10 = p[2], p11 = p[3];
  double dr[2] = {}, dp[4] = {};
  reduce_columns<6>(
      rows, C, memory + 2 * C,
      [&](int64_t begin, int64_t end, T* sums) {
        T *l0 = sums, *l1 = l0 + C, *a0 = l1 + C, *a1 = a0 + C, *b0 = a1 + C, *b1 = b0 + C;
        for (int64_t t = begin; t < end; ++t) {
          const T *lane0 = L0[t], *lane1 = L1[t], *a = A[t], *b = B[t], *dout0 = G0[t], *dout1 = G1[t];
          T *dlane0 = D0[t], *dlane1 = D1[t], *da = DA[t], *db = DB[t];
          INGOT_POINTWISE
          for (int64_t c = 0; c < C; ++c) {
            const T g0 = dout0[c], g1 = dout1[c], va = a[c], vb = b[c];
            l0[c] += lane0[c] * g0;
            l1[c] += lane1[c] * g1;
            a0[c] += va * g0;
            a1[c] += va * g1;
            b0[c] += vb * g0;
            b1[c] += vb * g1;
            da[c] = scale_a[c] * (p00 * g0 + p01 * g1);
            db[c] = scale_b[c] * (p10 * g0 + p11 * g1);
            dlane0[c] = r0 * g0;
            dlane1[c] = r1 * g1;
          }
        }
      },
      [&](int64_t c, const double* total) {
        const double sa = double(scale_a[c]), sb = double(scale_b[c]);
        dr[0] += total[0];
        dr[1] += total[1];
        dp[0] += sa * total[2];
        dp[1] += sa * total[3];
        dp[2] += sb * total[4];
        dp[3] += sb * total[5];
        if (l.dscale_a) l.dscale_a.ptr<T>()[c] += T(double(p00) * total[2] + double(p01) * total[3]);
        if (l.dscale_b) l.dscale_b.ptr<T>()[c] += T(double(p10) * total[4] + double(p11) * total[5]);
      });
  for (int i = 0; i < 2; ++i)
    if (l.dr) l.dr.ptr<T>()[i] += T(dr[i]);
  for (int i = 0; i < 4; ++i)
    if (l.dp) l.dp.ptr<T>()[i] += T(dp[i]);
}

template <class T> void axpby_typed(const Axpby& a) {
  const int64_t C = a.x.cols();
  const Rows<T> X(a.x), Y(a.y);
  const T alpha = T(a.alpha), beta = T(a.beta);
  for_blocks(a.x.rows(), C, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = X[t];
      T* y = Y[t];
      if (beta == 0) {  // y may hold anything
        INGOT_POINTWISE
        for (int64_t c = 0; c < C; ++c) y[c] = alpha * x[c];
      } else {
        INGOT_POINTWISE
        for (int64_t c = 0; c < C; ++c) y[c] = alpha * x[c] + beta * y[c];
      }
    }
  });
}

}  // namespace

#define INGOT_RESIDUAL_OP(op, Op, operand)                                                             \
  void op(const Op& a, Stream) {                                                                       \
    with_wide_float_type(a.operand.dtype, #op, [&](auto scalar) { op##_typed<decltype(scalar)>(a); }); \
  }
INGOT_RESIDUAL_OP(mix, Mix, x)
INGOT_RESIDUAL_OP(mix_backward, MixBackward, x)
INGOT_RESIDUAL_OP(scaled_add, ScaledAdd, x)
INGOT_RESIDUAL_OP(scaled_add_backward, ScaledAddBackward, dy)
INGOT_RESIDUAL_OP(skip_merge, SkipMerge, x)
INGOT_RESIDUAL_OP(skip_merge_backward, SkipMergeBackward, x)
INGOT_RESIDUAL_OP(lane_write, LaneWrite, lane0)
INGOT_RESIDUAL_OP(lane_write_backward, LaneWriteBackward, lane0)
INGOT_RESIDUAL_OP(axpby, Axpby, x)
#undef INGOT_RESIDUAL_OP

}  // namespace cpu

#ifdef INGOT_HAS_CUDA_RESIDUAL
namespace cuda {
void mix(const Mix& m, Stream stream);
void mix_backward(const MixBackward& m, Stream stream);
void scaled_add(const ScaledAdd& s, Stream stream);
void scaled_add_backward(const ScaledAddBackward& s, Stream stream);
void skip_merge(const SkipMerge& s, Stream stream);
void skip_merge_backward(const SkipMergeBackward& s, Stream stream);
void lane_write(const LaneWrite& w, Stream stream);
void lane_write_backward(const LaneWriteBackward& w, Stream stream);
void axpby(const Axpby& a, Stream stream);
}  // namespace cuda
#define INGOT_DISPATCH_RESIDUAL INGOT_DISPATCH_WITH_CUDA
#else
#define INGOT_DISPATCH_RESIDUAL INGOT_DISPATCH_CPU_ONLY
#endif

void mix(const Mix& m, Stream stream) {
  check_matrix(m.x, m.x, "mix: x");
  check_matrix(m.x0, m.x, "mix: x0");
  check_matrix(m.y, m.x, "mix: y");
  check_channels(m.a, m.x, "mix: a");
  check_channels(m.b, m.x, "mix: b");
  INGOT_DISPATCH_RESIDUAL(m.x.device, mix, m, stream);
}

void mix_backward(const MixBackward& m, Stream stream) {
  check_matrix(m.x, m.x, "mix_backward: x");
  check_matrix(m.x0, m.x, "mix_backward: x0");
  check_matrix(m.dy, m.x, "mix_backward: dy");
  check_matrix(m.dx, m.x, "mix_backward: dx");
  check_matrix(m.dx0, m.x, "mix_backward: dx0");
  check_channels(m.a, m.x, "mix_backward: a");
  check_channels(m.b, m.x, "mix_backward: b");
  check_channels_or_none(m.da, m.x, "mix_backward: da");
  check_channels_or_none(m.db, m.x, "mix_backward: db");
  INGOT_DISPATCH_RESIDUAL(m.x.device, mix_backward, m, stream);
}

void scaled_add(const ScaledAdd& s, Stream stream) {
  check_matrix(s.x, s.x, "scaled_add: x");
  check_matrix(s.branch, s.x, "scaled_add: branch");
  check_matrix(s.y, s.x, "scaled_add: y");
  check_channels_or_none(s.scale, s.x, "scaled_add: scale");
  INGOT_DISPATCH_RESIDUAL(s.x.device, scaled_add, s, stream);
}

void scaled_add_backward(const ScaledAddBackward& s, Stream stream) {
  check_matrix(s.dy, s.dy, "scaled_add_backward: dy");
  check_matrix(s.dbranch, s.dy, "scaled_add_backward: dbranch");
  check_channels_or_none(s.scale, s.dy, "scaled_add_backward: scale");
  check_channels_or_none(s.dscale, s.dy, "scaled_add_backward: dscale");
  if (s.dscale) check_matrix(s.branch, s.dy, "scaled_add_backward: branch");  // needed for nothing else
  INGOT_DISPATCH_RESIDUAL(s.dy.device, scaled_add_backward, s, stream);
}

void skip_merge(const SkipMerge& s, Stream stream) {
  check_matrix(s.x, s.x, "skip_merge: x");
  check_matrix(s.skip, s.x, "skip_merge: skip");
  check_matrix(s.y, s.x, "skip_merge: y");
  check_channels(s.w, s.x, "skip_merge: w");
  check_channels_or_none(s.gate, s.x, "skip_merge: gate");
  INGOT_DISPATCH_RESIDUAL(s.x.device, skip_merge, s, stream);
}

void skip_merge_backward(const SkipMergeBackward& s, Stream stream) {
  check_matrix(s.x, s.x, "skip_merge_backward: x");
  check_matrix(s.skip, s.x, "skip_merge_backward: skip");
  check_matrix(s.dy, s.x, "skip_merge_backward: dy");
  check_matrix(s.dx, s.x, "skip_merge_backward: dx");
  check_matrix(s.dskip, s.x, "skip_merge_backward: dskip");
  check_channels(s.w, s.x, "skip_merge_backward: w");
  check_channels_or_none(s.gate, s.x, "skip_merge_backward: gate");
  check_channels_or_none(s.dw, s.x, "skip_merge_backward: dw");
  check_channels_or_none(s.dgate, s.x, "skip_merge_backward: dgate");
  INGOT_CHECK(!s.dgate || s.gate, "skip_merge_backward: found dgate without a gate, expected both or neither");
  INGOT_DISPATCH_RESIDUAL(s.x.device, skip_merge_backward, s, stream);
}

void lane_write(const LaneWrite& w, Stream stream) {
  check_matrix(w.lane0, w.lane0, "lane_write: lane0");
  check_matrix(w.lane1, w.lane0, "lane_write: lane1");
  check_matrix(w.a, w.lane0, "lane_write: a");
  check_matrix(w.b, w.lane0, "lane_write: b");
  check_matrix(w.out0, w.lane0, "lane_write: out0");
  check_matrix(w.out1, w.lane0, "lane_write: out1");
  check_channels_or_none(w.scale_a, w.lane0, "lane_write: scale_a");
  check_channels_or_none(w.scale_b, w.lane0, "lane_write: scale_b");
  check_vector(w.r, w.lane0, {2}, "lane_write: r");
  check_vector(w.p, w.lane0, {2, 2}, "lane_write: p");
  INGOT_DISPATCH_RESIDUAL(w.lane0.device, lane_write, w, stream);
}

void lane_write_backward(const LaneWriteBackward& w, Stream stream) {
  const Tensor& x = w.lane0;
  check_matrix(x, x, "lane_write_backward: lane0");
  check_matrix(w.lane1, x, "lane_write_backward: lane1");
  check_matrix(w.a, x, "lane_write_backward: a");
  check_matrix(w.b, x, "lane_write_backward: b");
  check_matrix(w.dout0, x, "lane_write_backward: dout0");
  check_matrix(w.dout1, x, "lane_write_backward: dout1");
  check_matrix(w.dlane0, x, "lane_write_backward: dlane0");
  check_matrix(w.dlane1, x, "lane_write_backward: dlane1");
  check_matrix(w.da, x, "lane_write_backward: da");
  check_matrix(w.db, x, "lane_write_backward: db");
  check_channels_or_none(w.scale_a, x, "lane_write_backward: scale_a");
  check_channels_or_none(w.scale_b, x, "lane_write_backward: scale_b");
  check_channels_or_none(w.dscale_a, x, "lane_write_backward: dscale_a");
  check_channels_or_none(w.dscale_b, x, "lane_write_backward: dscale_b");
  check_vector(w.r, x, {2}, "lane_write_backward: r");
  check_vector(w.p, x, {2, 2}, "lane_write_backward: p");
  if (w.dr) check_vector(w.dr, x, {2}, "lane_write_backward: dr");
  if (w.dp) check_vector(w.dp, x, {2, 2}, "lane_write_backward: dp");
  INGOT_DISPATCH_RESIDUAL(w.lane0.device, lane_write_backward, w, stream);
}

void axpby(const Axpby& a, Stream stream) {
  check_matrix(a.x, a.x, "axpby: x");
  check_matrix(a.y, a.x, "axpby: y");
  INGOT_DISPATCH_RESIDUAL(a.x.device, axpby, a, stream);
}

}  // namespace ingot
