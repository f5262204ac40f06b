// Part of libingot_bench.so (testing/native.h).
#include "ingot/kernels/swiglu/swiglu.h"

#include <utility>

#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/swiglu/swiglu_config.h"
#include "ingot/testing/native.h"

namespace ingot::testing {

// --- the gate: layout 0: two tensors; 1: a tensor of 2H columns, gate first (up is left out); 2: the same, up first;
// 3: interleaved. Forward where dh is null. config: null for the default, or {vectors, units_per_thread, threads,
// overlap, large, early}.
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

// Where y is null: the backward pass of dy into dx, else the forward pass of x into y.
EXPORT int ingot_bench_activate(const char* dtype, const char* act, void* x, void* y, void* dy, void* dx, int64_t rows,
                                int64_t cols, void* stream) {
  return guarded([&] {
    const auto matrix = [&](void* p) { return Tensor(p, dtype_named(dtype), {rows, cols}, kGpu); };
    if (y != nullptr) return activate({.act = activation_named(act), .x = matrix(x), .y = matrix(y)}, {stream});
    activate_backward({.act = activation_named(act), .dy = matrix(dy), .x = matrix(x), .dx = matrix(dx)}, {stream});
  });
}

namespace {
// Sizes of a gated linear layer: rows of the weights lie `stride` elements apart, rows of gate and up `kept_stride`;
// `columns`: (C, H) each.
struct GatedSizes {
  int64_t rows, channels, hidden, stride, kept_stride, columns;
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
Tensor kept_half(void* data, DType t, const GatedSizes& s, Device device) {
  Tensor half = optional_matrix(data, t, s.rows, s.hidden, device);
  if (half) half.stride[0] = s.kept_stride;
  return half;
}
}  // namespace

EXPORT int ingot_bench_gated_linear(const char* dtype, void* x, void* w_gate, void* w_up, void* h, void* gate, void* up,
                                    int64_t rows, int64_t channels, int64_t hidden, int64_t stride, int64_t kept_stride,
                                    int64_t columns, void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const Device device = kGpu;
    const DType t = dtype_named(dtype);
    const GatedSizes s{rows, channels, hidden, stride, kept_stride, columns};
    gated_linear({.x = Tensor(x, t, {rows, channels}, device),
                  .w_gate = gated_weights(w_gate, t, s, device),
                  .w_up = gated_weights(w_up, t, s, device),
                  .h = Tensor(h, t, {rows, hidden}, device),
                  .gate = kept_half(gate, t, s, device),
                  .up = kept_half(up, t, s, device),
                  .workspace = Tensor(workspace, DType::u8, {workspace_bytes}, device),
                  .transposed = columns != 0},
                 {stream});
  });
}
// dh null: gate and up hold their gradients, as ingot_bench_gate leaves these in the halves of a tensor (layout 1).
EXPORT int ingot_bench_gated_linear_backward(const char* dtype, void* dh, void* x, void* w_gate, void* w_up, void* gate,
                                             void* up, void* dx, void* dw_gate, void* dw_up, int64_t rows,
                                             int64_t channels, int64_t hidden, int64_t stride, int64_t kept_stride,
                                             int64_t columns, void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const Device device = kGpu;
    const DType t = dtype_named(dtype);
    const GatedSizes s{rows, channels, hidden, stride, kept_stride, columns};
    gated_linear_backward({.dh = optional_matrix(dh, t, rows, hidden, device),
                           .x = Tensor(x, t, {rows, channels}, device),
                           .w_gate = gated_weights(w_gate, t, s, device),
                           .w_up = gated_weights(w_up, t, s, device),
                           .gate = kept_half(gate, t, s, device),
                           .up = kept_half(up, t, s, device),
                           .dx = optional_matrix(dx, t, rows, channels, device),
                           .dw_gate = gated_weights(dw_gate, t, s, device),
                           .dw_up = gated_weights(dw_up, t, s, device),
                           .workspace = Tensor(workspace, DType::u8, {workspace_bytes}, device),
                           .transposed = columns != 0,
                           .overwrite = true},
                          {stream});
  });
}

}  // namespace ingot::testing
