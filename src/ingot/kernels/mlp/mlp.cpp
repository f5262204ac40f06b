#include "ingot/kernels/mlp/mlp.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/mlp/forms.h"
#include "ingot/kernels/mlp/operands.h"

namespace ingot {
namespace {

using Layers = std::vector<MlpLayer>;

int64_t widest(const Layers& layers) {
  int64_t n = 0;
  for (const MlpLayer& layer : layers) n = std::max(n, layer.w.rows());
  return n;
}
bool weight_normed(const Layers& layers) {
  return std::any_of(layers.begin(), layers.end(), [](const MlpLayer& layer) { return bool(layer.g); });
}
int64_t largest_weight(const Layers& layers) {
  int64_t n = 0;
  for (const MlpLayer& layer : layers)
    if (layer.g) n = std::max(n, layer.w.numel());
  return n;
}
int64_t weight_elements(const Layers& layers) {
  int64_t n = 0;
  for (const MlpLayer& layer : layers) n += layer.w.numel();
  return n;
}
int64_t parameter_bytes(const Layers& layers) {
  int64_t n = 0;
  for (const MlpLayer& layer : layers) n += layer.w.bytes() + layer.b.bytes() + layer.g.bytes();
  return n;
}

// --- checks ------------------------------------------------------------------------------------------------

DType gradient_dtype(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

void check_matrix(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t cols, const Tensor& x) {
  INGOT_CHECK(t.dtype == x.dtype, op, ": ", name, ": found dtype ", t.dtype, ", expected x's ", x.dtype);
  INGOT_CHECK(t.device == x.device, op, ": ", name, ": found it on ", t.device, ", expected x's ", x.device);
  INGOT_CHECK(t.rank() >= 1 && t.rows() == rows && t.cols() == cols, op, ": ", name, ": found ", t.shape, ", expected ",
              Shape{rows, cols});
  INGOT_CHECK(t.rows_uniform(), op, ": ", name, ": found rows of shape ", t.shape,
              " that one stride does not reach, expected one stride between rows and 1 within");
}
// Checks a parameter or its gradient, which may be left out.
void check_parameter(const char* op, const char* name, size_t l, const Tensor& t, const Shape& shape, DType dtype,
                     Device device) {
  if (!t) return;
  INGOT_CHECK(t.shape == shape, op, ": layer ", l, ": ", name, ": found ", t.shape, ", expected ", shape);
  INGOT_CHECK(t.dtype == dtype, op, ": layer ", l, ": ", name, ": found dtype ", t.dtype, ", expected ", dtype);
  INGOT_CHECK(t.device == device, op, ": layer ", l, ": ", name, ": found it on ", t.device, ", expected ", device);
  INGOT_CHECK(device.kind == Device::cpu && t.rank() == 2 ? t.rows_uniform() : t.contiguous(), op, ": layer ", l, ": ",
              name, ": found a strided ", shape, ", expected it contiguous");
}
void check_layers(const char* op, const Layers& layers, const Tensor& x) {
  INGOT_CHECK(!layers.empty(), op, ": found no layers, expected at least one");
  int64_t width = x.cols();
  for (size_t l = 0; l < layers.size(); ++l) {
    const MlpLayer& layer = layers[l];
    INGOT_CHECK(layer.w.rank() == 2 && layer.w.cols() == width, op, ": layer ", l, ": w: found ", layer.w.shape,
                ", expected (N, ", width, ")");
    width = layer.w.rows();
    check_parameter(op, "w", l, layer.w, layer.w.shape, x.dtype, x.device);
    check_parameter(op, "b", l, layer.b, {width}, x.dtype, x.device);
    check_parameter(op, "g", l, layer.g, {width}, x.dtype, x.device);
  }
}
void check_gradients(const MlpBackward& m) {
  const char* op = "mlp_backward";
  INGOT_CHECK_EQ(m.grads.size(), m.layers.size(), op, ": grads");
  const DType dtype = gradient_dtype(m.x.dtype);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const MlpLayer &layer = m.layers[l], &grad = m.grads[l];
    check_parameter(op, "gradient of w", l, grad.w, layer.w.shape, dtype, m.x.device);
    check_parameter(op, "gradient of b", l, grad.b, {layer.w.rows()}, dtype, m.x.device);
    check_parameter(op, "gradient of g", l, grad.g, {layer.w.rows()}, dtype, m.x.device);
    INGOT_CHECK(!grad.g || layer.g, op, ": layer ", l, ": found a gradient of g, expected g itself beside it");
    INGOT_CHECK(!grad.b || layer.b, op, ": layer ", l, ": found a gradient of b, expected b itself beside it");
  }
}
void check_saved(const char* op, const Tensor& saved, int64_t elements, const Tensor& x) {
  if (!saved || elements == 0) return;
  INGOT_CHECK((saved.dtype == x.dtype || saved.dtype == DType::f32) && saved.contiguous() && saved.numel() >= elements,
              op, ": saved: found ", saved.numel(), " elements of ", saved.dtype, ", expected at least ", elements,
              " contiguous of ", x.dtype, x.dtype == DType::f32 ? "" : " or f32");
  INGOT_CHECK(saved.device == x.device, op, ": saved: found it on ", saved.device, ", expected ", x.device);
}
void check_workspace(const char* op, const Tensor& workspace, int64_t bytes, const Tensor& x) {
  if (bytes == 0) return;
  INGOT_CHECK(workspace.dtype == DType::u8 && workspace.contiguous() && workspace.numel() >= bytes, op,
              ": workspace: found ", workspace.numel(), " elements of ", workspace.dtype, ", expected at least ", bytes,
              " contiguous bytes");
  INGOT_CHECK(workspace.device == x.device, op, ": workspace: found it on ", workspace.device, ", expected ", x.device);
}

// The limits of the kernels; every further limit is the same on all devices.
constexpr size_t kCudaLayers = 8;
constexpr int64_t kCudaWidth = 512, kCudaRows = int64_t(1) << 33;  // tiles of rows are numbered with 32 bits
void check_cuda_width(const char* op, const char* what, int64_t width) {
  if (width % 8 != 0 || width < 8 || width > kCudaWidth)
    fail(ErrorCode::unsupported, op, ": found ", what, " width ", width,
         ", expected a multiple of 8 from 8 to 512 on a GPU");
}
void check_cuda_address(const char* op, const char* name, const Tensor& t) {
  INGOT_CHECK(reinterpret_cast<uintptr_t>(t.data) % 16 == 0, op, ": ", name,
              ": found an address that is no multiple of 16, expected an aligned one");
}
void check_cuda_rows(const char* op, const char* name, const Tensor& t) {
  const int64_t stride = t.row_stride() * size_of(t.dtype);
  INGOT_CHECK(t.rows() <= 1 || stride % 16 == 0, op, ": ", name, ": found rows ", stride,
              " bytes apart, expected a multiple of 16");
  check_cuda_address(op, name, t);
}
void check_cuda_shapes(const char* op, const Layers& layers, const Tensor& x) {
  if (x.dtype != DType::f16 && x.dtype != DType::bf16 && x.dtype != DType::f32)
    fail(ErrorCode::unsupported, op, ": x: found dtype ", x.dtype, " on a GPU, expected f16, bf16 or f32");
  if (layers.size() > kCudaLayers)
    fail(ErrorCode::unsupported, op, ": found ", layers.size(), " layers, expected at most ", kCudaLayers, " on a GPU");
  check_cuda_width(op, "input", x.cols());
  for (const MlpLayer& layer : layers) check_cuda_width(op, "layer", layer.w.rows());
  INGOT_CHECK(x.rows() <= kCudaRows, op, ": x: found ", x.rows(), " rows, expected at most ", kCudaRows, " on a GPU");
}
void check_cuda(const char* op, const Layers& layers, const Tensor& x) {
  check_cuda_shapes(op, layers, x);
  check_cuda_rows(op, "x", x);
  for (const MlpLayer& layer : layers) {
    check_cuda_rows(op, "w", layer.w);
    check_cuda_address(op, "b", layer.b);
    check_cuda_address(op, "g", layer.g);
  }
}

// --- memory --------------------------------------------------------------------------------------------------

// Divides the workspace in the order of the requests; without memory the size is only counted.
class Pieces {
 public:
  Pieces() = default;
  explicit Pieces(const Tensor& workspace) : base_(static_cast<char*>(workspace.data)) {}
  Tensor take(int64_t elements, DType dtype) {
    const int64_t begin = bytes_;
    bytes_ += (elements * size_of(dtype) + 63) / 64 * 64;
    return Tensor(base_ == nullptr ? nullptr : base_ + begin, dtype, {elements});
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_ = nullptr;
  int64_t bytes_ = 0;
};
Tensor as_matrix(const Tensor& piece, int64_t rows, int64_t cols) {
  return Tensor(piece.data, piece.dtype, {rows, cols}, piece.device);
}
// The offset in `saved` of each layer's value before the activation. A last layer without activation stores nothing;
// its offset is the end of `saved`.
std::vector<int64_t> offsets(int64_t rows, const Layers& layers) {
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

struct ForwardMemory {
  Tensor h[2], w, saved;
  ForwardMemory(Pieces& pieces, const Layers& layers, bool activate_last, const Tensor& x, const Tensor& saved_in) {
    const int64_t rows = x.rows();
    if (layers.size() > 1)
      for (Tensor& t : h) t = pieces.take(rows * widest(layers), x.dtype);
    if (weight_normed(layers)) w = pieces.take(largest_weight(layers), x.dtype);
    saved = saved_in;
    if (saved_in && saved_in.dtype != x.dtype)
      saved = pieces.take(mlp_saved_elements(rows, layers, activate_last), x.dtype);
  }
};
struct BackwardMemory {
  Tensor d[2], h, w, dw, saved;  // d: two alternating gradients; h: a recomputed activation
  BackwardMemory(Pieces& pieces, const MlpBackward& m) {
    const int64_t rows = m.x.rows(), wide = rows * widest(m.layers);
    for (Tensor* t : {&d[0], &d[1], &h}) *t = pieces.take(wide, m.x.dtype);
    if (weight_normed(m.layers))
      for (Tensor* t : {&w, &dw}) *t = pieces.take(largest_weight(m.layers), m.x.dtype);
    saved = m.saved;
    if (!m.saved || m.saved.dtype != m.x.dtype)
      saved = pieces.take(mlp_saved_elements(rows, m.layers, m.activate_last), m.x.dtype);
  }
};

// --- the loops -----------------------------------------------------------------------------------------------

double inverse_norm(double sum_of_squares) { return 1 / std::sqrt(sum_of_squares + 1e-12); }

// The weight of a layer's product: w, or g v / |v| computed in `memory`.
Tensor effective_weight(const MlpLayer& layer, const Tensor& memory) {
  if (!layer.g) return layer.w;
  const int64_t n = layer.w.rows(), k = layer.w.cols();
  const Tensor w = as_matrix(memory, n, k);
  with_wide_float_type(w.dtype, "mlp", [&](auto type) {
    using T = decltype(type);
    parallel_for(n, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* v = layer.w.ptr<T>() + i * layer.w.row_stride();
        double sum = 0;
        for (int64_t j = 0; j < k; ++j) sum += double(v[j]) * v[j];
        const T scale = T(layer.g.ptr<T>()[i] * inverse_norm(sum));
        for (int64_t j = 0; j < k; ++j) w.ptr<T>()[i * k + j] = scale * v[j];
      }
    });
  });
  return w;
}
// Computes dv and dg from dW.
void weight_norm_backward(const MlpLayer& layer, const Tensor& dw, const MlpLayer& grad) {
  const int64_t n = layer.w.rows(), k = layer.w.cols();
  with_wide_float_type(dw.dtype, "mlp_backward", [&](auto type) {
    using T = decltype(type);
    parallel_for(n, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T *v = layer.w.ptr<T>() + i * layer.w.row_stride(), *d = dw.ptr<T>() + i * k;
        double sum = 0, along = 0;
        for (int64_t j = 0; j < k; ++j) sum += double(v[j]) * v[j], along += double(d[j]) * v[j];
        const double r = inverse_norm(sum), scale = layer.g.ptr<T>()[i] * r;
        along *= r;
        if (grad.g) grad.g.ptr<T>()[i] += T(along);
        if (!grad.w) continue;
        T* dv = grad.w.ptr<T>() + i * grad.w.row_stride();
        for (int64_t j = 0; j < k; ++j) dv[j] += T(scale * (d[j] - v[j] * r * along));
      }
    });
  });
}

// The layers in turn; `h` are two alternating buffers.
void forward(const Mlp& m, const Tensor (&h)[2], const Tensor& w, const Tensor& saved, Stream stream) {
  const int64_t rows = m.x.rows();
  const std::vector<int64_t> at = offsets(rows, m.layers);
  Tensor in = m.x;
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const MlpLayer& layer = m.layers[l];
    const bool last = l + 1 == m.layers.size(), active = mlp_activated(m, l);
    const int64_t n = layer.w.rows();
    Linear op{.x = in, .w = effective_weight(layer, w), .b = layer.b, .products = m.products};
    op.y = last ? m.y : as_matrix(h[l % 2], rows, n);
    if (active) op.act = m.act;
    if (active && saved) op.pre = pre_of(saved, at[l], rows, n);
    linear(op, stream);
    in = op.y;
  }
}

// The inputs of the backward pass from the forward pass: as given, converted, or recomputed.
void form_saved(const MlpBackward& m, const BackwardMemory& memory, Stream stream) {
  const int64_t elements = mlp_saved_elements(m.x.rows(), m.layers, m.activate_last);
  if (elements == 0 || (m.saved && m.saved.dtype == m.x.dtype)) return;
  if (m.saved) {
    copy(Tensor(m.saved.data, m.saved.dtype, {elements}), Tensor(memory.saved.data, m.x.dtype, {elements}));
    return;
  }
  Layers layers = m.layers;
  if (!m.activate_last) layers.pop_back();
  const Tensor y = as_matrix(memory.h, m.x.rows(), layers.back().w.rows());
  forward({.x = m.x, .y = y, .layers = layers, .act = m.act, .activate_last = true, .products = m.products}, memory.d,
          memory.w, memory.saved, stream);
}

}  // namespace

namespace cpu {

void mlp(const Mlp& m, Stream stream) {
  Pieces pieces(m.workspace);
  const ForwardMemory memory(pieces, m.layers, m.activate_last, m.x, m.saved);
  forward(m, memory.h, memory.w, memory.saved, stream);
  if (const int64_t n = mlp_saved_elements(m.x.rows(), m.layers, m.activate_last);
      m.saved && m.saved.dtype != m.x.dtype && n > 0)
    copy(Tensor(memory.saved.data, m.x.dtype, {n}), Tensor(m.saved.data, m.saved.dtype, {n}));
}

void mlp_backward(const MlpBackward& m, Stream stream) {
  Pieces pieces(m.workspace);
  const BackwardMemory memory(pieces, m);
  const int64_t rows = m.x.rows();
  const size_t count = m.layers.size(), first = mlp_first_layer(m);
  if (first == count) return;
  form_saved(m, memory, stream);
  const std::vector<int64_t> at = offsets(rows, m.layers);
  Tensor d = m.dy;
  if (m.activate_last) {
    d = as_matrix(memory.d[count % 2], rows, m.layers.back().w.rows());
    activate_backward({.act = m.act, .dy = m.dy, .x = pre_of(memory.saved, at[count - 1], rows, d.cols()), .dx = d},
                      stream);
  }
  for (size_t l = count; l-- > first;) {
    const MlpLayer &layer = m.layers[l], &grad = m.grads[l];
    const int64_t k = layer.w.cols();
    LinearBackward op{.dy = d, .x = m.x, .dw = grad.w, .db = grad.b, .products = m.products};
    if (layer.g && (grad.w || grad.g)) {
      op.dw = as_matrix(memory.dw, layer.w.rows(), k);
      fill_zero(op.dw);
    }
    op.dx = l == 0 ? m.dx : l > first ? as_matrix(memory.d[l % 2], rows, k) : Tensor();
    if (op.dx) op.w = effective_weight(layer, memory.w);
    if (l > 0) {
      const Tensor pre = pre_of(memory.saved, at[l - 1], rows, k);
      if (op.dw) {
        op.x = as_matrix(memory.h, rows, k);
        activate({.act = m.act, .x = pre, .y = op.x}, stream);
      }
      if (op.dx) op.pre = pre, op.act = m.act;
    }
    linear_backward(op, stream);
    if (layer.g && op.dw) weight_norm_backward(layer, op.dw, grad);
    d = op.dx;
  }
}

}  // namespace cpu

namespace {

// The operands' shapes must have been checked.
int64_t backward_workspace_bytes(const MlpBackward& m) {
  if constexpr (INGOT_HAS_CUDA(MLP))
    if (m.x.device.kind == Device::cuda) return cuda::mlp_backward_workspace_bytes(m);
  Pieces pieces;
  BackwardMemory(pieces, m);
  return pieces.bytes();
}

}  // namespace

void mlp(const Mlp& m, Stream stream) {
  const char* op = "mlp";
  check_layers(op, m.layers, m.x);
  check_matrix(op, "x", m.x, m.x.rows(), m.x.cols(), m.x);
  check_matrix(op, "y", m.y, m.x.rows(), m.layers.back().w.rows(), m.x);
  check_saved(op, m.saved, mlp_saved_elements(m.x.rows(), m.layers, m.activate_last), m.x);
  if (m.x.device.kind == Device::cuda) {
    check_cuda(op, m.layers, m.x);
    check_cuda_rows(op, "y", m.y);
    check_cuda_address(op, "saved", m.saved);
  }
  check_workspace(op, m.workspace, mlp_workspace_bytes(m), m.x);
  INGOT_DISPATCH(MLP, m.x.device, mlp, m, stream);
}

void mlp_backward(const MlpBackward& m, Stream stream) {
  const char* op = "mlp_backward";
  check_layers(op, m.layers, m.x);
  check_matrix(op, "x", m.x, m.x.rows(), m.x.cols(), m.x);
  check_matrix(op, "dy", m.dy, m.x.rows(), m.layers.back().w.rows(), m.x);
  if (m.dx) check_matrix(op, "dx", m.dx, m.x.rows(), m.x.cols(), m.x);
  check_gradients(m);
  check_saved(op, m.saved, mlp_saved_elements(m.x.rows(), m.layers, m.activate_last), m.x);
  if (m.x.device.kind == Device::cuda) {
    check_cuda(op, m.layers, m.x);
    check_cuda_rows(op, "dy", m.dy);
    if (m.dx) check_cuda_rows(op, "dx", m.dx);
    check_cuda_address(op, "saved", m.saved);
    check_cuda_address(op, "workspace", m.workspace);
    for (const MlpLayer& grad : m.grads) {
      check_cuda_address(op, "gradient of w", grad.w);
      check_cuda_address(op, "gradient of b", grad.b);
      check_cuda_address(op, "gradient of g", grad.g);
    }
  }
  check_workspace(op, m.workspace, backward_workspace_bytes(m), m.x);
  INGOT_DISPATCH(MLP, m.x.device, mlp_backward, m, stream);
}

int64_t mlp_saved_elements(int64_t rows, const Layers& layers, bool activate_last) {
  int64_t n = 0;
  for (size_t l = 0; l < layers.size(); ++l)
    if (activate_last || l + 1 < layers.size()) n += rows * layers[l].w.rows();
  return n;
}
int64_t mlp_workspace_bytes(const Mlp& m) {
  if constexpr (INGOT_HAS_CUDA(MLP))
    if (m.x.device.kind == Device::cuda) return cuda::mlp_workspace_bytes(m);
  if (m.x.device.kind == Device::cuda) return 0;
  Pieces pieces;
  ForwardMemory(pieces, m.layers, m.activate_last, m.x, m.saved);
  return pieces.bytes();
}
int64_t mlp_backward_workspace_bytes(const MlpBackward& m) {
  if (m.x.device.kind == Device::cuda) {  // the limit of the forms' layouts
    INGOT_CHECK(!m.layers.empty(), "mlp_backward: found no layers, expected at least one");
    INGOT_CHECK_EQ(m.grads.size(), m.layers.size(), "mlp_backward: grads");
    check_cuda_shapes("mlp_backward", m.layers, m.x);
  }
  return backward_workspace_bytes(m);
}

int64_t bytes(const Mlp& m) {
  const int64_t saved = m.saved ? mlp_saved_elements(m.x.rows(), m.layers, m.activate_last) : 0;
  return m.x.bytes() + m.y.bytes() + parameter_bytes(m.layers) + saved * size_of(m.saved.dtype);
}
int64_t flops(const Mlp& m) { return 2 * m.x.rows() * weight_elements(m.layers); }
int64_t bytes(const MlpBackward& m) {
  const int64_t saved = m.saved ? mlp_saved_elements(m.x.rows(), m.layers, m.activate_last) : 0;
  return m.dy.bytes() + m.x.bytes() + m.dx.bytes() + parameter_bytes(m.layers) + 2 * parameter_bytes(m.grads) +
         saved * size_of(m.saved.dtype);
}
int64_t flops(const MlpBackward& m) {
  int64_t products = 0;
  const size_t first = mlp_first_layer(m);
  for (size_t l = 0; l < m.layers.size(); ++l) {
    const int64_t n = m.layers[l].w.numel();
    if (m.grads[l].w || m.grads[l].g) products += n;
    if (l > first || (l == 0 && m.dx)) products += n;
    if (!m.saved && mlp_activated(m, l)) products += n;
  }
  return 2 * m.x.rows() * products;
}

}  // namespace ingot
