// The backward pass up to 128 wide for many rows: the networks it supports, and its launches. Described in
// docs/mlp-kernels.md.
#include <algorithm>
#include <atomic>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/mlp/parts/backward_plan.h"
#include "ingot/kernels/mlp/to_128/layer_pipeline.cuh"

namespace ingot::cuda {
namespace layer_pipeline {
namespace {

// --- the sums

struct SummedLayer : LayerShape {
  int parts = 0;
};
struct SumArguments {
  SummedLayer layer[kMlpMaxLayers];
  const float* partial = nullptr;
};

// Blocks per SM: two of the larger size run the gradients of four layers at once; three of the smaller size, of six
// layers.
constexpr int kSumThreadsWide = 512, kSumThreadsDeep = 384, kSumBlocksAtOnce = 256;
constexpr int kAtOnce = 5;  // parts loaded by a thread before the additions

// One block for each pair of rows of each dW. Groups of half of kWidth threads each sum every n-th part, in a fixed
// order. The code is short, because all SMs fetch it at once while nothing else runs.
template <class T, int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == kSumThreadsWide ? 2 : 3) sum_kernel(SumArguments a) {
  constexpr int kAcross = kWidth / 2, kGroups = kThreads / kAcross;
  __shared__ float4 partial[kThreads];
  __shared__ float bias[kThreads / 32];
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int pair = int(blockIdx.x), l = 0;
#pragma unroll 1
  while (pair >= row_pairs(a.layer[l].n)) pair -= row_pairs(a.layer[l++].n);
  const SummedLayer& at = a.layer[l];
  const int first = first_row(pair), row = first + 8 * warp;  // the latter of warps 0 and 1
  // The first kernel waited for all kernels before it, so this kernel waits only for the first kernel's results.
  GradientRow<T> of;
  if (warp < 2 && row < at.n) of = load_row<T>(at, row, lane);
  const int column = thread % kAcross * 2;
  constexpr int64_t kStride = part_floats(kWidth / kPanel);
  const float* part = a.partial + at.first_part * kStride;
  const float4* from = reinterpret_cast<const float4*>(part) + part_float4(first, column, kWidth);
  int parts = column < at.k && (at.dw != nullptr || at.dg != nullptr) ? at.parts : 0;
  ptx::settle(from), ptx::settle(parts);  // otherwise the compiler computes these after the wait
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();  // the next kernel in turn waits for this kernel
  float4 sum = {};
#pragma unroll 1
  for (int p = thread / kAcross; p < parts; p += kAtOnce * kGroups) {
    float4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (p + i * kGroups < parts) v[i] = __ldcs(from + (p + i * kGroups) * (kStride / 4));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (p + i * kGroups < parts) sum = make_float4(sum.x + v[i].x, sum.y + v[i].y, sum.z + v[i].z, sum.w + v[i].w);
  }
  partial[thread] = sum;
  if (at.db != nullptr) {
    constexpr int kOfRow = kThreads / 2, kRowsOf = bias_rows(kWidth / kPanel);
    const int bias_row = first + thread / kOfRow * 8;
    const float* db = part + kWidth * kWidth + bias_row;
    float b[1] = {};
#pragma unroll 1
    for (int p = thread % kOfRow; bias_row < at.n && p < at.parts * kRowsOf; p += kOfRow)
      b[0] += db[p / kRowsOf * kStride + p % kRowsOf * kWidth];
    tile::warp_sum(b, 32);
    if (lane == 0) bias[warp] = b[0];
  }
  __syncthreads();
  if (warp >= 2 || row >= at.n) return;
  float dw[4] = {};
  if (2 * lane < kAcross) add_groups<kGroups, kAcross>(dw, reinterpret_cast<const float2*>(partial) + 4 * lane + warp);
  add_row(at, row, of, dw, lane);
  if (lane == 0 && at.db != nullptr) {
    float b = 0;
#pragma unroll 1
    for (int i = 0; i < kThreads / 64; ++i) b += bias[kThreads / 64 * warp + i];
    at.db[row] = of.old_db + b;
  }
}

// --- the supported networks, and the launches

using LayersKernel = void (*)(Maps, layer_pipeline::Arguments);
LayersKernel layers_kernel(const MlpBackward& m) {
  const bool wide = mlp_panels(m) == 2;
  if (m.x.dtype == DType::f16) return wide ? layer_pipeline_kernel<f16, 2> : layer_pipeline_kernel<f16, 1>;
  return wide ? layer_pipeline_kernel<bf16, 2> : layer_pipeline_kernel<bf16, 1>;
}
int shared_bytes(const MlpBackward& m) {
  return int(mlp_panels(m) == 2 ? sizeof(layer_pipeline::SharedMemory<2>) : sizeof(layer_pipeline::SharedMemory<1>));
}

// The number of concurrent clusters: fewer than SMs / size where the size does not divide the number of SMs of a
// processing cluster.
int clusters_at_once(const MlpBackward& m, int size) {
  static std::atomic<int> known[16][4][kMaxCluster + 1];
  const int device = m.x.device.index;
  const int which = (m.x.dtype == DType::bf16) * 2 + mlp_panels(m) - 1;
  std::atomic<int>* at = device < 16 ? &known[device][which][size] : nullptr;
  if (at != nullptr && *at > 0) return *at;
  const gpu::DeviceGuard guard(device);
  const void* kernel = reinterpret_cast<const void*>(layers_kernel(m));
  gpu::allow_smem("mlp_backward", kernel, device, shared_bytes(m));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(size);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(size));
  config.blockDim = dim3(layer_pipeline::kThreads);
  config.dynamicSmemBytes = size_t(shared_bytes(m));
  config.attrs = &attribute;
  config.numAttrs = 1;
  int n = 0;
  gpu::check_cuda(cudaOccupancyMaxActiveClusters(&n, kernel, &config), "mlp_backward: clusters of ", size, " at once");
  INGOT_CHECK(n > 0, "mlp_backward: found no room for a cluster of ", size, " blocks on cuda:", device);
  if (at != nullptr) *at = n;
  return n;
}

// The division of the work: one layer per block, units of 64 rows. The workspace has a part of each layer's sums from
// each cluster, layer after layer.
struct Cut {
  int units = 0, clusters = 0, blocks = 0;  // of a cluster
  int parts = 0;
};
Cut cut_of(const MlpBackward& m) {
  const int layers = int(m.layers.size()), cluster = layers + m.activate_last;
  Cut c{.units = int((m.x.rows() + kRows - 1) / kRows)};
  c.clusters = std::min(c.units, clusters_at_once(m, cluster));
  c.parts = layers * c.clusters;
  // Blocks below the lowest gradient are dropped; the remaining work is divided as usual, so its sums have the same
  // bits.
  c.blocks = cluster - int(mlp_first_layer(m));
  return c;
}
int64_t parts_bytes(const MlpBackward& m, const Cut& c) { return c.parts * part_floats(mlp_panels(m)) * 4; }

Maps make_maps(const MlpBackward& m) {
  const gpu::TmaBox rows{.rows = kRows, .cols = kPanel, .swizzle = Swizzle::b128};
  Maps maps{};
  maps.dy = gpu::tensor_map("mlp_backward: dy", mlp_matrix(m.dy), rows);
  if (m.dx) maps.dx = gpu::tensor_map("mlp_backward: dx", mlp_matrix(m.dx), rows);
  maps.h[0] = gpu::tensor_map("mlp_backward: x", mlp_matrix(m.x), rows);
  const gpu::TmaBox weights{.rows = kPanel * mlp_panels(m), .cols = kPanel, .swizzle = Swizzle::b128};
  for (size_t l = 0; l < m.layers.size(); ++l) maps.w[l] = gpu::tensor_map("mlp_backward: w", m.layers[l].w, weights);
  for (size_t l = 0; l < size_t(mlp_backward_values(m)); ++l)
    maps.h[l + 1] = gpu::tensor_map("mlp_backward: saved", mlp_layer_part(m, m.saved, l), rows);
  return maps;
}

layer_pipeline::Arguments make_arguments(const MlpBackward& m, const Cut& c) {
  layer_pipeline::Arguments a;
  for (size_t l = 0; l < m.layers.size(); ++l) {
    a.layer[l] = {mlp_sum_layer(m.layers[l], m.grads[l]), int(l) * c.clusters};
    a.want_db = a.want_db || a.layer[l].db != nullptr;
  }
  a.layers = int(m.layers.size());
  a.cluster = c.blocks;
  a.entry = m.activate_last;
  a.partial = static_cast<float*>(m.workspace.data);
  a.clusters = c.clusters;
  a.units_each = c.units / c.clusters;
  a.units_left = c.units % c.clusters;
  a.act = m.act;
  a.want_dx = bool(m.dx);
  return a;
}

gpu::Launch layers_launch(const MlpBackward& m, const Cut& c) {
  return {.grid = int64_t(c.clusters) * c.blocks,
          .block = layer_pipeline::kThreads,
          .smem = shared_bytes(m),
          .cluster = c.blocks,
          .overlap = true,
          .device = m.x.device.index};
}

template <class T> void run(const MlpBackward& m, Stream stream) {
  const Cut c = cut_of(m);
  const layer_pipeline::Arguments a = make_arguments(m, c);
  gpu::launch("mlp_backward", layers_kernel(m), layers_launch(m, c), stream, make_maps(m), a);
  SumArguments sums{.partial = a.partial};
  int64_t pairs = 0;
  for (int l = 0; l < a.layers; ++l) sums.layer[l] = {a.layer[l], c.clusters}, pairs += row_pairs(a.layer[l].n);
  static_assert(kMlpMaxLayers * row_pairs(kPanel) <= kSumBlocksAtOnce, "only the wider networks are ever deep");
  const bool deep = pairs > kSumBlocksAtOnce;
  const auto kernel = mlp_panels(m) == 1 ? sum_kernel<T, 64, kSumThreadsWide>
                      : deep             ? sum_kernel<T, 128, kSumThreadsDeep>
                                         : sum_kernel<T, 128, kSumThreadsWide>;
  gpu::launch(
      "mlp_backward: sums", kernel,
      {.grid = pairs, .block = deep ? kSumThreadsDeep : kSumThreadsWide, .overlap = true, .device = m.x.device.index},
      stream, sums);
}

}  // namespace
}  // namespace layer_pipeline

using namespace layer_pipeline;

// The blocks of a cluster: eight layers with an activated last layer make nine blocks.
bool mlp_backward_to_128_takes(const MlpBackward& m) {
  return mlp_backward_has_shape_and_slopes(m, kMlpTo128) && int(m.layers.size()) + m.activate_last <= kMaxCluster;
}

void mlp_backward_to_128(const MlpBackward& m, Stream stream) {
  if (m.x.rows() == 0 || mlp_first_layer(m) == m.layers.size()) return;
  const MlpBackward of = mlp_backward_has_values(m) ? m : mlp_backward_form_values(m, stream);
  m.x.dtype == DType::f16 ? run<f16>(of, stream) : run<bf16>(of, stream);
}

int64_t mlp_backward_to_128_workspace_bytes(const MlpBackward& m) {
  if (m.x.rows() == 0) return 0;
  return (mlp_backward_has_values(m) ? 0 : mlp_backward_values_bytes(m)) + parts_bytes(m, cut_of(m));
}

}  // namespace ingot::cuda
