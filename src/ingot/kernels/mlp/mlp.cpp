#include "ingot/kernels/mlp/mlp.h"

#include <algorithm>

namespace ingot {
namespace {

// Saved for backward is the value before each activation, (T, N_l) after (T, N_l): what comes after it is cheap to form
// again.
bool activated(const std::vector<MlpLayer>& layers, bool activate_last, size_t l) {
  return activate_last || l + 1 < layers.size();
}
int64_t widest(const std::vector<MlpLayer>& layers) {
  int64_t n = 0;
  for (const MlpLayer& layer : layers) n = std::max(n, layer.w.rows());
  return n;
}
int64_t buffer_bytes(int64_t rows, const std::vector<MlpLayer>& layers, DType dtype) {
  return (rows * widest(layers) * size_of(dtype) + 63) / 64 * 64;
}
constexpr int kBuffers = 3;  // two gradients (or activations) that take turns, and one activation formed again

Tensor buffer(const Tensor& workspace, int i, int64_t rows, int64_t cols, const std::vector<MlpLayer>& layers,
              const Tensor& like) {
  char* at = static_cast<char*>(workspace.data) + i * buffer_bytes(rows, layers, like.dtype);
  return Tensor(at, like.dtype, {rows, cols}, like.device);
}
// Where each layer's value before the activation lies in `saved`; empty for a layer without activation.
std::vector<int64_t> offsets(int64_t rows, const std::vector<MlpLayer>& layers) {
  std::vector<int64_t> at;
  int64_t next = 0;
  for (const MlpLayer& layer : layers) {
    at.push_back(next);
    next += rows * layer.w.rows();
  }
  return at;
}
Tensor pre_of(const Tensor& saved, int64_t offset, int64_t rows, int64_t cols) {
  return Tensor(static_cast<char*>(saved.data) + offset * size_of(saved.dtype), saved.dtype, {rows, cols},
                saved.device);
}

void check_layers(const char* op, const std::vector<MlpLayer>& layers, const Tensor& x) {
  INGOT_CHECK(!layers.empty(), op, ": found no layers, expected at least one");
  int64_t width = x.cols();
  for (size_t l = 0; l < layers.size(); ++l) {
    INGOT_CHECK(layers[l].w.rank() == 2 && layers[l].w.cols() == width, op, ": layer ", l, ": w: found ",
                layers[l].w.shape, ", expected (N, ", width, ")");
    width = layers[l].w.rows();
  }
}
void check_memory(const char* op, const Tensor& saved, bool need_saved, const Tensor& workspace, const Tensor& x,
                  const std::vector<MlpLayer>& layers, bool activate_last) {
  const int64_t elements = mlp_saved_elements(x.rows(), layers, activate_last);
  if (saved || need_saved)
    INGOT_CHECK(elements == 0 || (saved.dtype == x.dtype && saved.contiguous() && saved.numel() >= elements), op,
                ": saved: found ", saved.numel(), " elements of ", saved.dtype, ", expected at least ", elements,
                " contiguous of ", x.dtype);
  const int64_t bytes = mlp_workspace_bytes(x.rows(), layers, x.dtype, x.device);
  INGOT_CHECK(bytes == 0 || (workspace.dtype == DType::u8 && workspace.contiguous() && workspace.numel() >= bytes), op,
              ": workspace: found ", workspace.numel(), " elements of ", workspace.dtype, ", expected at least ", bytes,
              " contiguous bytes");
}

}  // namespace

void mlp(const Mlp& m, Stream stream) {
  check_layers("mlp", m.layers, m.x);
  check_memory("mlp", m.saved, false, m.workspace, m.x, m.layers, m.activate_last);
  const int64_t rows = m.x.rows();
  const std::vector<int64_t> at = offsets(rows, m.layers);
  Tensor h = m.x;
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const MlpLayer& layer = m.layers[l];
    const bool last = l + 1 == m.layers.size(), active = activated(m.layers, m.activate_last, l);
    const int64_t n = layer.w.rows();
    Linear op{.x = h, .w = layer.w, .b = layer.b, .products = m.products};
    op.y = last ? m.y : buffer(m.workspace, int(l % 2), rows, n, m.layers, m.x);
    if (active) op.act = m.act;
    if (active && m.saved) op.pre = pre_of(m.saved, at[l], rows, n);
    linear(op, stream);
    h = op.y;
  }
}

void mlp_backward(const MlpBackward& m, Stream stream) {
  check_layers("mlp_backward", m.layers, m.x);
  check_memory("mlp_backward", m.saved, true, m.workspace, m.x, m.layers, m.activate_last);
  INGOT_CHECK_EQ(m.grads.size(), m.layers.size(), "mlp_backward: grads");
  const int64_t rows = m.x.rows();
  const size_t count = m.layers.size();
  const std::vector<int64_t> at = offsets(rows, m.layers);
  // The first layer that still has something to compute.
  size_t first = 0;
  if (!m.dx)
    while (first < count && !m.grads[first].w && !m.grads[first].b) ++first;
  Tensor d = m.dy;
  if (m.activate_last && first < count) {
    d = buffer(m.workspace, int(count % 2), rows, m.layers.back().w.rows(), m.layers, m.x);
    activate_backward({.act = m.act, .dy = m.dy, .x = pre_of(m.saved, at[count - 1], rows, d.cols()), .dx = d}, stream);
  }
  for (size_t l = count; l-- > first;) {
    const MlpLayer& layer = m.layers[l];
    const int64_t k = layer.w.cols();
    LinearBackward op{.dy = d, .x = m.x, .w = layer.w, .dw = m.grads[l].w, .db = m.grads[l].b, .products = m.products};
    if (l > 0) {
      const Tensor pre = pre_of(m.saved, at[l - 1], rows, k);
      if (op.dw) {
        op.x = buffer(m.workspace, 2, rows, k, m.layers, m.x);
        activate({.act = m.act, .x = pre, .y = op.x}, stream);
      }
      if (l > first) {
        op.dx = buffer(m.workspace, int(l % 2), rows, k, m.layers, m.x);
        op.pre = pre;
        op.act = m.act;
      }
    } else {
      op.dx = m.dx;
    }
    linear_backward(op, stream);
    d = op.dx;
  }
}

int64_t mlp_saved_elements(int64_t rows, const std::vector<MlpLayer>& layers, bool activate_last) {
  int64_t n = 0;
  for (size_t l = 0; l < layers.size(); ++l)
    if (activated(layers, activate_last, l)) n += rows * layers[l].w.rows();
  return n;
}
int64_t mlp_workspace_bytes(int64_t rows, const std::vector<MlpLayer>& layers, DType dtype, Device) {
  return kBuffers * buffer_bytes(rows, layers, dtype);
}

}  // namespace ingot
