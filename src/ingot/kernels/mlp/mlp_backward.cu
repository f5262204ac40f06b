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

bool mlp_backward_is_fast(const MlpBackward& m) {
  if (m.layers.empty() || m.layers.size() > size_t(kMlpMaxLayers) || !mlp_fast_type(m)) return false;
  if (m.x.rows() > int64_t(1) << 30 || m.x.cols() % 8 != 0) return false;  // tensor copies: 31 bits, whole 16 bytes
  for (const MlpLayer& layer : m.layers)
    if (layer.w.rows() % 8 != 0) return false;
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
  int64_t columns = 0;
  for (int l = 0; l < mlp_backward_values(m); ++l) columns += m.layers[size_t(l)].w.rows();
  return (m.x.rows() * columns * size_of(m.x.dtype) + 255) / 256 * 256;
}
MlpBackward mlp_backward_form_values(const MlpBackward& m, Stream stream) {
  const MlpBackward then = with_values_ahead(m);
  m.saved ? round_values(m, then, stream) : run_forward(then, stream);
  return then;
}

}  // namespace ingot::cuda
