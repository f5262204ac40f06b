#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/mlp/parts/backward_plan.h"
#include "ingot/kernels/mlp/parts/formed_weights.h"

namespace ingot::cuda {
namespace {

// Takes the given bytes from the start of the workspace, as a tensor of x's type; the workspace is the rest afterwards.
Tensor take_ahead(MlpBackward& m, int64_t bytes) {
  const Tensor taken(m.workspace.data, m.x.dtype, {bytes / size_of(m.x.dtype)}, m.x.device);
  m.workspace =
      Tensor(static_cast<char*>(m.workspace.data) + bytes, DType::u8, {m.workspace.numel() - bytes}, m.x.device);
  return taken;
}

// --- values from kept data: kept values are rounded; from kept arguments values and slopes are computed

constexpr int kFormThreads = 256, kFormAtOnce = 4;  // vectors of 8 values each
constexpr int64_t kFormBlock = kFormThreads * kFormAtOnce;

struct FormArguments {
  struct {
    const void* from;
    uint4 *value, *slope;
    int64_t eights;
  } layer[kMlpMaxLayers];
  float number;  // parameter of the formula
};
__host__ __device__ constexpr int64_t form_blocks(int64_t eights) { return (eights + kFormBlock - 1) / kFormBlock; }

__device__ __forceinline__ void load_eight(float (&v)[8], const float* from) {
  const float4* const at = reinterpret_cast<const float4*>(from);
  const float4 low = __ldcs(at), high = __ldcs(at + 1);
  v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}
template <class T> __device__ __forceinline__ void load_eight(float (&v)[8], const T* from) {
  const uint4 word = __ldcs(reinterpret_cast<const uint4*>(from));
  ptx::unpack(T{}, word.x, v[0], v[1]), ptx::unpack(T{}, word.y, v[2], v[3]);
  ptx::unpack(T{}, word.z, v[4], v[5]), ptx::unpack(T{}, word.w, v[6], v[7]);
}
template <class T, class Of> __device__ __forceinline__ uint4 packed(const float (&v)[8], Of&& of) {
  return make_uint4(ptx::pack(T{}, of(v[0]), of(v[1])), ptx::pack(T{}, of(v[2]), of(v[3])),
                    ptx::pack(T{}, of(v[4]), of(v[5])), ptx::pack(T{}, of(v[6]), of(v[7])));
}

// The last rows first: the forward pass stored these last, and L2 may still hold them. F: the formula if the kept data
// is its argument; otherwise values are rounded, without slopes.
template <class From, class T, class F> __global__ void __launch_bounds__(kFormThreads) form_kernel(FormArguments a) {
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
  int64_t block = gridDim.x - 1 - blockIdx.x;
  int l = 0;
#pragma unroll 1
  while (block >= form_blocks(a.layer[l].eights)) block -= form_blocks(a.layer[l++].eights);
  const auto& at = a.layer[l];
  const int64_t first = block * kFormBlock + threadIdx.x;
  float v[kFormAtOnce][8];
#pragma unroll
  for (int i = 0; i < kFormAtOnce; ++i) {
    const int64_t eight = first + i * kFormThreads;
    if (eight < at.eights) load_eight(v[i], static_cast<const From*>(at.from) + 8 * eight);
  }
#pragma unroll
  for (int i = 0; i < kFormAtOnce; ++i) {
    const int64_t eight = first + i * kFormThreads;
    if (eight >= at.eights) continue;
    at.value[eight] = packed<T>(v[i], [&](float z) { return act_value_from_saved<F, T>(z, a.number); });
    if constexpr (!has_slope_from_value<F>)
      at.slope[eight] = packed<T>(v[i], [&](float z) { return act_slope<F, T>(z, a.number); });
  }
}

template <class From, class T, class F>
void form_of_kept(const MlpBackward& m, const MlpBackward& then, const Tensor& slopes, Stream stream) {
  FormArguments a{.number = number_of(m.act)};
  int64_t blocks = 0;
  const From* kept = static_cast<const From*>(m.saved.data);
  for (int l = 0; l < mlp_backward_values(m); ++l) {
    const Tensor to = mlp_layer_part(then, then.saved, size_t(l));
    uint4* const slope = slopes ? static_cast<uint4*>(mlp_layer_part(then, slopes, size_t(l)).data) : nullptr;
    a.layer[l] = {.from = kept, .value = static_cast<uint4*>(to.data), .slope = slope, .eights = to.numel() / 8};
    blocks += form_blocks(a.layer[l].eights);
    kept += to.numel();
  }
  gpu::launch("mlp_backward: values in 16 bits", form_kernel<From, T, F>,
              {.grid = blocks, .block = kFormThreads, .overlap = true, .device = m.x.device.index}, stream, a);
}
void round_values(const MlpBackward& m, const MlpBackward& then, Stream stream) {
  m.x.dtype == DType::f16 ? form_of_kept<float, f16, Identity>(m, then, {}, stream)
                          : form_of_kept<float, bf16, Identity>(m, then, {}, stream);
}
template <class T>
void form_slopes(const MlpBackward& m, const MlpBackward& then, const Tensor& slopes, Stream stream) {
  with_formula(m.act, [&](auto f) {
    using F = decltype(f);
    if constexpr (!has_slope_from_value<F>)
      m.saved.dtype == DType::f32 ? form_of_kept<float, T, F>(m, then, slopes, stream)
                                  : form_of_kept<T, T, F>(m, then, slopes, stream);
  });
}

// --- values from x alone: the forward pass up to the last value, also the result; with slopes where requested

void run_forward(const MlpBackward& then, const Tensor& slopes, Stream stream) {
  const int values = mlp_backward_values(then);
  Mlp forward{.x = mlp_matrix(then.x),
              .y = mlp_layer_part(then, then.saved, size_t(values - 1)),
              .layers = {then.layers.begin(), then.layers.begin() + values},
              .act = then.act,
              .activate_last = true};
  if (values > 1) forward.saved = then.saved;
  slopes ? mlp_to_256_slopes(forward, slopes, stream) : cuda::mlp(forward, stream);
}

}  // namespace

// Tensor copies count rows in 31 bits.
bool mlp_backward_has_shape(const MlpBackward& m, int widest) {
  if (m.x.dtype != DType::f16 && m.x.dtype != DType::bf16) return false;
  if (m.layers.empty() || m.layers.size() > size_t(kMlpMaxLayers) || mlp_widest(m) > widest) return false;
  return m.x.rows() <= int64_t(1) << 30;
}
bool mlp_backward_has_shape_and_slopes(const MlpBackward& m, int widest) {
  return mlp_backward_has_shape(m, widest) && (mlp_backward_values(m) == 0 || slope_follows_from_value(m.act));
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
MlpBackward mlp_backward_form_weights(const MlpBackward& m, Stream stream) {
  MlpBackward then = m;
  const int64_t bytes = mlp_formed_weights_bytes(m.layers);
  if (bytes > 0) then.layers = mlp_form_weights(m.layers, take_ahead(then, bytes).data, stream);
  return then;
}
MlpBackward mlp_backward_form_values(const MlpBackward& m, Stream stream) {
  MlpBackward then = m;
  then.saved = take_ahead(then, mlp_backward_values_bytes(m));
  m.saved ? round_values(m, then, stream) : run_forward(then, {}, stream);
  return then;
}
MlpFormedSlopes mlp_backward_form_slopes(const MlpBackward& m, Stream stream) {
  MlpFormedSlopes formed{.m = m};
  formed.m.saved = take_ahead(formed.m, mlp_backward_values_bytes(m));
  formed.slopes = take_ahead(formed.m, mlp_backward_values_bytes(m));
  if (!m.saved)
    run_forward(formed.m, formed.slopes, stream);
  else
    m.x.dtype == DType::f16 ? form_slopes<f16>(m, formed.m, formed.slopes, stream)
                            : form_slopes<bf16>(m, formed.m, formed.slopes, stream);
  return formed;
}

bool mlp_backward_forms_slopes(const MlpBackward& m) { return mlp_backward_values(m) > 0 && !slope_of(m.act); }
MlpFormed mlp_backward_form(const MlpBackward& m, Stream stream) {
  if (mlp_backward_forms_slopes(m)) {
    const MlpFormedSlopes formed = mlp_backward_form_slopes(m, stream);
    // This formula is the identity, because memory now holds the slopes themselves.
    return {formed.m, formed.slopes, {SlopeKind::quadratic, {0, 1, 0}}};
  }
  const SlopeFormula slope = slope_of(m.act).value_or(SlopeFormula{});  // without values no workspace is needed
  if (mlp_backward_has_values(m)) return {m, m.saved, slope};
  const MlpBackward then = mlp_backward_form_values(m, stream);
  return {then, then.saved, slope};
}
int64_t mlp_backward_formed_bytes(const MlpBackward& m) {
  const int64_t formed = mlp_backward_forms_slopes(m) ? 2 : !mlp_backward_has_values(m);
  return formed * mlp_backward_values_bytes(m);
}

std::optional<SlopeFormula> slope_of(Act act) {
  std::optional<SlopeFormula> formula;
  with_activation(act, [&](auto f) {
    if constexpr (has_slope_formula<decltype(f)>) formula = f.slope_formula;
  });
  return formula;
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
MlpSumLayer mlp_sum_layer(const MlpLayer& layer, const MlpLayer& grad) {
  const auto at = [](const Tensor& t) { return t ? static_cast<float*>(t.data) : nullptr; };
  return {.v = layer.w.data,
          .g = layer.g ? layer.g.data : nullptr,
          .dw = at(grad.w),
          .db = at(grad.b),
          .dg = at(grad.g),
          .n = int(layer.w.rows()),
          .k = int(layer.w.cols())};
}

}  // namespace ingot::cuda
