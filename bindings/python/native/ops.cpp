// The module ingot._C: Ingot's operations on torch.Tensor objects whose memory the caller has allocated. Shapes, dtypes
// and devices are checked by the operations themselves; allocation, autograd and registration are in ingot/*.py. Ops
// whose call is a list of arguments stand in declared.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "calls.h"
#include "declare.h"
#include "edge.h"
#include "engine.h"
#include "ingot/core/check.h"
#include "ingot/core/version.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/mlp/mlp.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/swiglu/swiglu.h"
#include "tensors.h"
#include "training.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ingot::python {
namespace {

// Operands with fully mergeable rows take the (T, H, C) shape of an operand without.
void share_shape(std::initializer_list<Tensor*> operands) {
  const Tensor* split = nullptr;
  for (const Tensor* t : operands)
    if (t->rank() == 3) split = t;
  if (split == nullptr) return;
  const int64_t tokens = split->size(0), heads = split->size(1);
  for (Tensor* t : operands) {
    if (t->rank() != 2 || t->size(0) != tokens * heads) continue;
    Tensor s = *t;
    s.shape = {tokens, heads, t->size(1)};
    s.stride[0] = heads * t->stride[0];
    s.stride[1] = t->stride[0];
    s.stride[2] = t->stride[1];
    *t = s;
  }
}

// --- rms_norm --------------------------------------------------------------------------------------------------------

void rms_norm(nb::handle x, nb::handle w, nb::handle residual, nb::handle sum, nb::handle y, nb::handle rstd,
              double eps, bool unit_offset) {
  const char* op = "rms_norm";
  RmsNorm a{.x = floats(op, "x", view(op, "x", x, 3)),
            .w = vector(op, "weight", w),
            .residual = view(op, "residual", residual, 3),
            .sum = view(op, "sum", sum, 3),
            .y = view(op, "y", y, 3),
            .rstd = vector(op, "rstd", rstd),
            .eps = eps,
            .unit_offset = unit_offset};
  if (a.x.cols() == 0) return;
  share_shape({&a.x, &a.residual, &a.sum, &a.y});
  const Stream stream = stream_of(a.x);
  unlocked([&] { rmsnorm(a, stream); });
}

int64_t rms_norm_backward_workspace_bytes(nb::handle x) {
  const Tensor t = view("rms_norm_backward", "x", x, 3);
  return rmsnorm_backward_workspace_bytes(t.rows(), t.cols(), t.dtype, t.device);
}

void rms_norm_backward(nb::handle dy, nb::handle s, nb::handle w, nb::handle rstd, nb::handle dsum, nb::handle dx,
                       nb::handle dw, nb::handle workspace, double eps, bool unit_offset) {
  const char* op = "rms_norm_backward";
  RmsNormBackward a{.dy = view(op, "dy", dy, 3),
                    .s = view(op, "s", s, 3),
                    .w = vector(op, "weight", w),
                    .rstd = vector(op, "rstd", rstd),
                    .dsum = view(op, "dsum", dsum, 3),
                    .dx = view(op, "dx", dx, 3),
                    .dw = vector(op, "dw", dw),
                    .workspace = vector(op, "workspace", workspace),
                    .eps = eps,
                    .unit_offset = unit_offset};
  if (a.s.cols() == 0) return;
  share_shape({&a.dy, &a.s, &a.dsum, &a.dx});
  const Stream stream = stream_of(a.s);
  unlocked([&] { rmsnorm_backward(a, stream); });
}

// --- mlp -------------------------------------------------------------------------------------------------------------

// `parameters` holds, layer after layer, the weight, then the bias if there are biases, then the gain if the weights
// are normalised.
struct MlpOptions {
  bool bias, weight_norm;
  int act;
  bool activate_last;
};
std::vector<MlpLayer> layers_of(const char* op, nb::sequence parameters, const MlpOptions& o) {
  const size_t each = 1 + o.bias + o.weight_norm, count = nb::len(parameters);
  INGOT_CHECK(count > 0 && count % each == 0, op, ": parameters: found ", count, " tensors, expected ", each,
              " for every layer");
  std::vector<MlpLayer> layers(count / each);
  size_t i = 0;
  for (MlpLayer& layer : layers) {
    Sizes sizes;
    INGOT_CHECK(dense_matrix(op, "weight", nb::object(parameters[i++]), layer.w, &sizes) && sizes.rank == 2, op,
                ": weight: found ", sizes.rank, " dimensions, expected 2, contiguous");
    if (o.bias) layer.b = vector(op, "bias", nb::object(parameters[i++]));
    if (o.weight_norm) layer.g = vector(op, "gain", nb::object(parameters[i++]));
  }
  return layers;
}

// `gradients` is a zeroed buffer with the parameters' gradients in order; `wanted` lists the parameters with a place in
// the buffer.
void run_mlp_backward(nb::handle dy, nb::handle x, nb::handle dx, nb::sequence parameters, nb::handle gradients,
                      const std::vector<bool>& wanted, bool bias, bool weight_norm, int act, bool activate_last,
                      nb::handle saved) {
  const char* op = "mlp_backward";
  MlpBackward a{.dy = matrix(op, "dy", dy),
                .x = matrix(op, "x", x),
                .dx = matrix(op, "dx", dx),
                .layers = layers_of(op, parameters, {bias, weight_norm, act, activate_last}),
                .act = Act(act),
                .activate_last = activate_last,
                .saved = vector(op, "saved", saved)};
  INGOT_CHECK_EQ(wanted.size(), nb::len(parameters), op, ": length of wanted");
  const Tensor flat = vector(op, "gradients", gradients);
  a.grads.resize(a.layers.size());
  int64_t at = 0;
  size_t i = 0;
  auto place = [&](const Tensor& parameter) {
    if (!wanted[i++]) return Tensor{};
    Tensor t(static_cast<char*>(flat.data) + at * size_of(flat.dtype), flat.dtype, parameter.shape, flat.device);
    at += parameter.numel();
    INGOT_CHECK_LE(at, flat.numel(), op, ": elements of gradients");
    return t;
  };
  for (size_t l = 0; l < a.layers.size(); ++l) {
    a.grads[l].w = place(a.layers[l].w);
    if (bias) a.grads[l].b = place(a.layers[l].b);
    if (weight_norm) a.grads[l].g = place(a.layers[l].g);
  }
  nb::object workspace;
  if (const int64_t bytes = mlp_backward_workspace_bytes(a))
    workspace = empty_vector(x, a.x.device, DType::u8, bytes, a.workspace);
  const Stream stream = stream_of(a.x);
  unlocked([&] { mlp_backward(a, stream); });
}

// --- gated units -----------------------------------------------------------------------------------------------------

// The order of gate and up in a (T, 2H) tensor; kSeparate: two tensors.
enum Order : int { kGateFirst = 0, kGateSecond = 1, kInterleaved = 2, kSeparate = 3 };

struct GatePair {
  Tensor gate, up;
};
GatePair gate_pair(const char* op, const char* name, nb::handle packed, nb::handle up, int order) {
  const Tensor t = floats(op, name, matrix(op, name, packed));
  if (order == kSeparate) return {t, matrix(op, "up", up)};
  if (order == kInterleaved || !t) return {t, {}};
  INGOT_CHECK(order == kGateFirst || order == kGateSecond, op, ": order: found ", order, ", expected 0 to 3");
  INGOT_CHECK(t.cols() % 2 == 0, op, ": ", name, ": found ", t.cols(), " columns, expected an even number");
  const Tensor first = t.slice(1, 0, t.cols() / 2), second = t.slice(1, t.cols() / 2, t.cols());
  if (order == kGateFirst) return {first, second};
  return {second, first};
}
GateOptions gate_options(int order, double limit, double alpha, double up_offset, double cubic) {
  return {.limit = limit, .alpha = alpha, .up_offset = up_offset, .interleaved = order == kInterleaved, .cubic = cubic};
}

void gate(nb::handle packed, nb::handle up, nb::handle h, int order, double limit, double alpha, double up_offset,
          double cubic) {
  const GatePair in = gate_pair("swiglu_gate", order == kSeparate ? "gate" : "packed", packed, up, order);
  const SwigluGate a{in.gate, in.up, matrix("swiglu_gate", "h", h),
                     gate_options(order, limit, alpha, up_offset, cubic)};
  const Stream stream = stream_of(a.h);
  unlocked([&] { swiglu_gate(a, stream); });
}
void gate_backward(nb::handle dh, nb::handle packed, nb::handle up, nb::handle dpacked, nb::handle dup, int order,
                   double limit, double alpha, double up_offset, double cubic) {
  const char* op = "swiglu_gate_backward";
  const GatePair in = gate_pair(op, "packed", packed, up, order), out = gate_pair(op, "dpacked", dpacked, dup, order);
  const SwigluGateBackward a{in.gate,  in.up,  matrix(op, "dh", dh),
                             out.gate, out.up, gate_options(order, limit, alpha, up_offset, cubic)};
  const Stream stream = stream_of(a.dh);
  unlocked([&] { swiglu_gate_backward(a, stream); });
}

// --- gated linear: both projections and the gate ---------------------------------------------------------------------

// The rows of packed weights that belong to gate and up: halves, or even and odd rows; of (C, 2H), halves of the
// columns. Or gate and up are two tensors.
GatePair weight_pair(const char* op, const char* name, nb::handle packed, nb::handle up, int order, bool columns) {
  if (packed.is_none()) return {};
  const Tensor t = floats(op, name, matrix(op, name, packed));
  if (order == kSeparate) return {t, matrix(op, "up", up)};
  const int64_t both = t.size(columns ? 1 : 0);
  INGOT_CHECK(order >= kGateFirst && order <= kInterleaved, op, ": order: found ", order, ", expected 0 to 3");
  INGOT_CHECK(both % 2 == 0, op, ": ", name, ": found ", both, columns ? " columns" : " rows",
              ", expected an even number");
  if (order == kInterleaved) {
    INGOT_CHECK(!columns, op, ": order: found interleaved columns of ", name, ", expected halves");
    Tensor even(t.data, t.dtype, {both / 2, t.cols()}, t.device);
    even.stride[0] = 2 * t.row_stride();
    Tensor odd = even;
    odd.data = static_cast<char*>(t.data) + t.row_stride() * size_of(t.dtype);
    return {even, odd};
  }
  const Tensor first = t.slice(columns ? 1 : 0, 0, both / 2), second = t.slice(columns ? 1 : 0, both / 2, both);
  if (order == kGateFirst) return {first, second};
  return {second, first};
}
GatePair bias_pair(const char* op, const char* name, nb::handle packed, nb::handle up, int order) {
  const Tensor t = vector(op, name, packed);
  if (order == kSeparate) return {t, vector(op, "up_bias", up)};
  if (!t) return {};
  INGOT_CHECK(order != kInterleaved && t.numel() % 2 == 0, op, ": ", name, ": found ", t.numel(),
              " elements, expected the halves of gate and up");
  const Tensor first = t.slice(0, 0, t.numel() / 2), second = t.slice(0, t.numel() / 2, t.numel());
  if (order == kGateFirst) return {first, second};
  return {second, first};
}

// Gate and up in the form kept for the backward pass, or their gradients: the halves of a tensor, in the order of the
// halves of the weights.
GatePair kept_pair(const char* op, nb::handle kept, int order) {
  return gate_pair(op, "kept", kept, nb::none(), order == kGateSecond ? kGateSecond : kGateFirst);
}

void gated(nb::handle x, nb::handle w, nb::handle w_up, nb::handle b, nb::handle b_up, nb::handle h, nb::handle kept,
           int order, bool columns, double limit, double alpha, double up_offset, double cubic) {
  const char* op = "gated_linear";
  const GatePair weights = weight_pair(op, "w", w, w_up, order, columns), bias = bias_pair(op, "bias", b, b_up, order),
                 halves = kept_pair(op, kept, order);
  GatedLinear a{.x = floats(op, "x", matrix(op, "x", x)),
                .w_gate = weights.gate,
                .w_up = weights.up,
                .b_gate = bias.gate,
                .b_up = bias.up,
                .h = matrix(op, "h", h),
                .gate = halves.gate,
                .up = halves.up,
                .options = gate_options(kGateFirst, limit, alpha, up_offset, cubic),
                .transposed = columns};
  nb::object workspace;
  if (const int64_t bytes = gated_linear_workspace_bytes(a))
    workspace = empty_vector(x, a.x.device, DType::u8, bytes, a.workspace);
  const Stream stream = stream_of(a.x);
  unlocked([&] { gated_linear(a, stream); });
}
// If dh is None, `kept` holds the gradients of gate and up.
void gated_backward(nb::handle dh, nb::handle x, nb::handle w, nb::handle w_up, nb::handle b, nb::handle b_up,
                    nb::handle kept, nb::handle dx, nb::handle dw, nb::handle dw_up, nb::handle db, nb::handle db_up,
                    int order, bool columns, double limit, double alpha, double up_offset, double cubic) {
  const char* op = "gated_linear_backward";
  const GatePair weights = weight_pair(op, "w", w, w_up, order, columns),
                 d_weights = weight_pair(op, "dw", dw, dw_up, order, columns),
                 bias = bias_pair(op, "bias", b, b_up, order), d_bias = bias_pair(op, "db", db, db_up, order),
                 halves = kept_pair(op, kept, order);
  GatedLinearBackward a{.dh = matrix(op, "dh", dh),
                        .x = matrix(op, "x", x),
                        .w_gate = weights.gate,
                        .w_up = weights.up,
                        .gate = halves.gate,
                        .up = halves.up,
                        .b_gate = bias.gate,
                        .b_up = bias.up,
                        .dx = matrix(op, "dx", dx),
                        .dw_gate = d_weights.gate,
                        .dw_up = d_weights.up,
                        .db_gate = d_bias.gate,
                        .db_up = d_bias.up,
                        .options = gate_options(kGateFirst, limit, alpha, up_offset, cubic),
                        .transposed = columns,
                        .overwrite = true};
  nb::object workspace;
  if (const int64_t bytes = gated_linear_backward_workspace_bytes(a))
    workspace = empty_vector(x, a.x.device, DType::u8, bytes, a.workspace);
  const Stream stream = stream_of(a.x);
  unlocked([&] { gated_linear_backward(a, stream); });
}

// --- rotary embedding ------------------------------------------------------------------------------------------------

void fill_rope_table(nb::handle cos, nb::handle sin, double base, const std::string& scaling, double factor,
                     double original_context, double beta_fast, double beta_slow, bool truncate,
                     double attention_factor) {
  const char* op = "rope_table";
  RopeScaling s{.factor = factor,
                .original_context = original_context,
                .beta_fast = beta_fast,
                .beta_slow = beta_slow,
                .truncate = truncate,
                .attention_factor = attention_factor};
  INGOT_CHECK(scaling == "none" || scaling == "ntk" || scaling == "yarn", op, ": scaling: found ", scaling,
              ", expected none, ntk or yarn");
  s.kind = scaling == "ntk" ? RopeScaling::ntk : scaling == "yarn" ? RopeScaling::yarn : RopeScaling::none;
  const Tensor c = matrix(op, "cos", cos);
  rope_table(rope_frequencies(2 * c.cols(), base, s), c, matrix(op, "sin", sin));
}

// --- activations -----------------------------------------------------------------------------------------------------

std::vector<std::string> activation_names() {
  std::vector<std::string> names;
  for_each_activation([&](auto f) { names.emplace_back(f.name); });
  return names;
}

// --- errors ----------------------------------------------------------------------------------------------------------

// An invalid argument is a ValueError; a kernel missing in this build or machine is a NotImplementedError, a subclass
// of RuntimeError; every further error is a RuntimeError.
PyObject* exception_type(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::usage: return PyExc_ValueError;
    case ErrorCode::unsupported: return PyExc_NotImplementedError;
    default: return PyExc_RuntimeError;
  }
}
void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const Error& e) { PyErr_SetString(exception_type(e.code), e.what()); }
}

bool built_with_cuda() {
#ifdef INGOT_CUDA_BUILD
  return true;
#else
  return false;
#endif
}

// Every argument may be None, which means that the operand is absent.
template <size_t... I, class... Arguments, class Result>
void define(nb::module_& m, const char* name, Result (*f)(Arguments...), std::index_sequence<I...>) {
  m.def(name, f, (void(I), nb::arg().none())...);
}
template <class... Arguments, class Result> void define(nb::module_& m, const char* name, Result (*f)(Arguments...)) {
  define(m, name, f, std::index_sequence_for<Arguments...>{});
}

}  // namespace
}  // namespace ingot::python

NB_MODULE(_C, m) {
  using namespace ingot::python;
  nb::register_exception_translator(translate, nullptr);
  nb::set_leak_warnings(false);  // modules alive at the interpreter's end are no leak
  m.attr("version") = ingot::version();
  m.attr("commit") = ingot::commit();
  m.attr("cuda") = built_with_cuda();
  m.attr("DISPATCH") = int(kDispatch);
  m.attr("PLAIN") = int(kPlain);
  m.attr("DIFFERENTIATE") = int(kDifferentiate);
  m.def("attach", &attach);
  m.def("route", nb::overload_cast<nb::args>(&route));
  m.def("use_ways", &use_ways);
  m.def("has_exchange", &has_exchange);
  m.def("has_symbols", &has_symbols);
  m.def("device_count", &ingot::gpu::device_count);

  define(m, "rms_norm", &rms_norm);
  m.def("rms_norm_backward_workspace_bytes", &rms_norm_backward_workspace_bytes);
  define(m, "rms_norm_backward", &rms_norm_backward);
  m.def("mlp", &mlp_dense);
  define(m, "mlp_backward", &run_mlp_backward);
  define(m, "rms_norm_call", &rms_norm_call);
  m.def("rms_norm_of_module", &rms_norm_of_module);
  define(m, "rms_norm_forward", &rms_norm_forward);
  m.def("mlp_call", &mlp_call);
  m.def("mlp_of_module", &mlp_of_module);
  m.def("module_call", &module_call);
  m.def("mlp_forward", &mlp_forward);
  m.def("mlp_edge_forward", &mlp_edge_forward);
  nb::class_<Edge>(m, "Edge").def(nb::init<>()).def("__reduce__", [](nb::handle self) {
    return nb::make_tuple(self.type(), nb::tuple());
  });
  m.def("attach_edges", &attach_edges);
  m.def("forget_edges", &forget_edges);
  m.def("attach_calls", &attach_calls);
  m.def("attach_modules", &attach_modules);
  m.def("quick_class", &quick_class);
  m.attr("BIAS") = int(kBias);
  m.attr("WEIGHT_NORM") = int(kWeightNorm);
  m.attr("ACTIVATE_LAST") = int(kActivateLast);
  m.attr("SAVE") = int(kSave);
  define(m, "swiglu_gate", &gate);
  define(m, "swiglu_gate_backward", &gate_backward);
  define(m, "gated_linear", &gated);
  define(m, "gated_linear_backward", &gated_backward);
  declare_ops(m);
  m.def("rope_table", &fill_rope_table);
  define(m, "wide_mlp", &run_wide_mlp);
  define(m, "wide_mlp_backward", &run_wide_mlp_backward);
  m.def("activation_names", &activation_names);
#ifndef INGOT_WITHOUT_ENGINE
  define_engine(m);
#endif
}
