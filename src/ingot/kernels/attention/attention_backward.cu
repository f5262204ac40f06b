// The backward pass of attention on Hopper: delta and the sinks' gradient here, dQ, dK and dV in hopper/.
#include <cmath>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/attention/attention_cuda.h"
#include "ingot/kernels/attention/clear_uncovered.h"
#include "ingot/kernels/attention/hopper/backward.h"

namespace ingot::cuda {
namespace {

using namespace attention_hopper;

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

// dsink = -sum over queries of exp(sink - lse) delta, in an order fixed by the number of queries. A block per head.
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
  __shared__ float part[kSinkThreads / 32];
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

ScoreParams scores_of(const AttentionBackward& a, const float* delta, int64_t stride) {
  constexpr double kLog2E = 1.4426950408889634;
  return {.lse = static_cast<const float*>(a.lse.data),
          .delta = delta,
          .lse_stride = a.lse.stride[0],
          .delta_stride = stride,
          .scale = float(a.scale),
          .scale_log2 = float(a.scale * kLog2E),
          .cap_in = float(a.softcap > 0 ? a.scale / a.softcap : a.scale * kLog2E),
          .cap_out = float(a.softcap * kLog2E),
          .width = int(a.q.size(2))};
}

template <class T> void launch_query_gradient(const AttentionBackward& a, const ScoreParams& scores, Stream stream) {
  const QueryGradientKernel kernel = query_gradient_kernel<T>(scores.width, a.softcap > 0);
  const bool has_keys = a.k.size(0) > 0;
  const WalkMaps maps{.rows = {head_map("attention_backward: q", a.q, kernel.rows),
                               head_map("attention_backward: dout", a.dout, kernel.rows)},
                      .k = head_map("attention_backward: k", has_keys ? a.k : a.q, kernel.keys),
                      .v = head_map("attention_backward: v", has_keys ? a.v : a.q, kernel.keys)};
  const QueryGradientParams p{
      .walk = walk_of(a, kernel.rows, stream), .scores = scores, .dq = a.dq.data, .dq_strides = strides_of(a.dq)};
  gpu::launch("attention_backward: dq", kernel.kernel, walk_launch(p.walk, kernel.threads, kernel.smem, a.q.device),
              stream, maps, p);
}

bool joins_gradients(const AttentionBackward& a) {
  return attention_hopper::joins_gradients(int(a.q.size(2)), a.softcap > 0, a.deterministic);
}
int64_t delta_bytes(const AttentionBackward& a) {
  return (a.q.size(0) * a.q.size(1) * int64_t(sizeof(float)) + 15) / 16 * 16;
}
int64_t query_sum_places(const AttentionBackward& a) {
  return detail::tile_places(a.q.size(0), a.cu_q.size(0) - 1, 64);
}
// The sums of dQ in fp32, where many blocks add; stored behind delta in the workspace.
int64_t query_sum_bytes(const AttentionBackward& a) {
  if (!joins_gradients(a) || a.cu_q.size(0) < 2) return 0;
  return query_sum_places(a) * a.q.size(1) * (a.q.size(2) <= 64 ? 1 : 2) * 64 * 64 * int64_t(sizeof(float));
}
float* query_sums_of(const AttentionBackward& a) {  // null: dQ is computed by a kernel of its own
  if (query_sum_bytes(a) == 0) return nullptr;
  return reinterpret_cast<float*>(static_cast<char*>(a.workspace.data) + delta_bytes(a));
}

template <class T> void launch_query_sums(const AttentionBackward& a, const float* sums, float scale, Stream stream) {
  const QuerySumParams p{.cu_q = a.cu_q.ptr<int32_t>(),
                         .segments = int(a.cu_q.size(0) - 1),
                         .heads = int(a.q.size(1)),
                         .width = int(a.q.size(2)),
                         .sums = sums,
                         .scale = scale,
                         .dq = a.dq.data,
                         .dq_strides = strides_of(a.dq)};
  gpu::launch("attention_backward: dq of its sums", query_sums_kernel<T>(p.width),
              {.grid = query_sum_places(a) * p.heads, .block = 128, .device = a.q.device.index}, stream, p);
}

// With sums: this kernel adds up dQ too.
template <class T>
void launch_key_gradient(const AttentionBackward& a, const ScoreParams& scores, float* sums, Stream stream) {
  const KeyGradientKernel kernel =
      sums ? joint_gradient_kernel<T>(scores.width) : key_gradient_kernel<T>(scores.width, a.softcap > 0);
  const bool has_queries = a.q.size(0) > 0;
  const KeyGradientMaps maps{.q = head_map("attention_backward: q", has_queries ? a.q : a.k, kernel.queries),
                             .dout = head_map("attention_backward: dout", has_queries ? a.dout : a.v, kernel.queries),
                             .k = head_map("attention_backward: k", a.k, kernel.keys),
                             .v = head_map("attention_backward: v", a.v, kernel.keys)};
  KeyGradientParams p{.walk = walk_of(a, kernel.keys, stream),
                      .scores = scores,
                      .query_rows = a.q.size(0),
                      .dk = a.dk.data,
                      .dv = a.dv.data,
                      .dk_strides = strides_of(a.dk),
                      .dv_strides = strides_of(a.dv),
                      .add_dv = a.add_dv,
                      .query_sums = sums};
  p.walk.heads /= p.walk.group;
  p.walk.heads_in_set = std::max(1, p.walk.heads_in_set / p.walk.group);
  p.walk.places = detail::tile_places(a.k.size(0), p.walk.segments, kernel.keys);
  gpu::launch("attention_backward: dk and dv", kernel.kernel,
              walk_launch(p.walk, kernel.threads, kernel.smem, a.q.device), stream, maps, p);
}

}  // namespace

int64_t attention_backward_workspace_bytes(const AttentionBackward& a) { return delta_bytes(a) + query_sum_bytes(a); }

void attention_backward(const AttentionBackward& a, Stream stream) {
  const char* op = "attention_backward";
  check_gpu_operands(op, a.q, a.v);
  for (auto [name, t] : {std::pair{"dq", &a.dq}, {"dk", &a.dk}, {"dv", &a.dv}, {"out", &a.out}, {"dout", &a.dout}})
    check_gpu_vectors(op, name, *t);
  if (a.q.size(1) == 0) return;
  check_hopper(op, a.q.device);
  const gpu::DeviceGuard guard(a.q.device.index);
  const Tensor& cu_k = a.cu_k ? a.cu_k : a.cu_q;
  clear_uncovered("attention_backward: rows of no segment", {.rows = a.dq, .cu = a.cu_q}, {.rows = a.dk, .cu = cu_k},
                  {.rows = a.add_dv ? Tensor{} : a.dv, .cu = cu_k}, stream);
  if (a.cu_q.size(0) == 1) return;
  float* delta = static_cast<float*>(a.workspace.data);
  float* const sums = query_sums_of(a);
  const int64_t stride = a.q.size(0);
  const ScoreParams scores = scores_of(a, delta, stride);
  const auto run = [&](auto type) {
    using T = decltype(type);
    if (a.q.size(0) > 0) {
      launch_rows<T>(a, delta, stride, stream);
      if (sums)
        gpu::fill_bytes(sums, 0, query_sum_bytes(a), stream);
      else
        launch_query_gradient<T>(a, scores, stream);
    }
    if (a.k.size(0) > 0) launch_key_gradient<T>(a, scores, sums, stream);
    if (sums && a.q.size(0) > 0) launch_query_sums<T>(a, sums, scores.scale, stream);
  };
  if (a.q.dtype == DType::bf16)
    run(bf16());
  else
    run(f16());
}

}  // namespace ingot::cuda
