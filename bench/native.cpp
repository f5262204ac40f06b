// libingot_bench.so: the shipped entry points over raw pointers and a stream, so that a Python process can time them
// beside PyTorch. Every function returns 0, or 1 with the reason in ingot_bench_error().
#include <string>

#include "ingot/core/version.h"
#include "ingot/gpu/bandwidth.h"
#include "ingot/kernels/mlp/mlp.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"

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
}  // namespace

EXPORT const char* ingot_bench_error() { return last_error.c_str(); }
EXPORT const char* ingot_bench_commit() { return commit(); }

EXPORT int ingot_bench_copy(void* to, const void* from, int64_t bytes, void* stream) {
  return guarded([&] { gpu::copy_kernel(to, from, bytes, {stream}); });
}
EXPORT int ingot_bench_read(const void* from, int64_t bytes, void* sink, void* stream) {
  return guarded([&] { gpu::read_kernel(from, bytes, sink, {stream}); });
}

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

// What the default of the forward pass would be, in the layout above.
EXPORT int ingot_bench_rmsnorm_config(const char* dtype, int64_t rows, int64_t cols, int residual, int* config) {
  return guarded([&] {
    const auto c =
        cuda::pick_rmsnorm_config({.rows = rows, .cols = cols, .dtype = dtype_named(dtype), .residual = residual != 0});
    const int values[7] = {
        c.vectors ? c.vecs_per_thread : 0, c.rows_per_group, c.group, c.cluster, c.threads, 1, c.streaming};
    for (int i = 0; i < 7; ++i) config[i] = values[i];
  });
}

// --- whole MLPs: `widths` has depth + 1 entries; g null: no weight norm; saved_dtype "none": nothing is stored
// -----------
namespace {
const Device kGpu{Device::cuda, 0};

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
Tensor raw(void* data, int64_t bytes) { return Tensor(data, DType::u8, {bytes}, kGpu); }
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
