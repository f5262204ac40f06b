#include "ingot/kernels/skip_merge/skip_merge.h"

#include "ingot/kernels/residual/rows.h"

namespace ingot {

using namespace residual;

namespace cpu {
namespace {

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
          if (s.write_dskip) std::fill(dskip, dskip + C, T(0));
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

}  // namespace

void skip_merge(const SkipMerge& a, Stream) {
  with_wide_float_type(a.x.dtype, "skip_merge", [&](auto scalar) { skip_merge_typed<decltype(scalar)>(a); });
}
void skip_merge_backward(const SkipMergeBackward& a, Stream) {
  with_wide_float_type(a.x.dtype, "skip_merge_backward",
                       [&](auto scalar) { skip_merge_backward_typed<decltype(scalar)>(a); });
}

}  // namespace cpu

namespace cuda {
void skip_merge(const SkipMerge& a, Stream stream);
void skip_merge_backward(const SkipMergeBackward& a, Stream stream);
}  // namespace cuda

void skip_merge(const SkipMerge& s, Stream stream) {
  check_matrix(s.x, s.x, "skip_merge: x");
  check_matrix(s.skip, s.x, "skip_merge: skip");
  check_matrix(s.y, s.x, "skip_merge: y");
  check_channels(s.w, s.x, "skip_merge: w");
  check_channels_or_none(s.gate, s.x, "skip_merge: gate");
  INGOT_DISPATCH(SKIP_MERGE, s.x.device, skip_merge, s, stream);
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
  check_workspace(s.workspace, s.x, "skip_merge_backward");
  INGOT_DISPATCH(SKIP_MERGE, s.x.device, skip_merge_backward, s, stream);
}

}  // namespace ingot
