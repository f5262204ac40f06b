#include "ingot/kernels/rmsnorm/rmsnorm.simd.h"

#include "ingot/core/cpu/simd.h"

namespace ingot::INGOT_SIMD {

namespace {
using F = Vec<float>;
constexpr int W = kLanes<float>;
constexpr int kSums = 4;  // sums in flight, which hide the latency of the additions

// The sum of term(c, count) over [0, n), where term gives the vector of `count` live elements beginning at c.
template <class Term> INGOT_SIMD_INLINE float sum_over(int64_t n, Term&& term) {
  F sum[kSums] = {};
  int64_t c = 0;
  for (; c + kSums * W <= n; c += kSums * W)
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) sum[i] += term(c + i * W, W);
  for (; c < n; c += W) sum[0] += term(c, n - c);
  return reduce_add<float>((sum[0] + sum[1]) + (sum[2] + sum[3]));
}
}  // namespace

float rmsnorm_rstd(const float* s, int64_t n, float eps) {
  const float sum = sum_over(n, [&](int64_t c, int64_t count) {
    const F x = load_some(s + c, count);
    return x * x;
  });
  return 1 / __builtin_sqrtf(sum / float(n) + eps);
}

void rmsnorm_backward_row(const detail::RmsNormBackwardRow<float>& r) {
  const auto slope = [&](int64_t c, int64_t count) {
    const F dy = load_some(r.dy + c, count) * r.scale;
    return r.w ? dy * (load_some(r.w + c, count) + r.offset) : dy;
  };
  float mean = 0;
  if (r.dx) {
    mean = sum_over(r.n, [&](int64_t c, int64_t count) { return slope(c, count) * load_some(r.s + c, count); });
    mean *= r.rstd / float(r.n);
  }
  for (int64_t c = 0; c < r.n; c += W) {
    const int64_t count = r.n - c;
    const F s = load_some(r.s + c, count);
    if (r.dw) {
      const F dw = load_some(r.dw + c, count) + load_some(r.dy + c, count) * (r.scale * r.rstd) * s;
      store_some(r.dw + c, dw, count);
    }
    if (!r.dx) continue;
    F ds = (slope(c, count) - s * (r.rstd * mean)) * r.rstd;
    if (r.dsum) ds += load_some(r.dsum + c, count);
    if (r.accumulate) ds += load_some(r.dx + c, count);
    store_some(r.dx + c, ds, count);
  }
}

}  // namespace ingot::INGOT_SIMD
