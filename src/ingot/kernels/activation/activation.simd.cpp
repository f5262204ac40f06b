#include "ingot/kernels/activation/activation.simd.h"

namespace ingot::INGOT_SIMD {

// y may be x, dx may be dy: every vector is read once, before the same vector is written.
void activate_span(VectorAct act, int64_t n, const float* x, float* y) {
  with_vector_form(act, [=](auto f) {
    constexpr int L = kLanes<float>;
    int64_t i = 0;
    for (; i + L <= n; i += L) store<float>(y + i, f.value(load<float>(x + i)));
    if (i < n) store_tail<float>(y + i, f.value(load_tail<float>(x + i, n - i)), n - i);
  });
}

void activate_backward_span(VectorAct act, int64_t n, const float* dy, const float* x, float* dx) {
  with_vector_form(act, [=](auto f) {
    constexpr int L = kLanes<float>;
    int64_t i = 0;
    for (; i + L <= n; i += L) store<float>(dx + i, load<float>(dy + i) * f.slope(load<float>(x + i)));
    if (i < n)
      store_tail<float>(dx + i, load_tail<float>(dy + i, n - i) * f.slope(load_tail<float>(x + i, n - i)), n - i);
  });
}

// Value and slope; their common subexpressions are computed once.
void activate_both_span(VectorAct act, int64_t n, const float* dy, const float* x, float* dx, float* y) {
  with_vector_form(act, [=](auto f) {
    constexpr int L = kLanes<float>;
    int64_t i = 0;
    for (; i + L <= n; i += L) {
      const Vec<float> at = load<float>(x + i), slope = f.slope(at);
      store<float>(y + i, f.value(at));
      store<float>(dx + i, load<float>(dy + i) * slope);
    }
    if (i == n) return;
    const Vec<float> at = load_tail<float>(x + i, n - i), slope = f.slope(at);
    store_tail<float>(y + i, f.value(at), n - i);
    store_tail<float>(dx + i, load_tail<float>(dy + i, n - i) * slope, n - i);
  });
}

}  // namespace ingot::INGOT_SIMD
