#include "ingot/core/cpu/simd.h"
#include "ingot/kernels/adamw/adamw_step.h"

namespace ingot::INGOT_SIMD {

void adamw_span(const detail::AdamWStep<float>& given, int64_t n, const float* g, float* p, float* m, float* v) {
  const detail::AdamWStep<float> s = given;
  if (m == nullptr) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const float grad = g[i] * s.grad_scale, square = s.beta2 * v[i] + s.rest2 * (grad * grad);
      v[i] = square;
      p[i] -= s.decay * p[i] + s.step * grad / (__builtin_sqrtf(square) * s.root + s.eps);
    }
    return;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float grad = g[i] * s.grad_scale;
    const float mean = s.beta1 * m[i] + s.rest1 * grad, square = s.beta2 * v[i] + s.rest2 * (grad * grad);
    m[i] = mean;
    v[i] = square;
    p[i] -= s.decay * p[i] + s.step * mean / (__builtin_sqrtf(square) * s.root + s.eps);
  }
}

void ema_span(float rest, int64_t n, const float* p, float* average) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) average[i] += rest * (p[i] - average[i]);
}

double sum_of_squares_span(int64_t n, const float* x) {
  constexpr int D = kLanes<double>;
  Sums16 sums;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int k = 0; k < 16 / D; ++k) {
      const Vec<double> v = widen(x + i + k * D);
      sums.part[k] += v * v;
    }
  if (i < n) {
    float rest[16] = {};
    for (int k = 0; i + k < n; ++k) rest[k] = x[i + k];
    for (int k = 0; k < 16 / D; ++k) {
      const Vec<double> v = widen(rest + k * D);
      sums.part[k] += v * v;
    }
  }
  return sums.total();
}

bool all_finite_span(int64_t n, const float* x) {
  int32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bad |= (bits & 0x7f800000) == 0x7f800000;
  }
  return bad == 0;
}

}  // namespace ingot::INGOT_SIMD
