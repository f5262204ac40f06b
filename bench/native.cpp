// libingot_bench.so: the shipped entry points over raw pointers and a stream, so that a Python process can time them
// beside PyTorch. Every function returns 0, or 1 with the reason in ingot_bench_error(). A build of some rooms
// (INGOT_ROOMS) has the functions of these.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "ingot/gpu/bandwidth.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/cross_entropy/cross_entropy.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/kernels/mlp/mlp.h"
#include "ingot/kernels/muon/muon.h"
#include "ingot/kernels/muon/newton_schulz.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/rope/rope_config.h"
#include "ingot/kernels/swiglu/swiglu.h"
#include "ingot/kernels/swiglu/swiglu_config.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
using namespace ingot;

thread_local std::string last_error;

template <class Use> int guarded(Use&& use) {
  try {
    use();
    return 0;
  } catch (const std::exception& e) {
    last_error = e.what();
    return 1;
  }
}

DType dtype_named(const std::string& name) {
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    if (name_of(t) == name) return t;
  fail(ErrorCode::usage, "bench: found dtype ", name, ", expected f32, bf16 or f16");
}

const Device kGpu{Device::cuda, 0};
Tensor raw(void* data, int64_t bytes) { return Tensor(data, DType::u8, {bytes}, kGpu); }
}  // namespace

EXPORT const char* ingot_bench_error() { return last_error.c_str(); }

EXPORT int ingot_bench_copy(void* to, const void* from, int64_t bytes, void* stream) {
  return guarded([&] { gpu::copy_kernel(to, from, bytes, {stream}); });
}
EXPORT int ingot_bench_read(const void* from, int64_t bytes, void* sink, void* stream) {
  return guarded([&] { gpu::read_kernel(from, bytes, sink, {stream}); });
}

#ifdef INGOT_HAS_CUDA_RMSNORM
// Operands that are null are left out. config: null for the default, or {vecs_per_thread (0: elements), rows_per_group,
// group, cluster, threads, overlap, streaming}.
EXPORT int ingot_bench_rmsnorm(const char* dtype, void* x, const char* w_dtype, void* w, void* residual, void* sum,
                               void* y, void* rstd, int64_t rows, int64_t cols, double eps, const int* config,
                               void* stream) {
  return guarded([&] {
    const Device device{Device::cuda, 0};
    const DType t = dtype_named(dtype);
    const Shape matrix{rows, cols};
    RmsNorm a{.x = Tensor(x, t, matrix, device), .y = Tensor(y, t, matrix, device), .eps = eps};
    if (w != nullptr) a.w = Tensor(w, dtype_named(w_dtype), {cols}, device);
    if (residual != nullptr) {
      a.residual = Tensor(residual, t, matrix, device);
      a.sum = Tensor(sum, t, matrix, device);
    }
    if (rstd != nullptr) a.rstd = Tensor(rstd, DType::f32, {rows}, device);
    if (config == nullptr) return rmsnorm(a, {stream});
    const cuda::RmsNormConfig c{.vectors = config[0] > 0,
                                .vecs_per_thread = config[0],
                                .rows_per_group = config[1],
                                .group = config[2],
                                .cluster = config[3],
                                .threads = config[4],
                                .streaming = config[6] != 0};
    cuda::rmsnorm_with(a, {.config = c, .overlap = config[5] != 0}, {stream});
  });
}

EXPORT int ingot_bench_rmsnorm_workspace(const char* dtype, int64_t rows, int64_t cols, int64_t* bytes) {
  return guarded([&] {
    *bytes = rmsnorm_backward_workspace_bytes(rows, cols, dtype_named(dtype), Device{Device::cuda, 0});
  });
}

// config: null for the default, or {group, cluster, threads, stages, blocks, overlap}.
EXPORT int ingot_bench_rmsnorm_backward(const char* dtype, void* s, const char* w_dtype, void* w, void* dsum, void* dy,
                                        void* rstd, void* dx, void* dw, void* workspace, int64_t workspace_bytes,
                                        int64_t rows, int64_t cols, double eps, const int* config, void* stream) {
  return guarded([&] {
    const Device device{Device::cuda, 0};
    const DType t = dtype_named(dtype);
    const auto matrix = [&](void* p) { return Tensor(p, t, {rows, cols}, device); };
    RmsNormBackward a{.dy = matrix(dy),
                      .s = matrix(s),
                      .rstd = Tensor(rstd, DType::f32, {rows}, device),
                      .dx = matrix(dx),
                      .eps = eps};
    if (w != nullptr) a.w = Tensor(w, dtype_named(w_dtype), {cols}, device);
    if (dsum != nullptr) a.dsum = matrix(dsum);
    if (dw != nullptr) {
      a.dw = Tensor(dw, DType::f32, {cols}, device);
      a.workspace = Tensor(workspace, DType::u8, {workspace_bytes}, device);
    }
    if (config == nullptr) return rmsnorm_backward(a, {stream});
    const cuda::RmsNormBackwardConfig c{
        .group = config[0], .cluster = config[1], .threads = config[2], .stages = config[3], .blocks = config[4]};
    cuda::rmsnorm_backward_with(a, {.config = c, .overlap = config[5] != 0}, {stream});
  });
}

#endif
#ifdef INGOT_HAS_CUDA_MLP
// --- whole MLPs: `widths` has depth + 1 entries; g null: no weight norm; saved_dtype "none": nothing is stored
namespace {
std::vector<MlpLayer> mlp_layers(int64_t depth, const int64_t* widths, void* const* w, void* const* g, DType t) {
  std::vector<MlpLayer> layers;
  for (int64_t l = 0; l < depth; ++l) {
    MlpLayer layer{.w = Tensor(w == nullptr ? nullptr : w[l], t, {widths[l + 1], widths[l]}, kGpu)};
    if (g != nullptr) layer.g = Tensor(g[l], t, {widths[l + 1]}, kGpu);
    layers.push_back(layer);
  }
  return layers;
}
Tensor mlp_saved(void* data, const std::string& dtype, int64_t rows, const std::vector<MlpLayer>& layers) {
  if (dtype == "none") return {};
  return Tensor(data, dtype_named(dtype), {mlp_saved_elements(rows, layers, false)}, kGpu);
}
}  // namespace

// bytes[0] for the forward pass, bytes[1] for the backward pass.
EXPORT int ingot_bench_mlp_workspace(const char* dtype, int64_t rows, int64_t depth, const int64_t* widths,
                                     int weight_norm, const char* saved_dtype, int64_t* bytes) {
  return guarded([&] {
    const DType t = dtype_named(dtype);
    const std::vector<void*> nowhere(size_t(depth), nullptr);
    const auto layers = mlp_layers(depth, widths, nullptr, weight_norm != 0 ? nowhere.data() : nullptr, t);
    const auto grads = mlp_layers(depth, widths, nullptr, weight_norm != 0 ? nowhere.data() : nullptr, DType::f32);
    const Tensor x(nullptr, t, {rows, widths[0]}, kGpu), y(nullptr, t, {rows, widths[depth]}, kGpu);
    const Tensor saved = mlp_saved(nullptr, saved_dtype, rows, layers);
    bytes[0] = mlp_workspace_bytes({.x = x, .y = y, .layers = layers, .saved = saved});
    bytes[1] =
        mlp_backward_workspace_bytes({.dy = y, .x = x, .dx = x, .layers = layers, .grads = grads, .saved = saved});
  });
}

EXPORT int ingot_bench_mlp(const char* dtype, int64_t rows, int64_t depth, const int64_t* widths, const char* act,
                           void* const* w, void* const* g, void* x, void* y, void* saved, const char* saved_dtype,
                           void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const DType t = dtype_named(dtype);
    Mlp m{.x = Tensor(x, t, {rows, widths[0]}, kGpu),
          .y = Tensor(y, t, {rows, widths[depth]}, kGpu),
          .layers = mlp_layers(depth, widths, w, g, t),
          .act = activation_named(act),
          .workspace = raw(workspace, workspace_bytes)};
    m.saved = mlp_saved(saved, saved_dtype, rows, m.layers);
    mlp(m, {stream});
  });
}

EXPORT int ingot_bench_mlp_backward(const char* dtype, int64_t rows, int64_t depth, const int64_t* widths,
                                    const char* act, void* const* w, void* const* g, void* x, void* dy, void* dx,
                                    void* const* dw, void* const* dg, void* saved, const char* saved_dtype,
                                    void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const DType t = dtype_named(dtype);
    MlpBackward m{.dy = Tensor(dy, t, {rows, widths[depth]}, kGpu),
                  .x = Tensor(x, t, {rows, widths[0]}, kGpu),
                  .dx = Tensor(dx, t, {rows, widths[0]}, kGpu),
                  .layers = mlp_layers(depth, widths, w, g, t),
                  .grads = mlp_layers(depth, widths, dw, dg, DType::f32),
                  .act = activation_named(act),
                  .workspace = raw(workspace, workspace_bytes)};
    m.saved = mlp_saved(saved, saved_dtype, rows, m.layers);
    mlp_backward(m, {stream});
  });
}

#endif
#ifdef INGOT_HAS_CUDA_ROPE
// --- rotations: x, y (tokens, heads, d) without gaps, tables (table_rows, half). config: null for the default, or
// {vectors, lanes, threads, iterations, overlap, evict_first, vectors a lane, early}.
namespace {
cuda::RopeTuning rope_tuning(const int* c) {
  return {.config = {.vectors = c[0] != 0, .lanes = c[1], .threads = c[2], .iterations = c[3], .per_lane = c[6]},
          .overlap = c[4] != 0,
          .evict_first = c[5],
          .early = c[7]};
}
template <class Op>
void add_table(Op& a, void* positions, void* cos, void* sin, int64_t tokens, int64_t half, int64_t table_rows) {
  a.positions = Tensor(positions, DType::i32, {tokens}, kGpu);
  a.cos = Tensor(cos, DType::f32, {table_rows, half}, kGpu);
  a.sin = Tensor(sin, DType::f32, {table_rows, half}, kGpu);
}
}  // namespace

EXPORT int ingot_bench_rope(const char* dtype, void* x, void* y, void* positions, void* cos, void* sin, int64_t tokens,
                            int64_t heads, int64_t d, int64_t half, int64_t table_rows, int64_t interleaved,
                            int64_t backward, const int* config, void* stream) {
  return guarded([&] {
    const Shape shape{tokens, heads, d};
    Rope a{.x = Tensor(x, dtype_named(dtype), shape, kGpu),
           .y = Tensor(y, dtype_named(dtype), shape, kGpu),
           .interleaved = interleaved != 0};
    add_table(a, positions, cos, sin, tokens, half, table_rows);
    const auto tuning = config != nullptr ? rope_tuning(config) : cuda::RopeTuning{};
    if (config != nullptr)
      backward ? cuda::rope_backward_with(a, tuning, {stream}) : cuda::rope_with(a, tuning, {stream});
    else
      backward ? rope_backward(a, {stream}) : rope(a, {stream});
  });
}

EXPORT int ingot_bench_qk_norm_rope(const char* dtype, void* x, void* y, void* positions, void* cos, void* sin,
                                    void* gain, int64_t tokens, int64_t heads, int64_t d, int64_t half,
                                    int64_t table_rows, double eps, const int* config, void* stream) {
  return guarded([&] {
    const Shape shape{tokens, heads, d};
    QkNormRope a{
        .x = Tensor(x, dtype_named(dtype), shape, kGpu), .y = Tensor(y, dtype_named(dtype), shape, kGpu), .eps = eps};
    add_table(a, positions, cos, sin, tokens, half, table_rows);
    a.gain = Tensor(gain, DType::f32, {heads}, kGpu);
    if (config != nullptr)
      cuda::qk_norm_rope_with(a, rope_tuning(config), {stream});
    else
      qk_norm_rope(a, {stream});
  });
}

EXPORT int ingot_bench_qk_norm_rope_workspace(int64_t tokens, int64_t heads, int64_t* bytes) {
  return guarded([&] { *bytes = qk_norm_rope_backward_workspace_bytes(tokens, heads, kGpu); });
}

EXPORT int ingot_bench_qk_norm_rope_backward(const char* dtype, void* x, void* dy, void* dx, void* positions, void* cos,
                                             void* sin, void* gain, void* dgain, void* workspace,
                                             int64_t workspace_bytes, int64_t tokens, int64_t heads, int64_t d,
                                             int64_t half, int64_t table_rows, double eps, const int* config,
                                             void* stream) {
  return guarded([&] {
    const Shape shape{tokens, heads, d};
    const DType t = dtype_named(dtype);
    QkNormRopeBackward a{
        .x = Tensor(x, t, shape, kGpu), .dy = Tensor(dy, t, shape, kGpu), .dx = Tensor(dx, t, shape, kGpu), .eps = eps};
    add_table(a, positions, cos, sin, tokens, half, table_rows);
    a.gain = Tensor(gain, DType::f32, {heads}, kGpu);
    if (dgain != nullptr)
      a.dgain = Tensor(dgain, DType::f32, {heads}, kGpu), a.workspace = raw(workspace, workspace_bytes);
    if (config != nullptr)
      cuda::qk_norm_rope_backward_with(a, rope_tuning(config), {stream});
    else
      qk_norm_rope_backward(a, {stream});
  });
}

#endif
#ifdef INGOT_HAS_CUDA_SWIGLU
// --- the gate: layout 0: two tensors; 1: one of 2H columns, gate first (up is left out); 2: the same, up first; 3:
// interleaved. Forward where dh is null. config: null for the default, or {vectors, units_per_thread, threads, overlap,
// large, early}.
EXPORT int ingot_bench_gate(const char* dtype, void* gate, void* up, void* h, void* dh, void* dgate, void* dup,
                            int64_t rows, int64_t hidden, int64_t layout, double limit, double alpha, double up_offset,
                            const int* config, void* stream) {
  return guarded([&] {
    const DType t = dtype_named(dtype);
    const auto halves = [&](void* first, void* second) -> std::pair<Tensor, Tensor> {
      if (layout == 0) return {Tensor(first, t, {rows, hidden}, kGpu), Tensor(second, t, {rows, hidden}, kGpu)};
      const Tensor both(first, t, {rows, 2 * hidden}, kGpu);
      if (layout == 3) return {both, Tensor()};
      const Tensor left = both.slice(1, 0, hidden), right = both.slice(1, hidden, 2 * hidden);
      return layout == 1 ? std::pair(left, right) : std::pair(right, left);
    };
    const auto [g, u] = halves(gate, up);
    const GateOptions options{.limit = limit, .alpha = alpha, .up_offset = up_offset, .interleaved = layout == 3};
    cuda::SwigluGateTuning tuning;
    if (config != nullptr)
      tuning = {.config = {.vectors = config[0] != 0, .units_per_thread = config[1], .threads = config[2]},
                .overlap = config[3] != 0,
                .large = config[4],
                .early = config[5]};
    if (dh == nullptr) {
      const SwigluGate a{.gate = g, .up = u, .h = Tensor(h, t, {rows, hidden}, kGpu), .options = options};
      return config != nullptr ? cuda::swiglu_gate_with(a, tuning, {stream}) : swiglu_gate(a, {stream});
    }
    const auto [dg, du] = halves(dgate, dup);
    const SwigluGateBackward a{
        .gate = g, .up = u, .dh = Tensor(dh, t, {rows, hidden}, kGpu), .dgate = dg, .dup = du, .options = options};
    config != nullptr ? cuda::swiglu_gate_backward_with(a, tuning, {stream}) : swiglu_gate_backward(a, {stream});
  });
}

// y null: backward of dy into dx, else forward of x into y.
EXPORT int ingot_bench_activate(const char* dtype, const char* act, void* x, void* y, void* dy, void* dx, int64_t rows,
                                int64_t cols, void* stream) {
  return guarded([&] {
    const auto matrix = [&](void* p) { return Tensor(p, dtype_named(dtype), {rows, cols}, kGpu); };
    if (y != nullptr) return activate({.act = activation_named(act), .x = matrix(x), .y = matrix(y)}, {stream});
    activate_backward({.act = activation_named(act), .dy = matrix(dy), .x = matrix(x), .dx = matrix(dx)}, {stream});
  });
}
#endif

#ifdef INGOT_HAS_CUDA_LINEAR
// c (m, n) = op(a) op(b), or c += in fp32.
EXPORT int ingot_bench_matmul(void* a, void* b, void* c, int64_t m, int64_t n, int64_t k, int64_t transpose_a,
                              int64_t transpose_b, int64_t adds, void* workspace, int64_t workspace_bytes,
                              void* stream) {
  return guarded([&] {
    const Device device = kGpu;
    const Shape of_a = transpose_a ? Shape{k, m} : Shape{m, k}, of_b = transpose_b ? Shape{n, k} : Shape{k, n};
    matmul({.a = Tensor(a, DType::bf16, of_a, device),
            .b = Tensor(b, DType::bf16, of_b, device),
            .c = Tensor(c, adds ? DType::f32 : DType::bf16, {m, n}, device),
            .transpose_a = transpose_a != 0,
            .transpose_b = transpose_b != 0,
            .beta = adds ? 1. : 0.,
            .workspace = Tensor(workspace, DType::u8, {workspace_bytes}, device)},
           {stream});
  });
}

// y = f(x w1^T) w2^T without biases, in bf16; h and signs are kept where signs is given. Weight gradients are summed in
// fp32.
EXPORT int ingot_bench_wide_mlp(void* x, void* w1, void* w2, void* h, void* signs, void* y, int64_t rows, int64_t width,
                                int64_t hidden, const char* act, void* workspace, int64_t workspace_bytes,
                                void* stream) {
  return guarded([&] {
    const auto of = [&](void* at, int64_t r, int64_t c) { return Tensor(at, DType::bf16, {r, c}, kGpu); };
    const Tensor room = raw(workspace, workspace_bytes);
    linear({.x = of(x, rows, width),
            .w = of(w1, hidden, width),
            .y = of(h, rows, hidden),
            .signs = signs != nullptr ? raw(signs, linear_sign_bytes(rows, hidden, kGpu)) : Tensor(),
            .act = activation_named(act),
            .workspace = room},
           {stream});
    linear({.x = of(h, rows, hidden), .w = of(w2, width, hidden), .y = of(y, rows, width), .workspace = room},
           {stream});
  });
}
EXPORT int ingot_bench_wide_mlp_backward(void* dy, void* x, void* w1, void* w2, void* h, void* signs, void* dh,
                                         void* dx, void* dw1, void* dw2, int64_t rows, int64_t width, int64_t hidden,
                                         const char* act, void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const auto of = [&](void* at, int64_t r, int64_t c) { return Tensor(at, DType::bf16, {r, c}, kGpu); };
    const auto sums = [&](void* at, int64_t r, int64_t c) { return Tensor(at, DType::f32, {r, c}, kGpu); };
    const Tensor room = raw(workspace, workspace_bytes);
    linear_backward({.dy = of(dy, rows, width),
                     .x = of(h, rows, hidden),
                     .w = of(w2, width, hidden),
                     .dx = of(dh, rows, hidden),
                     .dw = sums(dw2, width, hidden),
                     .signs = raw(signs, linear_sign_bytes(rows, hidden, kGpu)),
                     .act = activation_named(act),
                     .workspace = room},
                    {stream});
    linear_backward({.dy = of(dh, rows, hidden),
                     .x = of(x, rows, width),
                     .w = of(w1, hidden, width),
                     .dx = of(dx, rows, width),
                     .dw = sums(dw1, hidden, width),
                     .workspace = room},
                    {stream});
  });
}
EXPORT int ingot_bench_sign_bytes(int64_t rows, int64_t columns, int64_t* bytes) {
  return guarded([&] { *bytes = linear_sign_bytes(rows, columns, kGpu); });
}
#endif

#ifdef INGOT_HAS_CUDA_SWIGLU
namespace {
// Of a gated linear: weights' rows lie `stride` elements apart; `columns`: (C, H) each.
struct GatedSizes {
  int64_t rows, channels, hidden, stride, columns;
};
Tensor gated_weights(void* data, DType t, const GatedSizes& s, Device device) {
  if (data == nullptr) return {};
  Tensor w(data, t, s.columns ? Shape{s.channels, s.hidden} : Shape{s.hidden, s.channels}, device);
  w.stride[0] = s.stride;
  return w;
}
Tensor optional_matrix(void* data, DType t, int64_t rows, int64_t cols, Device device) {
  return data == nullptr ? Tensor() : Tensor(data, t, {rows, cols}, device);
}
}  // namespace

EXPORT int ingot_bench_gated_linear(const char* dtype, void* x, void* w_gate, void* w_up, void* h, void* gate, void* up,
                                    int64_t rows, int64_t channels, int64_t hidden, int64_t stride, int64_t columns,
                                    void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const Device device = kGpu;
    const DType t = dtype_named(dtype);
    const GatedSizes s{rows, channels, hidden, stride, columns};
    gated_linear({.x = Tensor(x, t, {rows, channels}, device),
                  .w_gate = gated_weights(w_gate, t, s, device),
                  .w_up = gated_weights(w_up, t, s, device),
                  .h = Tensor(h, t, {rows, hidden}, device),
                  .gate = optional_matrix(gate, t, rows, hidden, device),
                  .up = optional_matrix(up, t, rows, hidden, device),
                  .workspace = Tensor(workspace, DType::u8, {workspace_bytes}, device),
                  .transposed = columns != 0},
                 {stream});
  });
}
EXPORT int ingot_bench_gated_linear_backward(const char* dtype, void* dh, void* x, void* w_gate, void* w_up, void* gate,
                                             void* up, void* dx, void* dw_gate, void* dw_up, int64_t rows,
                                             int64_t channels, int64_t hidden, int64_t stride, int64_t columns,
                                             void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const Device device = kGpu;
    const DType t = dtype_named(dtype);
    const GatedSizes s{rows, channels, hidden, stride, columns};
    gated_linear_backward({.dh = Tensor(dh, t, {rows, hidden}, device),
                           .x = Tensor(x, t, {rows, channels}, device),
                           .w_gate = gated_weights(w_gate, t, s, device),
                           .w_up = gated_weights(w_up, t, s, device),
                           .gate = optional_matrix(gate, t, rows, hidden, device),
                           .up = optional_matrix(up, t, rows, hidden, device),
                           .dx = optional_matrix(dx, t, rows, channels, device),
                           .dw_gate = gated_weights(dw_gate, t, s, device),
                           .dw_up = gated_weights(dw_up, t, s, device),
                           .workspace = Tensor(workspace, DType::u8, {workspace_bytes}, device),
                           .transposed = columns != 0,
                           .overwrite = true},
                          {stream});
  });
}
#endif

#ifdef INGOT_HAS_CUDA_ATTENTION
// --- attention over packed segments: what a backward pass needs besides
EXPORT int ingot_bench_attention_workspace(int64_t segments, int64_t tokens, int64_t heads, int64_t width, int64_t form,
                                           int64_t* bytes) {
  return guarded([&] {
    const Tensor q(nullptr, DType::bf16, {tokens, heads, width}, kGpu);
    *bytes = attention_backward_workspace_bytes({.q = q,
                                                 .k = q,
                                                 .v = q,
                                                 .cu_q = Tensor(nullptr, DType::i32, {segments + 1}, kGpu),
                                                 .deterministic = form != 1,
                                                 .one_kernel = form == 2});
  });
}
// --- q, out and dout (tokens, heads, width), k and v (tokens, kv_heads, width), the
// scale 1 / sqrt(width), causal. Backward where dout is not null; form: 1 in any order, 2 in one kernel.
EXPORT int ingot_bench_attention(void* q, void* k, void* v, void* cu, int64_t segments, void* out, void* lse,
                                 void* dout, void* dq, void* dk, void* dv, void* workspace, int64_t tokens,
                                 int64_t heads, int64_t kv_heads, int64_t width, int64_t form, void* stream) {
  return guarded([&] {
    const auto of = [&](void* p, int64_t h) { return Tensor(p, DType::bf16, {tokens, h, width}, kGpu); };
    const Tensor offsets(cu, DType::i32, {segments + 1}, kGpu), sums(lse, DType::f32, {heads, tokens}, kGpu);
    const double scale = 1 / std::sqrt(double(width));
    if (dout == nullptr)
      return attention({.q = of(q, heads),
                        .k = of(k, kv_heads),
                        .v = of(v, kv_heads),
                        .cu_q = offsets,
                        .out = of(out, heads),
                        .lse = sums,
                        .scale = scale},
                       {stream});
    AttentionBackward a{.q = of(q, heads),
                        .k = of(k, kv_heads),
                        .v = of(v, kv_heads),
                        .cu_q = offsets,
                        .out = of(out, heads),
                        .lse = sums,
                        .dout = of(dout, heads),
                        .dq = of(dq, heads),
                        .dk = of(dk, kv_heads),
                        .dv = of(dv, kv_heads),
                        .scale = scale,
                        .deterministic = form != 1,
                        .one_kernel = form == 2};
    a.workspace = raw(workspace, attention_backward_workspace_bytes(a));
    attention_backward(a, {stream});
  });
}
#endif

#ifdef INGOT_HAS_CUDA_CROSS_ENTROPY
// --- linear + softcap + cross entropy: losses, and gradients of their mean, of which dw is added to
EXPORT int ingot_bench_linear_cross_entropy_workspace(int64_t rows, int64_t features, int64_t vocab, int64_t* bytes) {
  return guarded(
      [&] { *bytes = linear_cross_entropy_workspace_bytes(rows, features, vocab, DType::bf16, Products::bf16, kGpu); });
}
EXPORT int ingot_bench_linear_cross_entropy(void* x, void* w, void* targets, void* loss, void* dloss, void* dx,
                                            void* dw, int64_t rows, int64_t features, int64_t vocab, double softcap,
                                            void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    linear_cross_entropy({.x = Tensor(x, DType::bf16, {rows, features}, kGpu),
                          .w = Tensor(w, DType::bf16, {vocab, features}, kGpu),
                          .targets = Tensor(targets, DType::i32, {rows}, kGpu),
                          .loss = Tensor(loss, DType::f32, {rows}, kGpu),
                          .dloss = Tensor(dloss, DType::f32, {rows}, kGpu),
                          .dx = Tensor(dx, DType::bf16, {rows, features}, kGpu),
                          .dw = Tensor(dw, DType::f32, {vocab, features}, kGpu),
                          .workspace = raw(workspace, workspace_bytes),
                          .softcap = softcap,
                          .products = Products::bf16},
                         {stream});
  });
}
#endif

#ifdef INGOT_HAS_CUDA_MUON
// --- Muon on a bank of f32 parameters, bf16 products
EXPORT int ingot_bench_muon_workspace(int64_t count, int64_t rows, int64_t cols, int64_t* bytes) {
  return guarded([&] { *bytes = muon_workspace_bytes(count, rows, cols, DType::f32, kGpu); });
}
EXPORT int ingot_bench_muon(void* p, void* g, void* momentum, int64_t count, int64_t rows, int64_t cols, double lr,
                            double mu, int64_t steps, void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const auto of = [&](void* at) { return Tensor(at, DType::f32, {count, rows, cols}, kGpu); };
    muon({.p = of(p),
          .g = of(g),
          .momentum = of(momentum),
          .workspace = raw(workspace, workspace_bytes),
          .lr = lr,
          .mu = mu,
          .steps = int(steps),
          .products = Products::bf16},
         {stream});
  });
}
// Newton-Schulz alone on a bank of bf16; the result is in x where `steps` is even, else in other.
EXPORT int ingot_bench_newton_schulz(void* x, void* other, void* square, void* polynomial, int64_t count, int64_t rows,
                                     int64_t cols, int64_t steps, void* stream) {
  return guarded([&] {
    const int64_t side = std::min(rows, cols);
    const auto of = [&](void* p, int64_t r, int64_t c) { return Tensor(p, DType::bf16, {count, r, c}, kGpu); };
    cuda::IterationBank bank{.x = of(x, rows, cols),
                             .other = of(other, rows, cols),
                             .square = of(square, side, side),
                             .polynomial = of(polynomial, side, side),
                             .a = 3.4445,
                             .b = -4.7750,
                             .c = 2.0315};
    for (int64_t step = 0; step < steps; ++step) {
      cuda::launch_iteration<bf16>(bank, {stream});
      std::swap(bank.x, bank.other);
    }
  });
}
#endif
