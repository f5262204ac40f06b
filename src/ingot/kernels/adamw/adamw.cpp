#include "ingot/kernels/adamw/adamw.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/dispatch.h"
#include "ingot/core/thread_pool.h"

namespace ingot {
namespace {

constexpr int64_t kGrain = 16384;  // elements per task and per partial sum

void check_flat(const Tensor& t, const Tensor& like, const char* what) {
  INGOT_CHECK(t.shape == like.shape, what, ": found shape ", t.shape, ", expected ", like.shape);
  INGOT_CHECK_EQ(t.dtype, like.dtype, what, " dtype");
  INGOT_CHECK_EQ(t.device, like.device, what, " device");
  INGOT_CHECK(t.contiguous(), what, ": found a strided tensor of shape ", t.shape, ", expected a contiguous one");
}

}  // namespace

namespace cpu {
namespace {

template <class T> void adamw_typed(const AdamW& a) {
  T *p = a.p.ptr<T>(), *m = a.m.ptr<T>(), *v = a.v.ptr<T>();
  const T* g = a.g.ptr<T>();
  const T b1 = T(a.beta1), b2 = T(a.beta2), c1 = T(1 - a.beta1), c2 = T(1 - a.beta2), eps = T(a.eps),
          scale = T(a.grad_scale);
  const T step = T(a.lr / (1 - std::pow(a.beta1, double(a.step))));
  const T root = T(1 / std::sqrt(1 - std::pow(a.beta2, double(a.step))));
  const T keep = T(1 - a.lr * a.weight_decay);
  parallel_for(a.p.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T grad = g[i] * scale;
      m[i] = b1 * m[i] + c1 * grad;
      v[i] = b2 * v[i] + c2 * (grad * grad);
      p[i] = p[i] * keep - step * m[i] / (std::sqrt(v[i]) * root + eps);
    }
  });
}

template <class T> void ema_typed(const Ema& e) {
  const T* p = e.p.ptr<T>();
  T* average = e.average.ptr<T>();
  const T rest = T(1 - e.decay);
  parallel_for(e.p.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) average[i] += rest * (p[i] - average[i]);
  });
}

}  // namespace

void adamw(const AdamW& a, Stream) {
  with_wide_float_type(a.p.dtype, "adamw", [&](auto scalar) { adamw_typed<decltype(scalar)>(a); });
}
void ema(const Ema& e, Stream) {
  with_wide_float_type(e.p.dtype, "ema", [&](auto scalar) { ema_typed<decltype(scalar)>(e); });
}

double sum_of_squares(const Tensor& t, Stream) {
  const int64_t n = t.numel(), blocks = (n + kGrain - 1) / kGrain;
  double* partial = static_cast<double*>(thread_scratch(0, std::max<int64_t>(1, blocks) * 8));
  with_float_type(t.dtype, "sum_of_squares", [&](auto scalar) {
    using T = decltype(scalar);
    const T* x = t.ptr<T>();
    parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
      double sum[8] = {};
      for (int64_t i = begin; i < end; ++i) sum[(i - begin) % 8] += double(accum_t<T>(x[i])) * double(accum_t<T>(x[i]));
      partial[begin / kGrain] = ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
    });
  });
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) total += partial[b];
  return total;
}

bool all_finite(const Tensor& t, Stream) {
  const int64_t n = t.numel(), blocks = (n + kGrain - 1) / kGrain;
  uint8_t* good = static_cast<uint8_t*>(thread_scratch(0, std::max<int64_t>(1, blocks)));
  with_float_type(t.dtype, "all_finite", [&](auto scalar) {
    using T = decltype(scalar);
    const T* x = t.ptr<T>();
    parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
      bool ok = true;
      for (int64_t i = begin; i < end; ++i) ok &= std::isfinite(accum_t<T>(x[i]));
      good[begin / kGrain] = ok;
    });
  });
  return std::all_of(good, good + blocks, [](uint8_t ok) { return ok != 0; });
}

}  // namespace cpu

#ifdef INGOT_HAS_CUDA_ADAMW
namespace cuda {
void adamw(const AdamW& a, Stream stream);
void ema(const Ema& e, Stream stream);
double sum_of_squares(const Tensor& t, Stream stream);
bool all_finite(const Tensor& t, Stream stream);
}  // namespace cuda
#define INGOT_DISPATCH_ADAMW INGOT_DISPATCH_WITH_CUDA
#else
#define INGOT_DISPATCH_ADAMW INGOT_DISPATCH_CPU_ONLY
#endif

void adamw(const AdamW& a, Stream stream) {
  check_flat(a.p, a.p, "adamw: p");
  check_flat(a.g, a.p, "adamw: g");
  check_flat(a.m, a.p, "adamw: m");
  check_flat(a.v, a.p, "adamw: v");
  INGOT_CHECK_GE(a.step, 1, "adamw: step counts from 1");
  INGOT_CHECK(a.beta1 >= 0 && a.beta1 < 1, "adamw: found beta1 ", a.beta1, ", expected it in [0, 1)");
  INGOT_CHECK(a.beta2 >= 0 && a.beta2 < 1, "adamw: found beta2 ", a.beta2, ", expected it in [0, 1)");
  INGOT_CHECK(a.eps > 0, "adamw: found eps ", a.eps, ", expected it positive");
  INGOT_DISPATCH_ADAMW(a.p.device, adamw, a, stream);
}

void ema(const Ema& e, Stream stream) {
  check_flat(e.p, e.p, "ema: p");
  check_flat(e.average, e.p, "ema: average");
  INGOT_CHECK(e.decay >= 0 && e.decay <= 1, "ema: found decay ", e.decay, ", expected it in [0, 1]");
  INGOT_DISPATCH_ADAMW(e.p.device, ema, e, stream);
}

double sum_of_squares(const Tensor& t, Stream stream) {
  check_flat(t, t, "sum_of_squares");
  return INGOT_DISPATCH_ADAMW(t.device, sum_of_squares, t, stream);
}

bool all_finite(const Tensor& t, Stream stream) {
  check_flat(t, t, "all_finite");
  return INGOT_DISPATCH_ADAMW(t.device, all_finite, t, stream);
}

}  // namespace ingot
