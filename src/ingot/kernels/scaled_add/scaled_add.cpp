#include "ingot/kernels/scaled_add/scaled_add.h"

#include "ingot/kernels/residual/rows.h"

namespace ingot {

using namespace residual;

namespace cpu {
namespace {

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

}  // namespace

void scaled_add(const ScaledAdd& a, Stream) {
  with_wide_float_type(a.x.dtype, "scaled_add", [&](auto scalar) { scaled_add_typed<decltype(scalar)>(a); });
}
void scaled_add_backward(const ScaledAddBackward& a, Stream) {
  with_wide_float_type(a.dy.dtype, "scaled_add_backward",
                       [&](auto scalar) { scaled_add_backward_typed<decltype(scalar)>(a); });
}

}  // namespace cpu

namespace cuda {
void scaled_add(const ScaledAdd& a, Stream stream);
void scaled_add_backward(const ScaledAddBackward& a, Stream stream);
}  // namespace cuda

void scaled_add(const ScaledAdd& s, Stream stream) {
  check_matrix(s.x, s.x, "scaled_add: x");
  check_matrix(s.branch, s.x, "scaled_add: branch");
  check_matrix(s.y, s.x, "scaled_add: y");
  check_channels_or_none(s.scale, s.x, "scaled_add: scale");
  INGOT_DISPATCH(SCALED_ADD, s.x.device, scaled_add, s, stream);
}

void scaled_add_backward(const ScaledAddBackward& s, Stream stream) {
  check_matrix(s.dy, s.dy, "scaled_add_backward: dy");
  check_matrix(s.dbranch, s.dy, "scaled_add_backward: dbranch");
  check_channels_or_none(s.scale, s.dy, "scaled_add_backward: scale");
  check_channels_or_none(s.dscale, s.dy, "scaled_add_backward: dscale");
  if (s.dscale) check_matrix(s.branch, s.dy, "scaled_add_backward: branch");  // only dscale needs the branch
  if (s.dscale) check_workspace(s.workspace, s.dy, "scaled_add_backward");
  INGOT_DISPATCH(SCALED_ADD, s.dy.device, scaled_add_backward, s, stream);
}

}  // namespace ingot
