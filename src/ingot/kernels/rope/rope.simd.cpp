#include "ingot/kernels/rope/rope.simd.h"

#include "ingot/core/cpu/simd.h"

namespace ingot::INGOT_SIMD {

using detail::RopeToken;

namespace {

using F = Vec<float>;
constexpr int W = kLanes<float>;

INGOT_SIMD_INLINE float dot(const float* a, const float* b, int64_t n) {
  F sum[2] = {};
  int64_t c = 0;
  for (; c + 2 * W <= n; c += 2 * W) {
    sum[0] += load(a + c) * load(b + c);
    sum[1] += load(a + c + W) * load(b + c + W);
  }
  for (; c < n; c += W) sum[0] += load_some(a + c, n - c) * load_some(b + c, n - c);
  return reduce_add<float>(sum[0] + sum[1]);
}

// y = factor * R x; y may be x.
INGOT_SIMD_INLINE void rotate(const RopeToken& t, const float* x, float* y, float factor) {
  if (t.interleaved) {
    for (int64_t j = 0; j < t.half; ++j) {
      const float x1 = x[2 * j] * factor, x2 = x[2 * j + 1] * factor, s = t.sign * t.sin[j];
      y[2 * j] = x1 * t.cos[j] - x2 * s;
      y[2 * j + 1] = x2 * t.cos[j] + x1 * s;
    }
  } else {
    for (int64_t j = 0; j < t.half; j += W) {
      const int64_t n = t.half - j;
      const F x1 = load_some(x + j, n) * factor, x2 = load_some(x + t.half + j, n) * factor;
      const F c = load_some(t.cos + j, n), s = load_some(t.sin + j, n) * t.sign;
      store_some(y + j, x1 * c - x2 * s, n);
      store_some(y + t.half + j, x2 * c + x1 * s, n);
    }
  }
  for (int64_t c = 2 * t.half; c < t.d; c += W) store_some(y + c, load_some(x + c, t.d - c) * factor, t.d - c);
}
INGOT_SIMD_INLINE float rstd_of(const RopeToken& t, const float* x) {
  return t.normalise ? 1 / __builtin_sqrtf(dot(x, x, t.d) / float(t.d) + t.eps) : 1.f;
}

}  // namespace

void rope_token(const RopeToken& t) {
  for (int64_t h = 0; h < t.heads; ++h) {
    const float* x = t.x + h * t.x_head;
    rotate(t, x, t.y + h * t.y_head, rstd_of(t, x) * (t.gain ? t.gain[h] : 1.f));
  }
}

void rope_token_backward(const RopeToken& t) {
  for (int64_t h = 0; h < t.heads; ++h) {
    const float* x = t.x + h * t.x_head;
    float *g = t.scratch, *dx = t.y + h * t.y_head;
    rotate(t, t.dy + h * t.dy_head, g, 1);
    const float rstd = rstd_of(t, x), sum = dot(x, g, t.d) * rstd;
    if (t.dgain) t.dgain[h] += sum;
    const float factor = rstd * (t.gain ? t.gain[h] : 1.f), along = t.normalise ? sum / float(t.d) * rstd : 0.f;
    for (int64_t c = 0; c < t.d; c += W) {
      const int64_t n = t.d - c;
      store_some(dx + c, (load_some(g + c, n) - load_some(x + c, n) * along) * factor, n);
    }
  }
}

}  // namespace ingot::INGOT_SIMD
