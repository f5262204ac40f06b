#include "ingot/kernels/adamw/adamw.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/adamw/adamw_step.h"

INGOT_SIMD_DECLARE(void adamw_span(const detail::AdamWStep<float>& s, int64_t n, const float* g, float* p, float* m,
                                   float* v);
                   void ema_span(float rest, int64_t n, const float* p, float* average);
                   double sum_of_squares_span(int64_t n, const float* x);
                   bool all_finite_span(int64_t n, const float* x);)

namespace ingot {
namespace {

constexpr int64_t kGrain = 16384;  // elements per task and per partial sum

void check_flat(const Tensor& t, const Tensor& like, const char* what) {
  INGOT_CHECK(t.shape == like.shape, what, ": found shape ", t.shape, ", expected ", like.shape);
  INGOT_CHECK_EQ(t.dtype, like.dtype, what, " dtype");
  INGOT_CHECK_EQ(t.device, like.device, what, " device");
  INGOT_CHECK(t.contiguous(), what, ": found a strided tensor of shape ", t.shape, ", expected a contiguous one");
}

void check_numbers(const Tensor& t, int64_t n, const Tensor& like, const char* what) {
  INGOT_CHECK(t.dtype == DType::f64 && t.shape == Shape{n} && t.contiguous(), what, ": found ", t.dtype, " of shape ",
              t.shape, ", expected ", n, " of f64");
  INGOT_CHECK_EQ(t.device, like.device, what, " device");
}
void check_number(const Tensor& t, const Tensor& like, const char* what) { check_numbers(t, 1, like, what); }

}  // namespace

std::array<double, 3> adamw_rates(const AdamW& a) {
  const double correction1 = 1 - std::pow(a.beta1, double(a.step)), correction2 = 1 - std::pow(a.beta2, double(a.step));
  return {a.lr / correction1, 1 / std::sqrt(correction2), a.lr * a.weight_decay};
}

namespace cpu {
namespace {

template <class T> void adamw_span(const detail::AdamWStep<T>& s, int64_t n, const T* g, T* p, T* m, T* v) {
  if constexpr (std::is_same_v<T, float>) {
    INGOT_SIMD_CALL(adamw_span, s, n, g, p, m, v);
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const T grad = g[i] * s.grad_scale;
      const T mean = m != nullptr ? s.beta1 * m[i] + s.rest1 * grad : grad;
      if (m != nullptr) m[i] = mean;
      v[i] = s.beta2 * v[i] + s.rest2 * (grad * grad);
      p[i] -= s.decay * p[i] + s.step * mean / (std::sqrt(v[i]) * s.root + s.eps);
    }
  }
}

template <class T> void adamw_typed(const AdamW& a) {
  T *p = a.p.ptr<T>(), *m = a.m ? a.m.ptr<T>() : nullptr, *v = a.v.ptr<T>();
  const T* g = a.g.ptr<T>();
  const double* given = a.rates ? a.rates.ptr<double>() : nullptr;
  const std::array<double, 3> rates = given != nullptr ? std::array{given[0], given[1], given[2]} : adamw_rates(a);
  const detail::AdamWStep<T> s{.grad_scale = T(a.grad_scale),
                               .beta1 = T(a.beta1),
                               .rest1 = T(1 - a.beta1),
                               .beta2 = T(a.beta2),
                               .rest2 = T(1 - a.beta2),
                               .step = T(rates[0]),
                               .root = T(rates[1]),
                               .eps = T(a.eps),
                               .decay = T(rates[2])};
  parallel_for(a.p.numel(), kGrain, [&](int64_t begin, int64_t end) {
    adamw_span<T>(s, end - begin, g + begin, p + begin, m != nullptr ? m + begin : nullptr, v + begin);
  });
}

template <class T> void ema_typed(const Ema& e) {
  const T* p = e.p.ptr<T>();
  T* average = e.average.ptr<T>();
  const T rest = T(1 - (e.rate ? *e.rate.ptr<double>() : e.decay));
  parallel_for(e.p.numel(), kGrain, [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, float>)
      INGOT_SIMD_CALL(ema_span, rest, end - begin, p + begin, average + begin);
    else
      for (int64_t i = begin; i < end; ++i) average[i] += rest * (p[i] - average[i]);
  });
}

// In the order of core/cpu/simd.h's Sums16.
template <class T> double sum_of_squares_of(int64_t n, const T* x) {
  if constexpr (std::is_same_v<T, float>) return INGOT_SIMD_CALL(sum_of_squares_span, n, x);
  double sum[16] = {};
  for (int64_t i = 0; i < n; ++i) sum[i % 16] += double(accum_t<T>(x[i])) * double(accum_t<T>(x[i]));
  for (int step = 8; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) sum[i] += sum[i + step];
  return sum[0];
}

template <class T> bool all_finite_in(int64_t n, const T* x) {
  if constexpr (std::is_same_v<T, float>) return INGOT_SIMD_CALL(all_finite_span, n, x);
  return std::all_of(x, x + n, [](T v) { return std::isfinite(accum_t<T>(v)); });
}

}  // namespace

// The factor of a call; the call does nothing where the factor is not finite.
double factor_of(const Tensor& factor) { return factor ? *factor.ptr<double>() : 1; }

void adamw(const AdamW& call, Stream) {
  AdamW a = call;
  a.grad_scale *= factor_of(a.factor);
  if (!std::isfinite(a.grad_scale)) return;
  with_wide_float_type(a.p.dtype, "adamw", [&](auto scalar) {
    using T = decltype(scalar);
    adamw_typed<T>(a);
    if (!a.copy) return;
    with_float_type(a.copy.dtype, "adamw", [&](auto other) {
      using U = decltype(other);
      for (int64_t i = 0; i < a.p.numel(); ++i) a.copy.ptr<U>()[i] = U(a.p.ptr<T>()[i]);
    });
  });
}
void ema(const Ema& e, Stream) {
  if (!std::isfinite(factor_of(e.factor))) return;
  with_wide_float_type(e.p.dtype, "ema", [&](auto scalar) { ema_typed<decltype(scalar)>(e); });
}

void sum_of_squares(const SumOfSquares& a, Stream) {
  const Tensor& t = a.x;
  const int64_t n = t.numel(), blocks = (n + kGrain - 1) / kGrain;
  double* partial = static_cast<double*>(thread_scratch(0, std::max<int64_t>(1, blocks) * 8));
  with_float_type(t.dtype, "sum_of_squares", [&](auto scalar) {
    using T = decltype(scalar);
    const T* x = t.ptr<T>();
    parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
      partial[begin / kGrain] = sum_of_squares_of(end - begin, x + begin);
    });
  });
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) total += partial[b];
  *a.sum.ptr<double>() = total;
}

void clip_factor(const ClipFactor& a, Stream) {
  const double norm = std::sqrt(*a.sum_of_squares.ptr<double>());
  const bool clips = a.max_norm > 0 && norm > a.max_norm;
  *a.norm.ptr<double>() = norm;
  *a.factor.ptr<double>() = !std::isfinite(norm) ? std::numeric_limits<double>::quiet_NaN()
                            : clips              ? a.max_norm / (norm + 1e-6)
                                                 : 1;
}

bool all_finite(const Tensor& t) {
  const int64_t n = t.numel(), blocks = (n + kGrain - 1) / kGrain;
  uint8_t* good = static_cast<uint8_t*>(thread_scratch(0, std::max<int64_t>(1, blocks)));
  with_float_type(t.dtype, "all_finite", [&](auto scalar) {
    using T = decltype(scalar);
    const T* x = t.ptr<T>();
    parallel_for(n, kGrain,
                 [&](int64_t begin, int64_t end) { good[begin / kGrain] = all_finite_in(end - begin, x + begin); });
  });
  return std::all_of(good, good + blocks, [](uint8_t ok) { return ok != 0; });
}

}  // namespace cpu

namespace cuda {
void adamw(const AdamW& a, Stream stream);
void ema(const Ema& e, Stream stream);
void sum_of_squares(const SumOfSquares& a, Stream stream);
void clip_factor(const ClipFactor& a, Stream stream);
int64_t sum_of_squares_workspace_bytes(int64_t numbers);
}  // namespace cuda

void adamw(const AdamW& a, Stream stream) {
  check_flat(a.p, a.p, "adamw: p");
  check_flat(a.g, a.p, "adamw: g");
  if (a.m) check_flat(a.m, a.p, "adamw: m");
  check_flat(a.v, a.p, "adamw: v");
  if (a.copy)
    INGOT_CHECK(a.copy.shape == a.p.shape && (a.copy.dtype == DType::bf16 || a.copy.dtype == DType::f16) &&
                    a.copy.contiguous() && a.copy.device == a.p.device,
                "adamw: found a copy of ", a.copy.dtype, " of shape ", a.copy.shape, " on ", a.copy.device,
                ", expected ", a.p.shape, " of bf16 or f16, contiguous, on ", a.p.device);
  if (a.factor) check_number(a.factor, a.p, "adamw: factor");
  if (a.rates) check_numbers(a.rates, 3, a.p, "adamw: rates");
  INGOT_CHECK_GE(a.step, 1, "adamw: step counts from 1");
  INGOT_CHECK(a.beta1 >= 0 && a.beta1 < 1, "adamw: found beta1 ", a.beta1, ", expected it in [0, 1)");
  INGOT_CHECK(a.m || a.beta1 == 0, "adamw: found beta1 ", a.beta1, " without m, expected m, or a beta1 of 0");
  INGOT_CHECK(a.beta2 >= 0 && a.beta2 < 1, "adamw: found beta2 ", a.beta2, ", expected it in [0, 1)");
  INGOT_CHECK(a.eps > 0, "adamw: found eps ", a.eps, ", expected it positive");
  INGOT_DISPATCH(ADAMW, a.p.device, adamw, a, stream);
}

void ema(const Ema& e, Stream stream) {
  check_flat(e.p, e.p, "ema: p");
  check_flat(e.average, e.p, "ema: average");
  if (e.factor) check_number(e.factor, e.p, "ema: factor");
  if (e.rate) check_number(e.rate, e.p, "ema: rate");
  INGOT_CHECK(e.decay >= 0 && e.decay <= 1, "ema: found decay ", e.decay, ", expected it in [0, 1]");
  INGOT_DISPATCH(ADAMW, e.p.device, ema, e, stream);
}

void sum_of_squares(const SumOfSquares& a, Stream stream) {
  check_flat(a.x, a.x, "sum_of_squares: x");
  check_number(a.sum, a.x, "sum_of_squares: sum");
  const int64_t need = sum_of_squares_workspace_bytes(a.x.numel(), a.x.device);
  INGOT_CHECK_GE(a.workspace ? a.workspace.bytes() : 0, need, "sum_of_squares: bytes of workspace");
  INGOT_CHECK(need == 0 || a.workspace.device == a.x.device, "sum_of_squares: found workspace on ", a.workspace.device,
              ", expected ", a.x.device);
  INGOT_DISPATCH(ADAMW, a.x.device, sum_of_squares, a, stream);
}

int64_t sum_of_squares_workspace_bytes([[maybe_unused]] int64_t numbers, [[maybe_unused]] Device device) {
  if constexpr (INGOT_HAS_CUDA(ADAMW))
    if (device.kind == Device::cuda) return cuda::sum_of_squares_workspace_bytes(numbers);
  return 0;  // the threads of a CPU have workspaces of their own
}

void clip_factor(const ClipFactor& a, Stream stream) {
  check_number(a.sum_of_squares, a.sum_of_squares, "clip_factor: sum_of_squares");
  check_number(a.norm, a.sum_of_squares, "clip_factor: norm");
  check_number(a.factor, a.sum_of_squares, "clip_factor: factor");
  INGOT_CHECK(a.max_norm >= 0, "clip_factor: found max_norm ", a.max_norm, ", expected at least 0");
  INGOT_DISPATCH(ADAMW, a.factor.device, clip_factor, a, stream);
}

bool all_finite(const Tensor& t) {
  check_flat(t, t, "all_finite");
  INGOT_CHECK(t.device.kind == Device::cpu, "all_finite: found a tensor on ", t.device, ", expected it in host memory");
  return cpu::all_finite(t);
}

}  // namespace ingot
