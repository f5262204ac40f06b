#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/elements.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/row_units.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/scaled_add/scaled_rows.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 128;  // a block takes a row

// N: elements of a unit, moved at once.
template <class Y, int N>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const float* x, int64_t x_stride, const float* scale, Y* y, int64_t y_stride, int64_t cols) {
  const int64_t row = blockIdx.x;
  const float factor = scale[row];
#pragma unroll 4
  for (int64_t k = int64_t(threadIdx.x) * N; k < cols; k += kThreads * N) {
    float v[N];
    tile::load_elements(v, x + row * x_stride + k);
#pragma unroll
    for (float& value : v) value *= factor;
    tile::store_elements(y + row * y_stride + k, v);
  }
}

struct BackwardParams {
  const float *x, *scale, *dy;
  float *dx, *dscale;
  int64_t x_stride, dy_stride, dx_stride, cols;
};
template <int N>
__global__ void __launch_bounds__(kThreads) scale_back_kernel(const __grid_constant__ BackwardParams p) {
  auto& memory = tile::shared<tile::GroupSumMemory<1, kThreads>>();
  const int64_t row = blockIdx.x;
  const float factor = p.scale[row];
  float sum[1] = {0};
#pragma unroll 4
  for (int64_t k = int64_t(threadIdx.x) * N; k < p.cols; k += kThreads * N) {
    float x[N], dy[N], dx[N];
    tile::load_elements(x, p.x + row * p.x_stride + k);
    tile::load_elements(dy, p.dy + row * p.dy_stride + k);
    tile::load_elements(dx, p.dx + row * p.dx_stride + k);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      sum[0] = fmaf(x[n], dy[n], sum[0]);
      dx[n] = fmaf(factor, dy[n], dx[n]);
    }
    tile::store_elements(p.dx + row * p.dx_stride + k, dx);
  }
  tile::group_sum(sum, kThreads, memory);
  if (threadIdx.x == 0 && p.dscale != nullptr) p.dscale[row] += sum[0];
}

constexpr int kVector = 4;
bool in_vectors(int64_t cols, std::initializer_list<Tensor> matrices) {
  for (const Tensor& t : matrices)
    if (!tile::rows_start_aligned(t, kVector * size_of(t.dtype))) return false;
  return cols % kVector == 0;
}

}  // namespace

void scaled_rows(const ScaledRows& a, Stream stream) {
  if (a.x.numel() == 0) return;
  with_gpu_float_type(a.y.dtype, "scaled_rows", [&](auto type) {
    using Y = decltype(type);
    gpu::launch("scaled_rows", in_vectors(a.x.cols(), {a.x, a.y}) ? scale_kernel<Y, kVector> : scale_kernel<Y, 1>,
                {.grid = a.x.rows(), .block = kThreads, .device = a.x.device.index}, stream, a.x.ptr<float>(),
                a.x.row_stride(), a.scale.ptr<float>(), a.y.ptr<Y>(), a.y.row_stride(), a.x.cols());
  });
}

void scaled_rows_backward(const ScaledRowsBackward& a, Stream stream) {
  if (a.x.numel() == 0) return;
  const BackwardParams p{.x = a.x.ptr<float>(),
                         .scale = a.scale.ptr<float>(),
                         .dy = a.dy.ptr<float>(),
                         .dx = a.dx.ptr<float>(),
                         .dscale = a.dscale ? a.dscale.ptr<float>() : nullptr,
                         .x_stride = a.x.row_stride(),
                         .dy_stride = a.dy.row_stride(),
                         .dx_stride = a.dx.row_stride(),
                         .cols = a.x.cols()};
  gpu::launch("scaled_rows_backward",
              in_vectors(p.cols, {a.x, a.dy, a.dx}) ? scale_back_kernel<kVector> : scale_back_kernel<1>,
              {.grid = a.x.rows(), .block = kThreads, .device = a.x.device.index}, stream, p);
}

}  // namespace ingot::cuda
