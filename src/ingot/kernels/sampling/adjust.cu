#include "ingot/gpu/launch.h"
#include "ingot/kernels/sampling/adjust.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 256;

struct AdjustParams {
  const float* logits;
  float* adjusted;
  const int32_t* bias_ids;
  const float* biases;
  const uint32_t* allowed;  // or null
  int32_t V, n;
};

__global__ void __launch_bounds__(kThreads) adjust_kernel(const __grid_constant__ AdjustParams p) {
  const int32_t v = int32_t(blockIdx.x) * kThreads + int32_t(threadIdx.x);
  if (v >= p.V) return;
  float x = p.logits[v];
  int32_t low = 0;  // the first bias of an id of at least v
  for (int32_t high = p.n; low < high;) {
    const int32_t middle = (low + high) / 2;
    if (p.bias_ids[middle] < v)
      low = middle + 1;
    else
      high = middle;
  }
  for (; low < p.n && p.bias_ids[low] == v; ++low) x += p.biases[low];
  if (p.allowed != nullptr && (p.allowed[v / 32] >> (v % 32) & 1) == 0) x = -INFINITY;
  p.adjusted[v] = x;
}

}  // namespace

void adjust_logits(const AdjustLogits& a, Stream stream) {
  const AdjustParams p{.logits = a.logits.ptr<float>(),
                       .adjusted = a.adjusted.ptr<float>(),
                       .bias_ids = a.bias_ids ? a.bias_ids.ptr<int32_t>() : nullptr,
                       .biases = a.biases ? a.biases.ptr<float>() : nullptr,
                       .allowed = a.allowed ? a.allowed.ptr<uint32_t>() : nullptr,
                       .V = int32_t(a.logits.numel()),
                       .n = a.bias_ids ? int32_t(a.bias_ids.numel()) : 0};
  gpu::launch(
      "adjust logits", adjust_kernel,
      {.grid = (a.logits.numel() + kThreads - 1) / kThreads, .block = kThreads, .device = a.logits.device.index},
      stream, p);
}

}  // namespace ingot::cuda
