// delta, which all kernels of the backward pass read, and the gradient of the sinks.
#include <cmath>

#include "ingot/gpu/float_types.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/attention/attention_cuda.h"
#include "ingot/kernels/attention/delta.h"

namespace ingot::cuda {
namespace {

using namespace attention_parts;

constexpr int kDeltaThreads = 256, kSinkThreads = 1024;

struct DeltaParams {
  const void *out, *dout;
  Strides out_strides, dout_strides;
  const float *lse, *dlse;  // dlse: or null
  int64_t lse_stride, dlse_stride;
  float* delta;
  int64_t tokens, delta_stride;
  int heads, width, lanes;  // lanes: lanes of a warp per row, a power of two; each takes 8 columns
};

template <class T> __global__ void __launch_bounds__(kDeltaThreads) attention_delta(const DeltaParams p) {
  const int64_t row = (int64_t(blockIdx.x) * kDeltaThreads + threadIdx.x) / p.lanes;
  const int64_t token = row / p.heads;
  const int head = int(row % p.heads), column = int(threadIdx.x % p.lanes) * 8;
  float sum = 0;
  if (token < p.tokens && column < p.width) {
    tile::Vec<T, 8> a, b;
    tile::load(a, static_cast<const T*>(p.out) + token * p.out_strides.token + head * p.out_strides.head + column);
    tile::load(b, static_cast<const T*>(p.dout) + token * p.dout_strides.token + head * p.dout_strides.head + column);
    float x[8], y[8];
    tile::to_float(a, x);
    tile::to_float(b, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
  }
  for (int step = p.lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (token >= p.tokens || column != 0) return;
  // d lse / d s[i,j] = p[i,j], where the row sees a key.
  if (p.dlse != nullptr && p.lse[head * p.lse_stride + token] != -INFINITY) sum -= p.dlse[head * p.dlse_stride + token];
  p.delta[head * p.delta_stride + token] = sum;
}

struct SinkSums {
  float part[kSinkThreads / 32];
};

// dsink = -sum over queries of exp(sink - lse) delta, in an order given by the number of queries. One block per head.
template <class T>
__global__ void __launch_bounds__(kSinkThreads)
    attention_sink_gradient(const T* sinks, const float* lse, int64_t lse_stride, const float* delta,
                            int64_t delta_stride, int64_t tokens, float* dsinks) {
  const int head = int(blockIdx.x);
  const float sink = tile::to_float(sinks[head]);
  float sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < tokens; i += kSinkThreads) {
    const float row = lse[head * lse_stride + i];
    sum += row == -INFINITY ? 0.f : expf(sink - row) * delta[head * delta_stride + i];
  }
  float(&part)[kSinkThreads / 32] = tile::shared<SinkSums>().part;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = part[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x == 0) dsinks[head] -= sum;
}

template <class T> void launch_rows(const AttentionBackward& a, float* delta, int64_t stride, Stream stream) {
  const int width = int(a.q.size(2));
  int lanes = 1;
  while (lanes * 8 < width) lanes *= 2;
  const DeltaParams p{.out = a.out.data,
                      .dout = a.dout.data,
                      .out_strides = strides_of(a.out),
                      .dout_strides = strides_of(a.dout),
                      .lse = static_cast<const float*>(a.lse.data),
                      .dlse = a.dlse ? static_cast<const float*>(a.dlse.data) : nullptr,
                      .lse_stride = a.lse.stride[0],
                      .dlse_stride = a.dlse ? a.dlse.stride[0] : 0,
                      .delta = delta,
                      .tokens = a.q.size(0),
                      .delta_stride = stride,
                      .heads = int(a.q.size(1)),
                      .width = width,
                      .lanes = lanes};
  const int64_t rows = a.q.size(0) * a.q.size(1), rows_per_block = kDeltaThreads / lanes;
  const int device = a.q.device.index;
  if (!a.has_delta)
    gpu::launch("attention_backward: delta", attention_delta<T>,
                {.grid = (rows + rows_per_block - 1) / rows_per_block, .block = kDeltaThreads, .device = device},
                stream, p);
  if (!a.dsinks) return;
  const auto sinks = [&](auto type) {
    using S = decltype(type);
    gpu::launch("attention_backward: dsinks", attention_sink_gradient<S>,
                {.grid = a.q.size(1), .block = kSinkThreads, .device = device}, stream, a.sinks.ptr<S>(),
                static_cast<const float*>(a.lse.data), a.lse.stride[0], static_cast<const float*>(delta), stride,
                a.q.size(0), a.dsinks.ptr<float>());
  };
  if (a.sinks.dtype == DType::f32)
    sinks(float());
  else
    sinks(T());
}

}  // namespace

void attention_row_sums(const AttentionBackward& a, float* delta, int64_t stride, Stream stream) {
  if (a.q.dtype == DType::bf16)
    launch_rows<bf16>(a, delta, stride, stream);
  else
    launch_rows<f16>(a, delta, stride, stream);
}

}  // namespace ingot::cuda
