#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/l2.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/tile/early_reads.cuh"
#include "ingot/gpu/tile/early_start.h"
#include "ingot/gpu/tile/row_units.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/activation/gelu.cuh"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 256;

struct Params {
  tile::Rows dy, x, y;  // y or dx
  tile::RowUnits units;
  Act act;                // of the kernels for single elements
  uint32_t early_blocks;  // blocks that prefetch their operands while earlier kernels end
  bool evict_first, early;
};

// For 16-bit results the exponentials come from the special function unit. Their errors stay below a hundredth of the
// rounding.
template <class F> struct Narrow {
  __device__ static float value(float x) { return F::value(Approximate(x)).v; }
  __device__ static float slope(float x) { return F::slope(Approximate(x)).v; }
};
template <> struct Narrow<Gelu> {
  __device__ static float value(float x) { return detail::gelu_value(x); }
  __device__ static float slope(float x) { return detail::gelu_slope(x); }
};
// For x = -inf the first factor is finite, which avoids inf * 0; for a NaN the second factor is a NaN.
template <> struct Narrow<Silu> {
  __device__ static float value(float x) {
    return fmaxf(x, -128.f) * ptx::reciprocal_approx(1 + ptx::exp2_approx(x * -detail::kLog2e));
  }
  __device__ static float slope(float x) { return Silu::slope(Approximate(x)).v; }
};
// A more accurate logarithm than that of Approximate.
template <> struct Narrow<Softplus> {
  __device__ static float value(float x) {
    return detail::relu_or_nan(x) + detail::log1p_of_unit_8(detail::fast_exp2(fabsf(x) * -detail::kLog2e));
  }
  __device__ static float slope(float x) { return Softplus::slope(Approximate(x)).v; }
};

// f32 is computed as the CPU does.
template <class F, class T> __device__ inline float value_of(float x) {
  if constexpr (sizeof(T) == 4)
    return F::template value<float>(x);
  else
    return Narrow<F>::value(x);
}
template <class F, class T> __device__ inline float slope_of(float x) {
  if constexpr (sizeof(T) == 4)
    return F::template slope<float>(x);
  else
    return Narrow<F>::slope(x);
}
template <class F, class T, bool kBackward> __device__ inline float result(float x, float dy) {
  if constexpr (kBackward)
    return dy * slope_of<F, T>(x);
  else
    return value_of<F, T>(x);
}

// One vector per thread: more loads at a time are slower (docs/measured-facts.md).
template <class F, class T, bool kBackward>
__global__ void __launch_bounds__(kThreads) activate_vectors(const __grid_constant__ Params p) {
  constexpr int N = 16 / int(sizeof(T));
  if (p.early) ptx::let_next_kernel_start();
  if (blockIdx.x < p.early_blocks && threadIdx.x == 0) {
    tile::ask_early<T, N>(p.x, p.units, blockIdx.x * kThreads, kThreads);
    if constexpr (kBackward) tile::ask_early<T, N>(p.dy, p.units, blockIdx.x * kThreads, kThreads);
  }
  ptx::wait_for_earlier_kernels();
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= p.units.units) return;
  const tile::Division place = tile::place_of(p.units, i);
  tile::Vec<T, N> x, dy;
  tile::load(x, tile::at<const T, N>(p.x, place));
  if constexpr (kBackward) tile::load(dy, tile::at<const T, N>(p.dy, place));
  float value[N], upstream[N];
  tile::to_float(x, value);
  tile::to_float(dy, upstream);
#pragma unroll
  for (int n = 0; n < N; ++n) value[n] = result<F, T, kBackward>(value[n], upstream[n]);
  tile::store(tile::at<T, N>(p.y, place), tile::from_float<T>(value), p.evict_first);
}

// The activation is the same for the whole grid: a single kernel serves all activations where speed does not matter.
template <class T, bool kBackward, class... Fs>
__device__ inline float any_result(Act act, float x, float dy, ActivationList<Fs...>) {
  int i = 0;
  float y = 0;
  const bool known = ((int(act) == i++ && (y = result<Fs, T, kBackward>(x, dy), true)) || ...);
  return known ? y : __int_as_float(0x7fffffff);
}

// Any alignment, any length.
template <class T, bool kBackward>
__global__ void __launch_bounds__(kThreads) activate_elements(const __grid_constant__ Params p) {
  if (p.early) ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= p.units.units) return;
  const tile::Division place = tile::place_of(p.units, i);
  const float x = tile::to_float(*tile::at<const T, 1>(p.x, place));
  const float dy = kBackward ? tile::to_float(*tile::at<const T, 1>(p.dy, place)) : 0.f;
  *tile::at<T, 1>(p.y, place) = tile::from_float<T>(any_result<T, kBackward>(p.act, x, dy, Activations{}));
}

// --- host ------------------------------------------------------------------------------------------------------------

using Kernel = void (*)(Params);

template <class T, bool kBackward> Kernel pick_kernel(Act act, bool vectors) {
  if (!vectors) return activate_elements<T, kBackward>;
  Kernel kernel = nullptr;
  with_activation(act, [&](auto f) { kernel = activate_vectors<decltype(f), T, kBackward>; });
  return kernel;
}
template <bool kBackward> Kernel pick_kernel(const char* op, DType t, Act act, bool vectors) {
  switch (t) {
    case DType::f32: return pick_kernel<float, kBackward>(act, vectors);
    case DType::bf16: return pick_kernel<bf16, kBackward>(act, vectors);
    case DType::f16: return pick_kernel<f16, kBackward>(act, vectors);
    default: fail(ErrorCode::unsupported, op, ": found dtype ", t, " on a GPU, expected f32, bf16 or f16");
  }
}

template <bool kBackward>
void launch(const char* op, Act act, const Tensor& dy, const Tensor& x, const Tensor& y, Stream stream) {
  const int64_t per_vec = 16 / size_of(x.dtype);
  bool vectors = true, one_row = true;
  for (const Tensor* t : {&dy, &x, &y}) {
    vectors = vectors && tile::rows_start_aligned(*t, 16);
    one_row = one_row && tile::without_gaps(*t);
  }
  vectors = vectors && (one_row ? x.numel() : x.cols()) % per_vec == 0;
  const Kernel kernel = pick_kernel<kBackward>(op, x.dtype, act, vectors);
  if (x.numel() == 0) return;
  Params p{};
  p.act = act;
  p.evict_first = x.bytes() > gpu::beyond_l2_bytes(gpu::device_limits(x.device));
  const int64_t step = vectors ? per_vec : 1;
  const int64_t rows = one_row ? 1 : x.rows(), cols = x.numel() / rows;
  tile::for_each_launch(rows, cols / step, one_row, [&](int64_t row, int64_t unit, const tile::RowUnits& units) {
    const auto from_here = [&](const Tensor& t) {
      return t ? tile::moved(tile::rows_of(t), row, unit * step, t.dtype) : tile::Rows{};
    };
    p.dy = from_here(dy), p.x = from_here(x), p.y = from_here(y);
    p.units = units;
    const int64_t grid = (units.units + kThreads - 1) / kThreads;
    if (vectors) p.early_blocks = tile::early_blocks(kThreads * 16 * (kBackward ? 2 : 1));
    p.early = tile::starts_next_early(kThreads * step * size_of(x.dtype) * (kBackward ? 3 : 2));
    gpu::launch(op, kernel, {.grid = grid, .block = kThreads, .overlap = true, .device = x.device.index}, stream, p);
  });
}

}  // namespace

void activate(const Activate& a, Stream stream) { launch<false>("activate", a.act, {}, a.x, a.y, stream); }
void activate_backward(const ActivateBackward& a, Stream stream) {
  launch<true>("activate_backward", a.act, a.dy, a.x, a.dx, stream);
}

}  // namespace ingot::cuda
