// Functions of libingot_bench.so (testing/native.h).
#include "ingot/kernels/mlp/mlp.h"

#include <string>
#include <vector>

#include "ingot/kernels/mlp/forms.h"
#include "ingot/testing/native.h"

namespace ingot::testing {

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

namespace {
MlpBackward mlp_backward_of(DType t, int64_t rows, int64_t depth, const int64_t* widths, const char* act,
                            void* const* w, void* const* g, void* x, void* dy, void* dx, void* const* dw,
                            void* const* dg, void* saved, const char* saved_dtype, const Tensor& workspace) {
  MlpBackward m{.dy = Tensor(dy, t, {rows, widths[depth]}, kGpu),
                .x = Tensor(x, t, {rows, widths[0]}, kGpu),
                .dx = Tensor(dx, t, {rows, widths[0]}, kGpu),
                .layers = mlp_layers(depth, widths, w, g, t),
                .grads = mlp_layers(depth, widths, dw, dg, DType::f32),
                .act = activation_named(act),
                .workspace = workspace};
  m.saved = mlp_saved(saved, saved_dtype, rows, m.layers);
  return m;
}
}  // namespace

EXPORT int ingot_bench_mlp_backward(const char* dtype, int64_t rows, int64_t depth, const int64_t* widths,
                                    const char* act, void* const* w, void* const* g, void* x, void* dy, void* dx,
                                    void* const* dw, void* const* dg, void* saved, const char* saved_dtype,
                                    void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    mlp_backward(mlp_backward_of(dtype_named(dtype), rows, depth, widths, act, w, g, x, dy, dx, dw, dg, saved,
                                 saved_dtype, raw(workspace, workspace_bytes)),
                 {stream});
  });
}

// Runs a form by its number in MlpForm; the form must support the problem; without weight norm.
EXPORT int ingot_bench_mlp_backward_with(int64_t form, const char* dtype, int64_t rows, int64_t depth,
                                         const int64_t* widths, const char* act, void* const* w, void* x, void* dy,
                                         void* dx, void* const* dw, void* saved, const char* saved_dtype,
                                         void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const MlpBackward m = mlp_backward_of(dtype_named(dtype), rows, depth, widths, act, w, nullptr, x, dy, dx, dw,
                                          nullptr, saved, saved_dtype, raw(workspace, workspace_bytes));
    const auto as = cuda::MlpForm(form);
    if (!cuda::mlp_takes(m, as)) fail(ErrorCode::unsupported, "mlp_backward: form ", form, " does not take this");
    if (const int64_t needs = cuda::mlp_backward_workspace_bytes_with(m, as); needs > workspace_bytes)
      fail(ErrorCode::usage, "mlp_backward: workspace: found ", workspace_bytes, " bytes, expected ", needs);
    cuda::mlp_backward_with(m, as, {stream});
  });
}

}  // namespace ingot::testing
