// gated_linear and its backward pass: checks, and the computation in pieces (two products, the gate) for the cases
// without a single kernel: on a CPU, in f32, and on a GPU for sizes that leave most of the GPU idle.
#include "ingot/core/dispatch.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/swiglu/swiglu.h"
#include "ingot/kernels/swiglu/workspace.h"
#ifdef INGOT_HAS_CUDA_SWIGLU
#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/generation.h"
#include "ingot/kernels/swiglu/gated.h"
#endif

namespace ingot {

#ifdef INGOT_HAS_CUDA_SWIGLU
namespace cuda {
bool gated_linear_is_fused(const GatedLinear& g);
void gated_linear(const GatedLinear& g, Stream stream);
bool gated_dx_is_fused(const GatedGradients& g);
bool gated_dw_is_fused(const GatedGradients& g);
void gated_dx(const GatedGradients& g, Stream stream);
void gated_dw(const GatedGradients& g, Stream stream);
}  // namespace cuda
#endif

namespace {

using detail::half_bytes;
using detail::half_of;
using detail::product_room;
using detail::with_product_room;

void check_device(const char* op, Device device) {
  if (device.kind == Device::cpu) return;
#ifdef INGOT_HAS_CUDA_SWIGLU
  gpu::check_generation(op, gpu::device_limits(device));
#else
  detail::no_cuda(op, device);
#endif
}

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

bool is_fused([[maybe_unused]] const GatedLinear& g) {
#ifdef INGOT_HAS_CUDA_SWIGLU
  if (g.x.device.kind == Device::cuda) return cuda::gated_linear_is_fused(g);
#endif
  return false;
}

// Memory for gate and up, where the caller does not keep gate and up.
int64_t kept_bytes(const GatedLinear& g) {
  return g.gate ? 0 : 2 * half_bytes(g.x.rows(), g.transposed ? g.w_gate.cols() : g.w_gate.rows(), g.x.dtype);
}

// Computes two products, then the gate.
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
  check_device("gated_linear", g.x.device);
#ifdef INGOT_HAS_CUDA_SWIGLU
  if (is_fused(g)) return cuda::gated_linear(g, stream);
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

// Joins two matrices, or vectors, if the second begins where the first ends, below (axis 0) or beside the first (axis
// 1). Otherwise returns nothing.
Tensor one_of(const Tensor& first, const Tensor& second, int axis) {
  const int rank = first.rank();
  if (rank < 1 + axis || rank > 2 || second.rank() != rank || second.dtype != first.dtype) return {};
  const int64_t stride = first.row_stride(), apart = axis == 0 ? first.rows() * stride : first.cols();
  if (second.row_stride() != stride || (axis == 1 && stride < 2 * first.cols())) return {};
  if (second.data != static_cast<char*>(first.data) + apart * size_of(first.dtype)) return {};
  Tensor both = first;
  both.shape.dim[axis] *= 2;
  return both;
}

// Pairs stored as halves of a single tensor each, all in the same order: (2H, C) or, transposed, (C, 2H); of biases
// (2H).
struct Joined {
  Tensor weights, dw, db;
};
Joined joined(const GatedLinearBackward& g, bool up_first) {
  const auto one = [&](const Tensor& gate, const Tensor& up, int axis) {
    return up_first ? one_of(up, gate, axis) : one_of(gate, up, axis);
  };
  const int axis = g.transposed ? 1 : 0;
  return {one(g.w_gate, g.w_up, axis), one(g.dw_gate, g.dw_up, axis), one(g.db_gate, g.db_up, 0)};
}

struct Gradients {
  Tensor gate, up;  // dgate, dup
  Tensor room;      // for products
  Tensor both;      // (T, 2H), whose halves are gate and up in the order of the joined weights: then a single product
                    // instead of two
  Joined with;
};

#ifdef INGOT_HAS_CUDA_SWIGLU
cuda::GatedGradients on_core(const GatedLinearBackward& g, const Gradients& d) {
  return {.dgate = d.gate,
          .dup = d.up,
          .x = g.x,
          .w_gate = g.w_gate,
          .w_up = g.w_up,
          .dx = g.dx,
          .dw_gate = g.dw_gate,
          .dw_up = g.dw_up,
          .transposed = g.transposed,
          .overwrite = g.overwrite};
}
bool dx_is_on_core(const GatedLinearBackward& g, const Gradients& d) {
  return d.gate.device.kind == Device::cuda && cuda::gated_dx_is_fused(on_core(g, d));
}
bool dw_is_on_core(const GatedLinearBackward& g, const Gradients& d) {
  return d.gate.device.kind == Device::cuda && cuda::gated_dw_is_fused(on_core(g, d));
}
#else
bool dx_is_on_core(const GatedLinearBackward&, const Gradients&) { return false; }
bool dw_is_on_core(const GatedLinearBackward&, const Gradients&) { return false; }
#endif

// The gradients of gate and up where the caller has computed them.
Gradients formed_gradients(const GatedLinearBackward& g) {
  Gradients d{.gate = g.gate, .up = g.up, .room = product_room(g.workspace, 0)};
  for (bool up_first : {false, true}) {
    if (d.both) break;
    d.both = up_first ? one_of(g.up, g.gate, 1) : one_of(g.gate, g.up, 1);
    if (d.both) d.with = joined(g, up_first);
  }
  return d;
}
// The gradients in the workspace: adjacent where a single product can then replace two on a GPU.
Gradients gradients_of(const GatedLinearBackward& g) {
  if (!g.dh) return formed_gradients(g);
  const int64_t rows = g.dh.rows(), hidden = g.dh.cols();
  const DType dtype = g.dh.dtype;
  Gradients d{.gate = half_of(g.workspace, 0, rows, hidden, dtype),
              .up = half_of(g.workspace, 1, rows, hidden, dtype),
              .room = product_room(g.workspace, 2 * half_bytes(rows, hidden, dtype))};
  if (g.dh.device.kind != Device::cuda || hidden * size_of(dtype) % 16 != 0) return d;
  const bool dx = g.dx && !dx_is_on_core(g, d), dw = (g.dw_gate || g.dw_up) && !dw_is_on_core(g, d);
  for (bool up_first : {false, true}) {
    const Joined with = joined(g, up_first);
    if (!(dx && with.weights) && !(dw && with.dw)) continue;
    d.both = Tensor(g.workspace.data, dtype, {rows, 2 * hidden}, g.dh.device), d.with = with;
    const Tensor first = d.both.slice(1, 0, hidden), second = d.both.slice(1, hidden, 2 * hidden);
    d.gate = up_first ? second : first, d.up = up_first ? first : second;
    break;
  }
  return d;
}

Device device_of(const GatedLinearBackward& g) { return g.dh ? g.dh.device : g.gate.device; }

void check(const GatedLinearBackward& g) {
  const char* const op = "gated_linear_backward";
  INGOT_CHECK(bool(g.gate) == bool(g.up), op, ": found one of gate and up, expected both or neither");
  INGOT_CHECK(g.dh || g.gate, op, ": found neither dh nor gate and up, expected dh, or dgate and dup as gate and up");
  const Tensor& like = g.dh ? g.dh : g.gate;
  const DType dtype = like.dtype;
  const Device device = like.device;
  const Sizes s{like.rows(), g.x ? g.x.cols() : g.transposed ? g.w_gate.rows() : g.w_gate.cols(), like.cols()};
  const bool recomputes = !g.gate;
  check_options(op, g.options);
  if (g.dh) check_matrix(op, "dh", g.dh, s.rows, s.hidden, dtype, device);
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
  check_workspace(op, g.workspace, gated_linear_backward_workspace_bytes(g), device);
}

void form_gradients(const GatedLinearBackward& g, const Gradients& d, Stream stream) {
  const bool recomputes = !g.gate;
  const Tensor gate = recomputes ? d.gate : g.gate, up = recomputes ? d.up : g.up;
  if (recomputes)
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
  swiglu_gate_backward({.gate = gate, .up = up, .dh = g.dh, .dgate = d.gate, .dup = d.up, .options = g.options},
                       stream);
}
void input_gradient(const GatedLinearBackward& g, const Gradients& d, Stream stream) {
#ifdef INGOT_HAS_CUDA_SWIGLU
  if (dx_is_on_core(g, d)) return cuda::gated_dx(on_core(g, d), stream);
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
  if (d.both && d.with.weights) return product(d.both, d.with.weights);
  product(d.gate, g.w_gate);
  product(d.up, g.w_up, 1);
}
void weight_gradients(const GatedLinearBackward& g, const Gradients& d, Stream stream) {
#ifdef INGOT_HAS_CUDA_SWIGLU
  if (dw_is_on_core(g, d)) return cuda::gated_dw(on_core(g, d), stream);
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
  if (d.both && d.with.dw) return product(d.both, d.with.dw);
  product(d.gate, g.dw_gate);
  product(d.up, g.dw_up);
}
void bias_gradients(const GatedLinearBackward& g, const Gradients& d, Stream stream) {
  const auto sums = [&](const Tensor& of, const Tensor& db) {
    if (!db) return;
    if (g.overwrite && db.device.kind == Device::cuda) {
      const gpu::DeviceGuard guard(db.device.index);  // the device of the default stream, where no stream is given
      gpu::fill_bytes(db.data, 0, db.bytes(), stream);
    }
    if (g.overwrite && db.device.kind == Device::cpu) fill_zero(db);
    linear_backward({.dy = of, .db = db, .products = g.products}, stream);
  };
  if (d.both && d.with.db) return sums(d.both, d.with.db);
  sums(d.gate, g.db_gate);
  sums(d.up, g.db_up);
}

}  // namespace

void gated_linear_backward(const GatedLinearBackward& g, Stream stream) {
  check(g);
  check_device("gated_linear_backward", device_of(g));
  const Gradients d = gradients_of(g);
  if (g.dh) form_gradients(g, d, stream);
  if (g.dx) input_gradient(g, d, stream);
  weight_gradients(g, d, stream);
  bias_gradients(g, d, stream);
}
int64_t gated_linear_backward_workspace_bytes(const GatedLinearBackward& g) {
  const int64_t gradients = g.dh ? 2 * half_bytes(g.dh.rows(), g.dh.cols(), g.dh.dtype) : 0;
  return with_product_room(gradients, device_of(g));
}

}  // namespace ingot
