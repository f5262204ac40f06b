#include "ingot/core/cpu/simd.h"

namespace ingot::INGOT_SIMD {

namespace {
constexpr int L = kLanes<float>;
constexpr int64_t kRun = 1024;  // floats added up in fp32 before the fp32 sum goes to an fp64 sum

// A vector whose first n lanes exist; the remaining lanes read as `fill`.
struct Lanes {
  int64_t n;
  Vec<float> read(const float* p, float fill) const {
    if (n >= L) return load<float>(p);
    float lane[L];
    for (int i = 0; i < L; ++i) lane[i] = i < n ? p[i] : fill;
    return load<float>(lane);
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

namespace {
// u = tanh(l * inverse_cap) for n <= kRun logits; whole vectors are written. This is a separate loop: together with the
// exponential, the chain of dependent instructions of a vector would be longer than the CPU's reorder window, and the
// loop would take 1.5 times as long.
void run_tanh(const float* logits, float* u, int64_t n, float inverse_cap) {
  for (int64_t i = 0; i < n; i += L) store<float>(u + i, tanh(Lanes{n - i}.read(logits + i, 0) * inverse_cap));
}

template <bool capped, bool write>
double sum_exp(const float* logits, float* out, int64_t n, float high, float softcap) {
  double total = 0;
  const float factor = capped ? softcap : 1;
  alignas(kVecBytes) float memory[capped ? kRun : 1];
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t count = n - begin < kRun ? n - begin : kRun;
    if (capped) run_tanh(logits + begin, memory, count, 1 / softcap);
    const float* u = capped ? memory : logits + begin;
    Vec<float> sum{};
    const auto exponential = [&](Vec<float> v, Vec<float>* gradient) {
      const Vec<float> e = exp(v * factor - high);
      *gradient = capped ? e * ((1.f - v) * (1.f + v)) : e;
      return e;
    };
    Vec<float> gradient;
    int64_t i = 0;
    for (; i + L <= count; i += L) {
      sum += exponential(load<float>(u + i), &gradient);
      if (write) store<float>(out + begin + i, gradient);
    }
    if (i < count) {
      const Vec<float> e = exponential(Lanes{count - i}.read(u + i, 0), &gradient);
      if (write) store_tail<float>(out + begin + i, gradient, count - i);
      float lane[L] = {};
      store_tail<float>(lane, e, count - i);
      sum += load<float>(lane);
    }
    total += double(reduce_add<float>(sum));
  }
  return total;
}
}  // namespace

// Returns the sum over the row of e = exp(c - high), c the softcapped logit; where `out` is given, out = e * (1 - (c /
// softcap)^2). `out` may be `logits`. softcap 0: none.
double row_exp(const float* logits, float* out, int64_t n, float high, float softcap) {
  if (softcap > 0)
    return out ? sum_exp<true, true>(logits, out, n, high, softcap)
               : sum_exp<true, false>(logits, out, n, high, softcap);
  return out ? sum_exp<false, true>(logits, out, n, high, softcap)
             : sum_exp<false, false>(logits, out, n, high, softcap);
}

// The sum of the row's softcapped logits.
double row_sum(const float* logits, int64_t n, float softcap) {
  double total = 0;
  alignas(kVecBytes) float u[kRun];
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t count = n - begin < kRun ? n - begin : kRun;
    if (softcap > 0) run_tanh(logits + begin, u, count, 1 / softcap);
    const float* const from = softcap > 0 ? u : logits + begin;
    Vec<float> sum{};
    for (int64_t i = 0; i < count; i += L) sum += Lanes{count - i}.read(from + i, 0);
    total += double(reduce_add<float>(sum));
  }
  return softcap > 0 ? total * double(softcap) : total;
}

// out = (scale * exp(c - high) - share) * (1 - (c / softcap)^2); `out` may be `logits`.
void row_smoothed(const float* logits, float* out, int64_t n, float high, float softcap, float scale, float share) {
  const float factor = softcap > 0 ? softcap : 1;
  alignas(kVecBytes) float memory[kRun];
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t count = n - begin < kRun ? n - begin : kRun;
    if (softcap > 0) run_tanh(logits + begin, memory, count, 1 / softcap);
    const float* const u = softcap > 0 ? memory : logits + begin;
    for (int64_t i = 0; i < count; i += L) {
      const Vec<float> v = Lanes{count - i}.read(u + i, 0);
      Vec<float> d = exp(v * factor - high) * scale - share;
      if (softcap > 0) d = d * ((1.f - v) * (1.f + v));
      if (count - i >= L)
        store<float>(out + begin + i, d);
      else
        store_tail<float>(out + begin + i, d, count - i);
    }
  }
}

void row_scale(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace ingot::INGOT_SIMD
