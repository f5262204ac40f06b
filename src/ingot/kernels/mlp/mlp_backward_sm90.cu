// The fast backward pass: what it takes, its two launches. docs/mlp-megakernel.md tells how it works.
#include <algorithm>
#include <atomic>
#include <type_traits>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/mlp/mlp_backward.h"
#include "ingot/kernels/mlp/mlp_backward_sm90_layers.cuh"

namespace ingot::cuda {
namespace backward_sm90 {
namespace {

// --- the second launch: sums over the blocks, weight norm, +=

struct LayerGradients {
  const void *v = nullptr, *g = nullptr;  // of a weight-normalised layer
  float *dw = nullptr, *db = nullptr, *dg = nullptr;
  int n = 0, k = 0;
  int first_part = 0, parts = 0;
};
struct SumArguments {
  LayerGradients layer[kMlpMaxLayers];
  const float* partial = nullptr;
};

// Blocks of the larger size to an SM: two, those of four layers' gradients run at once; of the smaller one three, of
// six.
constexpr int kSumThreads = 512, kSumThreadsDeep = 384, kSumBlocksAtOnce = 256;
constexpr int kAtOnce = 5;  // parts that a thread asks for before it adds

// Columns 4 * lane .. of one row of a gradient, and what else its sums need: asked for before the sums are there, and
// not looked at until they are.
template <class T> struct GradientRow {
  float4 old = {};
  float old_db = 0, old_dg = 0;  // lane 0
  tile::Vec<T, 4> v = {};        // of weight norm
  T g = {};
};
template <class T> __device__ GradientRow<T> load_row(const LayerGradients& at, int row, int lane) {
  GradientRow<T> to;
  const int64_t start = int64_t(row) * at.k + 4 * lane;
  const bool inside = 4 * lane < at.k;
  if (inside && at.dw != nullptr) to.old = *reinterpret_cast<const float4*>(at.dw + start);
  if (lane == 0 && at.db != nullptr) to.old_db = at.db[row];
  if (at.g == nullptr) return to;
  if (lane == 0 && at.dg != nullptr) to.old_dg = at.dg[row];
  if (inside) tile::load(to.v, static_cast<const T*>(at.v) + start);
  to.g = static_cast<const T*>(at.g)[row];
  return to;
}
// dW of that row: plain, or through the weight norm, W = g r v.
template <class T>
__device__ void add_row(const LayerGradients& at, int row, const GradientRow<T>& of, float (&dw)[4], int lane) {
  if (at.g != nullptr) {
    float v[4], sum[2] = {};  // dW . v and |v|^2
    tile::to_float(of.v, v);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[0] = fmaf(dw[i], v[i], sum[0]), sum[1] = fmaf(v[i], v[i], sum[1]);
    tile::warp_sum(sum, 32);
    const float r = inverse_norm(sum[1]), dot = r * sum[0];
    if (lane == 0 && at.dg != nullptr) at.dg[row] = of.old_dg + dot;
#pragma unroll
    for (int i = 0; i < 4; ++i) dw[i] = tile::to_float(of.g) * r * (dw[i] - r * v[i] * dot);
  }
  if (4 * lane < at.k && at.dw != nullptr)
    *reinterpret_cast<float4*>(at.dw + int64_t(row) * at.k + 4 * lane) =
        make_float4(of.old.x + dw[0], of.old.y + dw[1], of.old.z + dw[2], of.old.w + dw[3]);
}

// Rows of dW come in pairs, 8 apart.
__host__ __device__ constexpr int row_pairs(int n) { return (n + 15) / 16 * 8; }

// One block for each pair of rows of each dW. Groups of half of kWidth threads sum every so many parts; the order is
// fixed. Little code: all SMs read it at once, while nothing else is done.
template <class T, int kWidth, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == kSumThreads ? 2 : 3) sum_kernel(SumArguments a) {
  constexpr int kAcross = kWidth / 2, kGroups = kThreads / kAcross;
  __shared__ float4 partial[kThreads];
  __shared__ float bias[kThreads / 32];
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int pair = int(blockIdx.x), l = 0;
#pragma unroll 1
  while (pair >= row_pairs(a.layer[l].n)) pair -= row_pairs(a.layer[l++].n);
  const LayerGradients& at = a.layer[l];
  const int first_row = pair / 8 * 16 + pair % 8, row = first_row + 8 * warp;  // the latter of warps 0 and 1
  // The first kernel waited for all before it, so only what it writes itself is waited for here.
  GradientRow<T> of;
  if (warp < 2 && row < at.n) of = load_row<T>(at, row, lane);
  const int column = thread % kAcross * 2;
  constexpr int64_t kStride = part_floats(kWidth / kPanel);
  const float* part = a.partial + at.first_part * kStride;
  const float4* from = reinterpret_cast<const float4*>(part) + part_float4(first_row, column, kWidth);
  int parts = column < at.k && (at.dw != nullptr || at.dg != nullptr) ? at.parts : 0;
  ptx::settle(from), ptx::settle(parts);  // else the compiler forms them after the wait
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();  // it waits for this one in its turn
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
    const int bias_row = first_row + thread / kOfRow * 8;
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
  if (2 * lane < kAcross) {
    const float2* of_row = reinterpret_cast<const float2*>(partial) + 4 * lane + warp;
#pragma unroll 2
    for (int i = 0; i < kGroups; ++i, of_row += 2 * kAcross) {
      const float2 left = of_row[0], right = of_row[2];
      dw[0] += left.x, dw[1] += left.y, dw[2] += right.x, dw[3] += right.y;
    }
  }
  add_row(at, row, of, dw, lane);
  if (lane == 0 && at.db != nullptr) {
    float b = 0;
#pragma unroll 1
    for (int i = 0; i < kThreads / 64; ++i) b += bias[kThreads / 64 * warp + i];
    at.db[row] = of.old_db + b;
  }
}

// --- what is taken, and the first launch

using LayersKernel = void (*)(Maps, backward_layers::Arguments);
LayersKernel layers_kernel(const MlpBackward& m) {
  using backward_layers::mlp_backward_layers_kernel;
  if (m.x.dtype == DType::f16)
    return mlp_panels(m) == 2 ? mlp_backward_layers_kernel<f16, 2> : mlp_backward_layers_kernel<f16, 1>;
  return mlp_panels(m) == 2 ? mlp_backward_layers_kernel<bf16, 2> : mlp_backward_layers_kernel<bf16, 1>;
}
int shared_bytes(const MlpBackward& m) {
  return int(mlp_panels(m) == 2 ? sizeof(backward_layers::SharedMemory<2>) : sizeof(backward_layers::SharedMemory<1>));
}

// How many clusters run at once: fewer than SMs / size where the size does not divide a processing cluster's SMs.
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
  config.blockDim = dim3(backward_layers::kThreads);
  config.dynamicSmemBytes = size_t(shared_bytes(m));
  config.attrs = &attribute;
  config.numAttrs = 1;
  int n = 0;
  gpu::check_cuda(cudaOccupancyMaxActiveClusters(&n, kernel, &config), "mlp_backward: clusters of ", size, " at once");
  INGOT_CHECK(n > 0, "mlp_backward: found no room for a cluster of ", size, " blocks on cuda:", device);
  if (at != nullptr) *at = n;
  return n;
}

// The cut of the work: a layer a block, units of 64 rows; and where each layer's partial sums lie.
struct Cut {
  int units = 0, clusters = 0, blocks = 0;  // of a cluster
  int parts = 0;
};
Cut cut_of(const MlpBackward& m) {
  const int layers = int(m.layers.size()), cluster = layers + m.activate_last;
  Cut c{.units = int((m.x.rows() + kRows - 1) / kRows)};
  c.clusters = std::min(c.units, clusters_at_once(m, cluster));
  c.parts = layers * c.clusters;
  // Blocks below the lowest gradient fall away; the rest is cut as ever, so that its sums have the same bits.
  c.blocks = cluster - int(mlp_first_layer(m));
  return c;
}
int first_part(const Cut& c, size_t l) { return int(l) * c.clusters; }

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

backward_layers::Arguments make_arguments(const MlpBackward& m, const Cut& c) {
  backward_layers::Arguments a;
  for (size_t l = 0; l < m.layers.size(); ++l)
    a.layer[l] = {.w = m.layers[l].w.data,
                  .g = m.layers[l].g ? m.layers[l].g.data : nullptr,
                  .n = int(m.layers[l].w.rows()),
                  .k = int(m.layers[l].w.cols()),
                  .first_part = first_part(c, l)};
  a.layers = int(m.layers.size());
  a.cluster = c.blocks;
  a.entry = m.activate_last;
  a.partial = static_cast<float*>(m.workspace.data);
  a.clusters = c.clusters;
  a.units_each = c.units / c.clusters;
  a.units_left = c.units % c.clusters;
  a.act = m.act;
  a.want_dx = bool(m.dx);
  for (const MlpLayer& grad : m.grads) a.want_db = a.want_db || bool(grad.b);
  return a;
}

SumArguments make_sum_arguments(const MlpBackward& m, const Cut& c) {
  SumArguments a{.partial = static_cast<const float*>(m.workspace.data)};
  const auto at = [](const Tensor& t) { return t ? static_cast<float*>(t.data) : nullptr; };
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const MlpLayer &layer = m.layers[l], &grad = m.grads[l];
    a.layer[l] = {.v = layer.w.data,
                  .g = layer.g ? layer.g.data : nullptr,
                  .dw = at(grad.w),
                  .db = at(grad.b),
                  .dg = at(grad.g),
                  .n = int(layer.w.rows()),
                  .k = int(layer.w.cols()),
                  .first_part = first_part(c, l),
                  .parts = c.clusters};
  }
  return a;
}

template <class T> void run_as(const MlpBackward& m, Stream stream) {
  const Cut c = cut_of(m);
  gpu::launch("mlp_backward", layers_kernel(m),
              {.grid = int64_t(c.clusters) * c.blocks,
               .block = backward_layers::kThreads,
               .smem = shared_bytes(m),
               .cluster = c.blocks,
               .overlap = true,
               .device = m.x.device.index},
              stream, make_maps(m), make_arguments(m, c));
  int64_t pairs = 0;
  for (const MlpLayer& layer : m.layers) pairs += row_pairs(int(layer.w.rows()));
  const bool deep = pairs > kSumBlocksAtOnce;
  const auto kernel_of = [&](auto width) {
    return deep ? sum_kernel<T, width(), kSumThreadsDeep> : sum_kernel<T, width(), kSumThreads>;
  };
  gpu::launch(
      "mlp_backward: sums",
      mlp_panels(m) == 2 ? kernel_of(std::integral_constant<int, 128>()) : kernel_of(std::integral_constant<int, 64>()),
      {.grid = pairs, .block = deep ? kSumThreadsDeep : kSumThreads, .overlap = true, .device = m.x.device.index},
      stream, make_sum_arguments(m, c));
}

void run(const MlpBackward& m, Stream stream) {
  m.x.dtype == DType::f16 ? run_as<f16>(m, stream) : run_as<bf16>(m, stream);
}
int64_t workspace_bytes(const MlpBackward& m) { return cut_of(m).parts * part_floats(mlp_panels(m)) * 4; }

constexpr MlpBackwardForm kForm = {.run = run, .workspace_bytes = workspace_bytes};

}  // namespace
}  // namespace backward_sm90

using namespace backward_sm90;

// Of a cluster: eight layers of which the last is activated make nine blocks.
bool mlp_backward_sm90_takes(const MlpBackward& m) {
  return mlp_backward_is_fast(m) && int(m.layers.size()) + m.activate_last <= kMaxCluster;
}

void mlp_backward_sm90(const MlpBackward& m, Stream stream) { mlp_backward_with_values(m, kForm, stream); }

int64_t mlp_backward_sm90_workspace_bytes(const MlpBackward& m) {
  return mlp_backward_workspace_bytes_with_values(m, kForm);
}

}  // namespace ingot::cuda
