#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/mlp/forms.h"
#include "ingot/kernels/mlp/parts/formed_weights.h"
#include "ingot/kernels/mlp/parts/weight_norm.cuh"

namespace ingot::cuda {
namespace {

using namespace mlp_parts;

constexpr int kThreads = 256, kRows = kThreads / 32;  // rows of a block; a warp takes a row
constexpr int kChunks = kMlpTo512 / (32 * 8);         // vectors of 8 elements per lane and row

struct FormArguments {
  struct {
    const void *v, *g;
    void* w;
    int n, k;
  } layer[kMlpMaxLayers];
  int layers;
};

template <class T> __global__ void __launch_bounds__(kThreads) form_weights_kernel(FormArguments a) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  int row = int(blockIdx.x) * kRows + int(threadIdx.x / 32), l = 0;
#pragma unroll 1
  while (l < a.layers && row >= a.layer[l].n) row -= a.layer[l++].n;
  if (l == a.layers) return;
  const auto& of = a.layer[l];
  const int lane = int(threadIdx.x % 32);
  const int64_t start = int64_t(row) * of.k + lane * 8;
  WeightChunk<T> v[kChunks] = {};
  float sum[1] = {};
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    if (lane * 8 + c * 256 < of.k) tile::load(v[c], static_cast<const T*>(of.v) + start + c * 256);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) sum[0] += squares<T>(v[c]);
  tile::warp_sum(sum, 32);
  const float scale = tile::to_float(static_cast<const T*>(of.g)[row]) * inverse_norm(sum[0]);
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    if (lane * 8 + c * 256 < of.k) tile::store(static_cast<T*>(of.w) + start + c * 256, scaled<T>(v[c], scale), false);
}

}  // namespace

bool mlp_has_norms(const std::vector<MlpLayer>& layers) {
  return std::any_of(layers.begin(), layers.end(), [](const MlpLayer& layer) { return bool(layer.g); });
}
int64_t mlp_formed_weights_bytes(const std::vector<MlpLayer>& layers) {
  int64_t bytes = 0;
  for (const MlpLayer& layer : layers)
    if (layer.g) bytes += (layer.w.bytes() + 255) / 256 * 256;  // tensor maps require aligned matrices
  return bytes;
}

std::vector<MlpLayer> mlp_form_weights(const std::vector<MlpLayer>& layers, void* to, Stream stream) {
  std::vector<MlpLayer> formed = layers;
  FormArguments a{};
  int64_t rows = 0;
  char* at = static_cast<char*>(to);
  for (MlpLayer& layer : formed) {
    if (!layer.g) continue;
    a.layer[a.layers++] = {layer.w.data, layer.g.data, at, int(layer.w.rows()), int(layer.w.cols())};
    rows += layer.w.rows();
    const int64_t bytes = (layer.w.bytes() + 255) / 256 * 256;
    layer.w.data = at, layer.g = {};
    at += bytes;
  }
  const Tensor& w = layers.front().w;
  gpu::launch("mlp: weight norm", w.dtype == DType::f16 ? form_weights_kernel<f16> : form_weights_kernel<bf16>,
              {.grid = (rows + kRows - 1) / kRows, .block = kThreads, .overlap = true, .device = w.device.index},
              stream, a);
  return formed;
}

Mlp mlp_with_formed_weights(const Mlp& m, Stream stream) {
  Mlp formed = m;
  if (mlp_has_norms(m.layers)) formed.layers = mlp_form_weights(m.layers, m.workspace.data, stream);
  return formed;
}

}  // namespace ingot::cuda
