// gated_linear and its backward: checks, and the same in pieces (two products, the gate) wherever no kernel does it at
// once: on a CPU, in f32, and on a GPU for sizes that leave most of it idle.
#include <utility>

#include "ingot/core/dispatch.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/swiglu/swiglu.h"
#ifdef INGOT_HAS_CUDA_SWIGLU
#include "ingot/kernels/swiglu/gated.h"
#endif

namespace ingot {

#ifdef INGOT_HAS_CUDA_SWIGLU
namespace cuda {
bool gated_linear_is_fused(const GatedLinear& g);
void gated_linear(const GatedLinear& g, Stream stream);
bool gated_dx_is_fused(const GatedGradients& g);
bool gated_dx(const GatedGradients& g, Stream stream);
bool gated_dw(const GatedGradients& g, Stream stream);
}  // namespace cuda
#endif

namespace {

struct Sizes {
  int64_t rows, channels, hidden;
};

void check_matrix(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t cols, DType dtype,
                  Device device) {
  INGOT_CHECK(t.dtype == dtype, op, ": ", name, ": found dtype ", t.dtype, ", expected ", dtype);
  INGOT_CHECK(t.device == device, op, ": ", name, ": found it on ", t.device, ", expected ", device);
  INGOT_CHECK(t.rank() >= 1 && t.rows() == rows && t.cols() == cols, op, ": ", name, ": found ", t.shape, ", expected ",
              rows, " rows of ", cols);
  INGOT_CHECK(t.rows_uniform(), op, ": ", name, ": found rows ", t.shape,
              " that no single stride reaches or whose last stride is not 1, expected row-major with one row stride");
}
void check_bias(const char* op, const char* name, const Tensor& t, int64_t n, DType dtype, Device device) {
  if (!t) return;
  check_matrix(op, name, t, 1, n, dtype, device);
  INGOT_CHECK(t.rank() == 1, op, ": ", name, ": found ", t.shape, ", expected a vector of ", n);
}
void check_options(const char* op, const GateOptions& o) {
  INGOT_CHECK(!o.interleaved, op, ": found interleaved columns, expected two weight matrices (even and odd rows are)");
  INGOT_CHECK(o.limit >= 0, op, ": limit: found ", o.limit, ", expected 0 (no clamp) or more");
  INGOT_CHECK(o.cubic >= 0, op, ": cubic: found ", o.cubic, ", expected 0 or more");
}
void check_weights(const char* op, const Tensor& gate, const Tensor& up, const Sizes& s, bool transposed, DType dtype,
                   Device device) {
  const int64_t rows = transposed ? s.channels : s.hidden, cols = transposed ? s.hidden : s.channels;
  check_matrix(op, "w_gate", gate, rows, cols, dtype, device);
  check_matrix(op, "w_up", up, rows, cols, dtype, device);
}
void check_workspace(const char* op, const Tensor& t, int64_t bytes, Device device) {
  if (bytes == 0) return;
  INGOT_CHECK(t.device == device, op, ": workspace: found it on ", t.device, ", expected ", device);
  INGOT_CHECK(t.dtype == DType::u8 && t.contiguous() && t.numel() >= bytes, op, ": workspace: found ", t.numel(),
              " elements of ", t.dtype, ", expected at least ", bytes, " contiguous bytes");
}
void check(const GatedLinear& g) {
  const char* const op = "gated_linear";
  const Sizes s{g.x.rows(), g.x.cols(), g.transposed ? g.w_gate.cols() : g.w_gate.rows()};
  check_options(op, g.options);
  check_matrix(op, "x", g.x, s.rows, s.channels, g.x.dtype, g.x.device);
  check_weights(op, g.w_gate, g.w_up, s, g.transposed, g.x.dtype, g.x.device);
  check_bias(op, "b_gate", g.b_gate, s.hidden, g.x.dtype, g.x.device);
  check_bias(op, "b_up", g.b_up, s.hidden, g.x.dtype, g.x.device);
  INGOT_CHECK(g.h || g.gate, op, ": found neither h nor gate and up, expected a result");
  INGOT_CHECK(bool(g.gate) == bool(g.up), op, ": found one of gate and up, expected both or neither");
  if (g.h) check_matrix(op, "h", g.h, s.rows, s.hidden, g.x.dtype, g.x.device);
  if (g.gate) check_matrix(op, "gate", g.gate, s.rows, s.hidden, g.x.dtype, g.x.device);
  if (g.gate) check_matrix(op, "up", g.up, s.rows, s.hidden, g.x.dtype, g.x.device);
  check_workspace(op, g.workspace, gated_linear_workspace_bytes(g), g.x.device);
}

int64_t half_bytes(int64_t rows, int64_t hidden, DType dtype) {
  return (rows * hidden * size_of(dtype) + 63) / 64 * 64;
}
Tensor half_of(const Tensor& workspace, int which, int64_t rows, int64_t hidden, DType dtype) {
  return Tensor(static_cast<char*>(workspace.data) + which * half_bytes(rows, hidden, dtype), dtype, {rows, hidden},
                workspace.device);
}

// Behind the halves: room for cuBLASLt, without which it has fewer ways to choose from.
Tensor product_room(const Tensor& workspace, int64_t before) {
  const int64_t begin = (before + 255) / 256 * 256, bytes = linear_workspace_bytes(workspace.device);
  if (bytes == 0) return {};
  return Tensor(static_cast<char*>(workspace.data) + begin, DType::u8, {bytes}, workspace.device);
}
int64_t with_product_room(int64_t before, Device device) {
  const int64_t bytes = linear_workspace_bytes(device);
  return bytes == 0 ? before : (before + 255) / 256 * 256 + bytes;
}

bool is_fused([[maybe_unused]] const GatedLinear& g) {
#ifdef INGOT_HAS_CUDA_SWIGLU
  if (g.x.device.kind == Device::cuda) return cuda::gated_linear_is_fused(g);
#endif
  return false;
}

// Of gate and up, where the caller does not keep them.
int64_t kept_bytes(const GatedLinear& g) {
  return g.gate ? 0 : 2 * half_bytes(g.x.rows(), g.transposed ? g.w_gate.cols() : g.w_gate.rows(), g.x.dtype);
}

// Two products, then the gate.
void in_pieces(const GatedLinear& g, Stream stream) {
  const int64_t hidden = g.transposed ? g.w_gate.cols() : g.w_gate.rows();
  const auto half = [&](const Tensor& kept, int which) {
    return kept ? kept : half_of(g.workspace, which, g.x.rows(), hidden, g.x.dtype);
  };
  const Tensor gate = half(g.gate, 0), up = half(g.up, 1);
  const Tensor room = product_room(g.workspace, kept_bytes(g));
  const auto product = [&](const Tensor& w, const Tensor& b, const Tensor& to) {
    if (g.transposed)
      return matmul({.a = g.x, .b = w, .c = to, .products = g.products, .workspace = room, .bias = b}, stream);
    linear({.x = g.x, .w = w, .b = b, .y = to, .products = g.products, .workspace = room}, stream);
  };
  product(g.w_gate, g.b_gate, gate);
  product(g.w_up, g.b_up, up);
  if (g.h) swiglu_gate({.gate = gate, .up = up, .h = g.h, .options = g.options}, stream);
}

}  // namespace

void gated_linear(const GatedLinear& g, Stream stream) {
  check(g);
#ifdef INGOT_HAS_CUDA_SWIGLU
  if (is_fused(g)) return cuda::gated_linear(g, stream);
#else
  if (g.x.device.kind != Device::cpu) detail::no_cuda("gated_linear", g.x.device);
#endif
  in_pieces(g, stream);
}
int64_t gated_linear_workspace_bytes(const GatedLinear& g) {
  return is_fused(g) ? 0 : with_product_room(kept_bytes(g), g.x.device);
}
int64_t bytes(const GatedLinear& g) {
  return g.x.bytes() + g.w_gate.bytes() + g.w_up.bytes() + g.b_gate.bytes() * bool(g.b_gate) +
         g.b_up.bytes() * bool(g.b_up) + g.h.bytes() * bool(g.h) + (g.gate.bytes() + g.up.bytes()) * bool(g.gate);
}
int64_t flops(const GatedLinear& g) { return 4 * g.x.rows() * g.w_gate.numel(); }

namespace {

struct Gradients {
  Tensor dgate, dup, room;  // room: for their products
  Tensor both, weights;     // where one product gives dx: (T, 2H), of which dgate and dup are halves, and the weights
};

// Weights that are the halves of one matrix, as that: (2H, C), or of `transposed` ones (C, 2H). Else nothing.
Tensor one_matrix(const Tensor& gate, const Tensor& up, bool transposed) {
  const int64_t stride = gate.row_stride(), apart = transposed ? gate.cols() : gate.rows() * stride;
  if (up.row_stride() != stride || up.data != static_cast<char*>(gate.data) + apart * size_of(gate.dtype)) return {};
  Tensor both = gate;
  both.shape.dim[transposed ? 1 : 0] *= 2;
  return both;
}

// Where dx is no product of the core's, and weights lie beside each other, so do the gradients of gate and up: one
// product in place of two, of which the second adds. Not where dh is in the workspace, whose numbers would be
// overwritten before they are read.
Gradients gradients_of(const GatedLinearBackward& g) {
  const int64_t rows = g.dh.rows(), hidden = g.dh.cols(), halves = 2 * half_bytes(rows, hidden, g.dh.dtype);
  const DType dtype = g.dh.dtype;
  Gradients d{half_of(g.workspace, 0, rows, hidden, dtype), half_of(g.workspace, 1, rows, hidden, dtype),
              product_room(g.workspace, halves)};
#ifdef INGOT_HAS_CUDA_SWIGLU
  const ptrdiff_t into = static_cast<char*>(g.dh.data) - static_cast<char*>(g.workspace.data);
  if (g.dh.device.kind != Device::cuda || !g.dx || !g.gate || g.w_gate.rank() != 2 || (0 <= into && into < halves) ||
      hidden * size_of(dtype) % 16 != 0 || (dtype != DType::bf16 && dtype != DType::f16))
    return d;
  if (cuda::gated_dx_is_fused({.dgate = d.dgate, .dup = d.dup, .w_gate = g.w_gate, .w_up = g.w_up, .dx = g.dx}))
    return d;
  d.weights = one_matrix(g.w_gate, g.w_up, g.transposed);
  if (!d.weights) return d;
  d.both = Tensor(g.workspace.data, dtype, {rows, 2 * hidden}, g.dh.device);
  d.dgate = d.both.slice(1, 0, hidden), d.dup = d.both.slice(1, hidden, 2 * hidden);
#endif
  return d;
}

void check(const GatedLinearBackward& g) {
  const char* const op = "gated_linear_backward";
  const DType dtype = g.dh.dtype;
  const Device device = g.dh.device;
  const Sizes s{g.dh.rows(), g.x ? g.x.cols() : g.transposed ? g.w_gate.rows() : g.w_gate.cols(), g.dh.cols()};
  const bool recomputes = !g.gate;
  check_options(op, g.options);
  check_matrix(op, "dh", g.dh, s.rows, s.hidden, dtype, device);
  INGOT_CHECK(bool(g.gate) == bool(g.up), op, ": found one of gate and up, expected both or neither");
  INGOT_CHECK(g.x || !(recomputes || g.dw_gate || g.dw_up), op,
              ": found no x, expected it for dw and to form gate and up");
  INGOT_CHECK((g.w_gate && g.w_up) || !(recomputes || g.dx), op,
              ": found no weights, expected them for dx and to form gate and up");
  if (g.x) check_matrix(op, "x", g.x, s.rows, s.channels, dtype, device);
  if (g.w_gate) check_weights(op, g.w_gate, g.w_up, s, g.transposed, dtype, device);
  if (g.gate) check_matrix(op, "gate", g.gate, s.rows, s.hidden, dtype, device);
  if (g.gate) check_matrix(op, "up", g.up, s.rows, s.hidden, dtype, device);
  if (g.dx) check_matrix(op, "dx", g.dx, s.rows, s.channels, dtype, device);
  const auto sum_type = [&](const Tensor& t) {
    return t.dtype == DType::f32 && dtype != DType::f64 ? DType::f32 : dtype;
  };
  const int64_t rows = g.transposed ? s.channels : s.hidden, cols = g.transposed ? s.hidden : s.channels;
  if (g.dw_gate) check_matrix(op, "dw_gate", g.dw_gate, rows, cols, sum_type(g.dw_gate), device);
  if (g.dw_up) check_matrix(op, "dw_up", g.dw_up, rows, cols, sum_type(g.dw_up), device);
  check_bias(op, "db_gate", g.db_gate, s.hidden, sum_type(g.db_gate), device);
  check_bias(op, "db_up", g.db_up, s.hidden, sum_type(g.db_up), device);
  check_workspace(op, g.workspace, gated_linear_backward_workspace_bytes(s.rows, s.hidden, dtype, device), device);
}

void input_gradient(const GatedLinearBackward& g, const Gradients& d, Stream stream) {
#ifdef INGOT_HAS_CUDA_SWIGLU
  if (g.dh.device.kind == Device::cuda &&
      cuda::gated_dx(
          {.dgate = d.dgate, .dup = d.dup, .w_gate = g.w_gate, .w_up = g.w_up, .dx = g.dx, .transposed = g.transposed},
          stream))
    return;
#endif
  const auto product = [&](const Tensor& of, const Tensor& w, double beta = 0) {
    matmul({.a = of,
            .b = w,
            .c = g.dx,
            .transpose_b = g.transposed,
            .beta = beta,
            .products = g.products,
            .workspace = d.room},
           stream);
  };
  if (d.both) return product(d.both, d.weights);
  product(d.dgate, g.w_gate);
  product(d.dup, g.w_up, 1);
}
void weight_gradients(const GatedLinearBackward& g, const Gradients& d, Stream stream) {
#ifdef INGOT_HAS_CUDA_SWIGLU
  if (g.dh.device.kind == Device::cuda && g.dw_gate && g.dw_up && g.dw_gate.dtype == g.dw_up.dtype &&
      cuda::gated_dw({.dgate = d.dgate,
                      .dup = d.dup,
                      .x = g.x,
                      .dw_gate = g.dw_gate,
                      .dw_up = g.dw_up,
                      .transposed = g.transposed,
                      .overwrite = g.overwrite},
                     stream))
    return;
#endif
  const auto product = [&](const Tensor& of, const Tensor& dw) {
    if (!dw) return;
    matmul({.a = g.transposed ? g.x : of,
            .b = g.transposed ? of : g.x,
            .c = dw,
            .transpose_a = true,
            .beta = g.overwrite ? 0. : 1.,
            .products = g.products,
            .workspace = d.room},
           stream);
  };
  product(d.dgate, g.dw_gate);
  product(d.dup, g.dw_up);
}

}  // namespace

void gated_linear_backward(const GatedLinearBackward& g, Stream stream) {
  check(g);
#ifndef INGOT_HAS_CUDA_SWIGLU
  if (g.dh.device.kind != Device::cpu) detail::no_cuda("gated_linear_backward", g.dh.device);
#endif
  const Gradients d = gradients_of(g);
  Tensor gate = g.gate, up = g.up;
  if (!gate) {
    INGOT_CHECK(g.dh.data != d.dup.data,
                "gated_linear_backward: found dh in the workspace without gate and up, expected ",
                "memory of its own: they are formed there");
    gate = d.dgate, up = d.dup;
    gated_linear({.x = g.x,
                  .w_gate = g.w_gate,
                  .w_up = g.w_up,
                  .b_gate = g.b_gate,
                  .b_up = g.b_up,
                  .gate = gate,
                  .up = up,
                  .workspace = d.room,
                  .options = g.options,
                  .transposed = g.transposed,
                  .products = g.products},
                 stream);
  }
  swiglu_gate_backward({.gate = gate, .up = up, .dh = g.dh, .dgate = d.dgate, .dup = d.dup, .options = g.options},
                       stream);
  if (g.dx) input_gradient(g, d, stream);
  weight_gradients(g, d, stream);
  for (const auto& [of, db] : {std::pair(d.dgate, g.db_gate), std::pair(d.dup, g.db_up)}) {
    if (!db) continue;
    if (g.overwrite && db.device.kind == Device::cuda) {
      const gpu::DeviceGuard guard(db.device.index);  // whose default stream it is, where none is given
      gpu::fill_bytes(db.data, 0, db.bytes(), stream);
    }
    if (g.overwrite && db.device.kind == Device::cpu) fill_zero(db);
    linear_backward({.dy = of, .db = db, .products = g.products}, stream);
  }
}
int64_t gated_linear_backward_workspace_bytes(int64_t rows, int64_t hidden, DType dtype, Device device) {
  return with_product_room(2 * half_bytes(rows, hidden, dtype), device);
}

}  // namespace ingot
