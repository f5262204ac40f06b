#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/block_sum.cuh"
#include "ingot/gpu/tile/elements.cuh"
#include "ingot/kernels/adamw/adamw.h"
#include "ingot/kernels/adamw/adamw_step.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 256, kVector = 4;
constexpr int64_t kMostBlocks = 1024;  // of a sum: a constant, so that the order of a sum depends on its length alone

__device__ inline bool finite(double x) { return fabs(x) <= 1.7976931348623157e308; }

// Loops over flat f32 tensors: vectors of four where all tensors begin aligned, then the remaining elements.
struct Span {
  int64_t vectors, count;
};
Span span_of(int64_t count, std::initializer_list<const Tensor*> tensors) {
  bool aligned = true;
  for (const Tensor* t : tensors) aligned = aligned && reinterpret_cast<uintptr_t>(t->data) % 16 == 0;
  return {aligned ? count / kVector : 0, count};
}
int64_t threads_of(const Span& s) { return s.vectors + (s.count - s.vectors * kVector); }
// Calls work(first element, Count<N>).
template <int N> struct Count { static constexpr int value = N; };
template <class Work> __device__ inline void for_my_elements(const Span& s, Work&& work) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < s.vectors)
    work(i * kVector, Count<kVector>{});
  else if (const int64_t rest = s.vectors * kVector + (i - s.vectors); rest < s.count)
    work(rest, Count<1>{});
}

template <class C> struct AdamWParams {
  detail::AdamWStep<float> step;
  double grad_scale;
  float *p, *m, *v;
  const float* g;
  C* copy;               // may be null
  const double* factor;  // may be null
  const double* rates;   // null: the rates are in `step`
  Span span;
};
template <class C> __global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ AdamWParams<C> a) {
  const double scale = a.grad_scale * (a.factor != nullptr ? *a.factor : 1);
  if (!finite(scale)) return;
  detail::AdamWStep<float> s = a.step;
  if (a.rates != nullptr) s.step = float(a.rates[0]), s.root = float(a.rates[1]), s.decay = float(a.rates[2]);
  for_my_elements(a.span, [&](int64_t i, auto count) {
    constexpr int N = decltype(count)::value;
    float p[N], g[N], m[N], v[N];
    tile::load_elements(p, a.p + i), tile::load_elements(g, a.g + i), tile::load_elements(v, a.v + i);
    if (a.m != nullptr) tile::load_elements(m, a.m + i);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float grad = g[n] * float(scale);
      m[n] = a.m != nullptr ? s.beta1 * m[n] + s.rest1 * grad : grad;
      v[n] = s.beta2 * v[n] + s.rest2 * (grad * grad);
      p[n] -= s.decay * p[n] + s.step * m[n] / (sqrtf(v[n]) * s.root + s.eps);
    }
    tile::store_elements(a.p + i, p), tile::store_elements(a.v + i, v);
    if (a.m != nullptr) tile::store_elements(a.m + i, m);
    if (a.copy != nullptr) tile::store_elements(a.copy + i, p);
  });
}

struct EmaParams {
  const float* p;
  float* average;
  float rest;
  const double* factor;  // may be null
  const double* rate;    // null: the rate is in `rest`
  Span span;
};
__global__ void __launch_bounds__(kThreads) ema_kernel(const __grid_constant__ EmaParams e) {
  if (e.factor != nullptr && !finite(*e.factor)) return;
  const float rest = e.rate != nullptr ? float(1 - *e.rate) : e.rest;
  for_my_elements(e.span, [&](int64_t i, auto count) {
    constexpr int N = decltype(count)::value;
    float p[N], average[N];
    tile::load_elements(p, e.p + i), tile::load_elements(average, e.average + i);
#pragma unroll
    for (int n = 0; n < N; ++n) average[n] += rest * (p[n] - average[n]);
    tile::store_elements(e.average + i, average);
  });
}

using SumMemory = tile::BlockSumMemory<double, kThreads>;

// Computes each block's part of the squares. A block takes the same elements whatever the alignment is.
template <class T>
__global__ void __launch_bounds__(kThreads) square_parts(const T* __restrict__ x, int64_t count, double* parts) {
  double sum = 0;
  constexpr int kTogether = 4;  // loads in flight
  const int64_t step = int64_t(gridDim.x) * kThreads;
  int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  for (; i + (kTogether - 1) * step < count; i += kTogether * step) {
    float v[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) v[k] = tile::to_float(x[i + k * step]);
#pragma unroll
    for (int k = 0; k < kTogether; ++k) sum += double(v[k]) * double(v[k]);
  }
  for (; i < count; i += step) {
    const double v = double(tile::to_float(x[i]));
    sum += v * v;
  }
  sum = tile::block_sum(sum, tile::shared<SumMemory>());
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(kThreads) add_parts(const double* parts, int count, double* total) {
  double sum = 0;
  for (int i = int(threadIdx.x); i < count; i += kThreads) sum += parts[i];
  sum = tile::block_sum(sum, tile::shared<SumMemory>());
  if (threadIdx.x == 0) *total = sum;
}

__global__ void clip_kernel(const double* sum_of_squares, double* norm_out, double* factor, double max_norm) {
  const double norm = sqrt(*sum_of_squares);
  *norm_out = norm;
  *factor = !finite(norm) ? norm - norm : max_norm > 0 && norm > max_norm ? max_norm / (norm + 1e-6) : 1;
}

void check_f32(const char* op, const Tensor& t) {
  if (t.dtype != DType::f32) fail(ErrorCode::unsupported, op, ": found dtype ", t.dtype, " on a GPU, expected f32");
}
gpu::Launch grid_of(int64_t threads, Device device) {
  return {.grid = (threads + kThreads - 1) / kThreads, .block = kThreads, .device = device.index};
}
const double* number(const Tensor& t) { return t ? t.ptr<double>() : nullptr; }
int64_t sum_blocks(int64_t numbers) { return std::clamp<int64_t>((numbers + kThreads - 1) / kThreads, 1, kMostBlocks); }

}  // namespace

void adamw(const AdamW& a, Stream stream) {
  check_f32("adamw", a.p);
  const std::array<double, 3> rates = adamw_rates(a);
  const auto run = [&]<class C>(C) {
    const AdamWParams<C> p{
        .step = {.grad_scale = 1,  // the kernel multiplies by its own factor instead
                 .beta1 = float(a.beta1),
                 .rest1 = float(1 - a.beta1),
                 .beta2 = float(a.beta2),
                 .rest2 = float(1 - a.beta2),
                 .step = float(rates[0]),
                 .root = float(rates[1]),
                 .eps = float(a.eps),
                 .decay = float(rates[2])},
        .grad_scale = a.grad_scale,
        .p = a.p.ptr<float>(),
        .m = a.m ? a.m.ptr<float>() : nullptr,
        .v = a.v.ptr<float>(),
        .g = a.g.ptr<float>(),
        .copy = a.copy ? a.copy.ptr<C>() : nullptr,
        .factor = number(a.factor),
        .rates = number(a.rates),
        .span = span_of(a.p.numel(), {&a.p, &a.g, a.m ? &a.m : &a.p, &a.v, a.copy ? &a.copy : &a.p})};
    if (p.span.count == 0) return;
    gpu::launch("adamw", adamw_kernel<C>, grid_of(threads_of(p.span), a.p.device), stream, p);
  };
  if (a.copy && a.copy.dtype == DType::f16) return run(f16{});
  run(bf16{});
}

void ema(const Ema& e, Stream stream) {
  check_f32("ema", e.p);
  const EmaParams p{.p = e.p.ptr<float>(),
                    .average = e.average.ptr<float>(),
                    .rest = float(1 - e.decay),
                    .factor = number(e.factor),
                    .rate = number(e.rate),
                    .span = span_of(e.p.numel(), {&e.p, &e.average})};
  if (p.span.count == 0) return;
  gpu::launch("ema", ema_kernel, grid_of(threads_of(p.span), e.p.device), stream, p);
}

int64_t sum_of_squares_workspace_bytes(int64_t numbers) { return 8 * sum_blocks(numbers); }

void sum_of_squares(const SumOfSquares& a, Stream stream) {
  const int64_t blocks = sum_blocks(a.x.numel());
  double* parts = reinterpret_cast<double*>(a.workspace.data);
  const gpu::Launch grid{.grid = blocks, .block = kThreads, .device = a.x.device.index};
  with_gpu_float_type(a.x.dtype, "sum_of_squares", [&](auto scalar) {
    using T = decltype(scalar);
    gpu::launch("sum_of_squares", square_parts<T>, grid, stream, a.x.ptr<T>(), a.x.numel(), parts);
  });
  gpu::launch("sum_of_squares", add_parts, {.block = kThreads, .device = a.x.device.index}, stream,
              static_cast<const double*>(parts), int(blocks), a.sum.ptr<double>());
}

void clip_factor(const ClipFactor& a, Stream stream) {
  gpu::launch("clip_factor", clip_kernel, {.device = a.factor.device.index}, stream,
              static_cast<const double*>(a.sum_of_squares.ptr<double>()), a.norm.ptr<double>(), a.factor.ptr<double>(),
              a.max_norm);
}

}  // namespace ingot::cuda
