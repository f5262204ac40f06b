#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/mlp/mlp_backward.h"

namespace ingot::cuda {
namespace {

// The same, with values in the workspace and what is left of that.
MlpBackward with_values_ahead(const MlpBackward& m) {
  const int64_t bytes = mlp_backward_values_bytes(m);
  MlpBackward then = m;
  then.saved = Tensor(m.workspace.data, m.x.dtype, {bytes / size_of(m.x.dtype)}, m.x.device);
  then.workspace =
      Tensor(static_cast<char*>(m.workspace.data) + bytes, DType::u8, {m.workspace.numel() - bytes}, m.x.device);
  return then;
}

// --- fp32 values, rounded

constexpr int kRoundThreads = 256, kRoundAtOnce = 4;  // of 8 values each
constexpr int64_t kRoundBlock = kRoundThreads * kRoundAtOnce;

struct RoundArguments {
  struct {
    const float4* from;
    uint4* to;
    int64_t eights;
  } layer[kMlpMaxLayers];
};
__host__ __device__ constexpr int64_t round_blocks(int64_t eights) { return (eights + kRoundBlock - 1) / kRoundBlock; }

// The last rows first: those the forward pass has stored last, and L2 may still have them.
template <class T> __global__ void __launch_bounds__(kRoundThreads) round_kernel(RoundArguments a) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  int64_t block = gridDim.x - 1 - blockIdx.x;
  int l = 0;
#pragma unroll 1
  while (block >= round_blocks(a.layer[l].eights)) block -= round_blocks(a.layer[l++].eights);
  const auto& at = a.layer[l];
  const int64_t first = block * kRoundBlock + threadIdx.x;
  float4 v[kRoundAtOnce][2];
#pragma unroll
  for (int i = 0; i < kRoundAtOnce; ++i) {
    const int64_t eight = first + i * kRoundThreads;
    if (eight < at.eights) v[i][0] = __ldcs(at.from + 2 * eight), v[i][1] = __ldcs(at.from + 2 * eight + 1);
  }
#pragma unroll
  for (int i = 0; i < kRoundAtOnce; ++i) {
    const int64_t eight = first + i * kRoundThreads;
    if (eight < at.eights)
      at.to[eight] = make_uint4(ptx::pack(T{}, v[i][0].x, v[i][0].y), ptx::pack(T{}, v[i][0].z, v[i][0].w),
                                ptx::pack(T{}, v[i][1].x, v[i][1].y), ptx::pack(T{}, v[i][1].z, v[i][1].w));
  }
}

void round_values(const MlpBackward& m, const MlpBackward& then, Stream stream) {
  RoundArguments a{};
  int64_t blocks = 0;
  const float* kept = static_cast<const float*>(m.saved.data);
  for (int l = 0; l < mlp_backward_values(m); ++l) {
    const Tensor to = mlp_layer_part(then, then.saved, size_t(l));
    a.layer[l] = {
        .from = reinterpret_cast<const float4*>(kept), .to = static_cast<uint4*>(to.data), .eights = to.numel() / 8};
    blocks += round_blocks(a.layer[l].eights);
    kept += to.numel();
  }
  gpu::launch("mlp_backward: values in 16 bits", m.x.dtype == DType::f16 ? round_kernel<f16> : round_kernel<bf16>,
              {.grid = blocks, .block = kRoundThreads, .overlap = true, .device = m.x.device.index}, stream, a);
}

// --- values of nothing but x: the forward pass as far as the last of them, which is also the result

void run_forward(const MlpBackward& then, Stream stream) {
  const int values = mlp_backward_values(then);
  Mlp forward{.x = mlp_matrix(then.x),
              .y = mlp_layer_part(then, then.saved, size_t(values - 1)),
              .layers = {then.layers.begin(), then.layers.begin() + values},
              .act = then.act,
              .activate_last = true};
  if (values > 1) forward.saved = then.saved;
  cuda::mlp(forward, stream);
}

}  // namespace

// Tensor copies count rows in 31 bits.
bool mlp_backward_is_fast(const MlpBackward& m, int widest) {
  if (m.x.dtype != DType::f16 && m.x.dtype != DType::bf16) return false;
  if (m.layers.empty() || m.layers.size() > size_t(kMlpMaxLayers) || mlp_widest(m) > widest) return false;
  if (m.x.rows() > int64_t(1) << 30) return false;
  return mlp_backward_values(m) == 0 || slope_follows_from_value(m.act);
}

int mlp_backward_values(const MlpBackward& m) { return int(m.layers.size()) - (m.activate_last ? 0 : 1); }

Tensor mlp_layer_part(const MlpBackward& m, const Tensor& all, size_t l) {
  int64_t offset = 0;
  for (size_t i = 0; i < l; ++i) offset += m.x.rows() * m.layers[i].w.rows();
  return Tensor(static_cast<char*>(all.data) + offset * size_of(m.x.dtype), m.x.dtype,
                {m.x.rows(), m.layers[l].w.rows()}, m.x.device);
}

bool mlp_backward_has_values(const MlpBackward& m) {
  return mlp_backward_values(m) == 0 || (m.saved && m.saved.dtype == m.x.dtype);
}
int64_t mlp_backward_values_bytes(const MlpBackward& m) {
  const int64_t values = mlp_saved_elements(m.x.rows(), m.layers, m.activate_last);
  return (values * size_of(m.x.dtype) + 255) / 256 * 256;
}
MlpBackward mlp_backward_form_values(const MlpBackward& m, Stream stream) {
  const MlpBackward then = with_values_ahead(m);
  m.saved ? round_values(m, then, stream) : run_forward(then, stream);
  return then;
}

std::optional<SlopeFormula> slope_of(Act act) {
  if (act == act_of<Softplus>) return SlopeFormula{Slope::softplus};
  if (act == act_of<Tanh>) return SlopeFormula{Slope::quadratic, {1, 0, -1}};
  if (act == act_of<Sigmoid>) return SlopeFormula{Slope::quadratic, {0, 1, -1}};
  if (act == act_of<Relu>) return SlopeFormula{Slope::step, {1, 0}};
  if (act == act_of<LeakyRelu>) return SlopeFormula{Slope::step, {1, 0.01f}};
  if (act == act_of<Identity>) return SlopeFormula{Slope::step, {1, 1}};
  return std::nullopt;
}

int mlp_lowest_product(const MlpBackward& m) { return m.dx ? 0 : int(mlp_first_layer(m)) + 1; }
bool mlp_keeps_dz(const MlpBackward& m, size_t l) { return mlp_trained(m.grads[l]) && mlp_activated(m, l); }
int64_t mlp_dz_bytes(const MlpBackward& m) {
  return mlp_saved_elements(m.x.rows(), m.layers, m.activate_last) * size_of(m.x.dtype);
}

MlpChainMaps mlp_chain_maps(const MlpBackward& m, const gpu::TmaBox& rows, const gpu::TmaBox& weights) {
  MlpChainMaps maps{};
  maps.dy = gpu::tensor_map("mlp_backward: dy", mlp_matrix(m.dy), rows);
  if (m.dx) maps.dx = gpu::tensor_map("mlp_backward: dx", mlp_matrix(m.dx), rows);
  for (size_t l = size_t(mlp_lowest_product(m)); l < m.layers.size(); ++l)
    maps.w[l] = gpu::tensor_map("mlp_backward: w", m.layers[l].w, weights);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    if (mlp_activated(m, l)) maps.h[l] = gpu::tensor_map("mlp_backward: saved", mlp_layer_part(m, m.saved, l), rows);
    if (mlp_keeps_dz(m, l))
      maps.dz[l] = gpu::tensor_map("mlp_backward: workspace", mlp_layer_part(m, m.workspace, l), rows);
  }
  return maps;
}
MlpSumMaps mlp_sum_maps(const MlpBackward& m, const gpu::TmaBox& dz, const gpu::TmaBox& h) {
  MlpSumMaps maps{};
  for (size_t l = 0; l < m.layers.size(); ++l) {
    if (!mlp_trained(m.grads[l])) continue;
    maps.dz[l] = gpu::tensor_map("mlp_backward: dz",
                                 mlp_keeps_dz(m, l) ? mlp_layer_part(m, m.workspace, l) : mlp_matrix(m.dy), dz);
    maps.h[l] = gpu::tensor_map("mlp_backward: input", l == 0 ? mlp_matrix(m.x) : mlp_layer_part(m, m.saved, l - 1), h);
  }
  return maps;
}
MlpSumLayer mlp_sum_layer(const MlpBackward& m, size_t l) {
  const auto at = [](const Tensor& t) { return t ? static_cast<float*>(t.data) : nullptr; };
  const MlpLayer &layer = m.layers[l], &grad = m.grads[l];
  return {.v = layer.w.data,
          .g = layer.g ? layer.g.data : nullptr,
          .dw = at(grad.w),
          .db = at(grad.b),
          .dg = at(grad.g),
          .n = int(layer.w.rows()),
          .k = int(layer.w.cols())};
}

}  // namespace ingot::cuda
