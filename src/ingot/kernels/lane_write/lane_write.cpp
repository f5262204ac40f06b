#include "ingot/kernels/lane_write/lane_write.h"

#include "ingot/kernels/residual/rows.h"

namespace ingot {

using namespace residual;

namespace cpu {
namespace {

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

}  // namespace

void lane_write(const LaneWrite& a, Stream) {
  with_wide_float_type(a.lane0.dtype, "lane_write", [&](auto scalar) { lane_write_typed<decltype(scalar)>(a); });
}
void lane_write_backward(const LaneWriteBackward& a, Stream) {
  with_wide_float_type(a.lane0.dtype, "lane_write_backward",
                       [&](auto scalar) { lane_write_backward_typed<decltype(scalar)>(a); });
}

}  // namespace cpu

namespace cuda {
void lane_write(const LaneWrite& a, Stream stream);
void lane_write_backward(const LaneWriteBackward& a, Stream stream);
}  // namespace cuda

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
  INGOT_DISPATCH(LANE_WRITE, w.lane0.device, lane_write, w, stream);
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
  check_workspace(w.workspace, x, "lane_write_backward");
  INGOT_DISPATCH(LANE_WRITE, w.lane0.device, lane_write_backward, w, stream);
}

}  // namespace ingot
