#include "ingot/kernels/mix/mix.h"

#include "ingot/kernels/residual/rows.h"

namespace ingot {

using namespace residual;

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

}  // namespace

void mix(const Mix& a, Stream) {
  with_wide_float_type(a.x.dtype, "mix", [&](auto scalar) { mix_typed<decltype(scalar)>(a); });
}
void mix_backward(const MixBackward& a, Stream) {
  with_wide_float_type(a.x.dtype, "mix_backward", [&](auto scalar) { mix_backward_typed<decltype(scalar)>(a); });
}

}  // namespace cpu

namespace cuda {
void mix(const Mix& a, Stream stream);
void mix_backward(const MixBackward& a, Stream stream);
}  // namespace cuda

void mix(const Mix& m, Stream stream) {
  check_matrix(m.x, m.x, "mix: x");
  check_matrix(m.x0, m.x, "mix: x0");
  check_matrix(m.y, m.x, "mix: y");
  check_channels(m.a, m.x, "mix: a");
  check_channels(m.b, m.x, "mix: b");
  INGOT_DISPATCH(MIX, m.x.device, mix, m, stream);
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
  check_workspace(m.workspace, m.x, "mix_backward");
  INGOT_DISPATCH(MIX, m.x.device, mix_backward, m, stream);
}

}  // namespace ingot
