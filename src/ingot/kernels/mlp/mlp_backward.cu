#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/mlp/mlp_backward.h"

namespace ingot::cuda {
namespace {

// Values of so many rows are formed at a time. Three layers of 128 then take 64 MB of workspace, and most of it is in
// L2 when it is read.
constexpr int64_t kRowsAtOnce = 131072;

bool has_values(const MlpBackward& m) { return mlp_backward_values(m) == 0 || (m.saved && m.saved.dtype == m.x.dtype); }
int64_t values_a_row(const MlpBackward& m) {
  int64_t n = 0;
  for (int l = 0; l < mlp_backward_values(m); ++l) n += m.layers[size_t(l)].w.rows();
  return n;
}

int64_t values_bytes(const MlpBackward& m, int64_t rows) {
  return (rows * values_a_row(m) * size_of(m.x.dtype) + 255) / 256 * 256;
}

// Rows [begin, end), their values at the start of the workspace.
MlpBackward part_of(const MlpBackward& m, int64_t begin, int64_t end) {
  const int64_t values = (end - begin) * values_a_row(m), bytes = values_bytes(m, end - begin);
  MlpBackward part = m;
  part.x = mlp_matrix(m.x).slice(0, begin, end);
  part.dy = mlp_matrix(m.dy).slice(0, begin, end);
  if (m.dx) part.dx = mlp_matrix(m.dx).slice(0, begin, end);
  part.saved = Tensor(m.workspace.data, m.x.dtype, {values}, m.x.device);
  part.workspace = Tensor(static_cast<char*>(m.workspace.data) + bytes, DType::u8,
                          {std::max<int64_t>(m.workspace.numel() - bytes, 0)}, m.x.device);
  return part;
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

void round_values(const MlpBackward& m, const MlpBackward& part, int64_t begin, Stream stream) {
  RoundArguments a{};
  int64_t blocks = 0;
  const float* kept = static_cast<const float*>(m.saved.data);
  for (int l = 0; l < mlp_backward_values(m); ++l) {
    const int64_t n = m.layers[size_t(l)].w.rows();
    const Tensor to = mlp_layer_part(part, part.saved, size_t(l));
    a.layer[l] = {.from = reinterpret_cast<const float4*>(kept + begin * n),
                  .to = static_cast<uint4*>(to.data),
                  .eights = to.numel() / 8};
    blocks += round_blocks(a.layer[l].eights);
    kept += m.x.rows() * n;
  }
  gpu::launch("mlp_backward: values in 16 bits", m.x.dtype == DType::f16 ? round_kernel<f16> : round_kernel<bf16>,
              {.grid = blocks, .block = kRoundThreads, .overlap = true, .device = m.x.device.index}, stream, a);
}

// --- values of nothing but x: the forward pass as far as the last of them, which is also the result

void form_values(const MlpBackward& part, Stream stream) {
  const int values = mlp_backward_values(part);
  Mlp forward{.x = part.x,
              .y = mlp_layer_part(part, part.saved, size_t(values - 1)),
              .layers = {part.layers.begin(), part.layers.begin() + values},
              .act = part.act,
              .activate_last = true};
  if (values > 1) forward.saved = part.saved;
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

void mlp_backward_with_values(const MlpBackward& m, const MlpBackwardForm& form, Stream stream) {
  if (m.x.rows() == 0 || mlp_first_layer(m) == m.layers.size()) return;
  if (has_values(m)) return form.run(m, stream);
  for (int64_t begin = 0; begin < m.x.rows(); begin += kRowsAtOnce) {
    const MlpBackward part = part_of(m, begin, std::min(m.x.rows(), begin + kRowsAtOnce));
    m.saved ? round_values(m, part, begin, stream) : form_values(part, stream);
    form.run(part, stream);
  }
}
int64_t mlp_backward_workspace_bytes_with_values(const MlpBackward& m, const MlpBackwardForm& form) {
  if (m.x.rows() == 0) return 0;
  if (has_values(m)) return form.workspace_bytes(m);
  const int64_t rows = std::min(m.x.rows(), kRowsAtOnce);
  return values_bytes(m, rows) + form.workspace_bytes(part_of(m, 0, rows));
}

}  // namespace ingot::cuda
