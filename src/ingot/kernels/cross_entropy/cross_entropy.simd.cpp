#include "ingot/core/simd.h"

namespace ingot::INGOT_SIMD {

namespace {
constexpr int L = kLanes<float>;
constexpr int64_t kRun = 1024;  // floats added up in fp32 before they go to an fp64 sum

// A vector of which the first n lanes exist; the others read as `fill` and are not written.
struct Lanes {
  int64_t n;
  Vec<float> read(const float* p, float fill) const {
    if (n >= L) return load<float>(p);
    float lane[L];
    for (int i = 0; i < L; ++i) lane[i] = i < n ? p[i] : fill;
    return load<float>(lane);
  }
  void write(float* p, Vec<float> v) const {
    if (n >= L)
      store<float>(p, v);
    else
      store_tail<float>(p, v, n);
  }
};
}  // namespace

// The largest logit. A NaN may be passed over: the sum of exponentials is NaN then.
float row_max(const float* logits, int64_t n) {
  Vec<float> best[4];
  for (auto& b : best) b = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 4 * L <= n; i += 4 * L)
    for (int k = 0; k < 4; ++k) best[k] = max<float>(load<float>(logits + i + k * L), best[k]);
  for (; i < n; i += L) best[0] = max<float>(Lanes{n - i}.read(logits + i, -__builtin_inff()), best[0]);
  return reduce_max<float>(max<float>(max<float>(best[0], best[1]), max<float>(best[2], best[3])));
}

// Returns the sum over the row of e = exp(c - high), c the softcapped logit; where `out` is given, it gets
// e * (1 - (c / softcap)^2). It may be `logits`. softcap 0: none.
double row_exp(const float* logits, float* out, int64_t n, float high, float softcap) {
  const float inverse_cap = softcap > 0 ? 1 / softcap : 0;
  const Vec<float> minus_high = splat(-high);
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t end = begin + kRun < n ? begin + kRun : n;
    Vec<float> sum{};
    if (softcap > 0) {
      for (int64_t i = begin; i < end; i += L) {
        const Lanes lanes{end - i};
        const Vec<float> u = tanh(lanes.read(logits + i, 0) * inverse_cap);
        const Vec<float> e = exp(u * softcap + minus_high);
        if (out) lanes.write(out + i, e * ((1.f - u) * (1.f + u)));
        if (lanes.n >= L)
          sum += e;
        else
          for (int k = 0; k < lanes.n; ++k) sum[k] += e[k];
      }
    } else {
      for (int64_t i = begin; i < end; i += L) {
        const Lanes lanes{end - i};
        const Vec<float> e = exp(lanes.read(logits + i, -__builtin_inff()) + minus_high);
        if (out) lanes.write(out + i, e);
        sum += e;
      }
    }
    total += double(reduce_add<float>(sum));
  }
  return total;
}

void row_scale(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace ingot::INGOT_SIMD
