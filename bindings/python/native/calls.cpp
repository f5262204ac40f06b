// What a module does in one step, for operands as they usually are: plain dense tensors that nobody watches. Everything
// else goes back to Python (_ops.py).
#include "calls.h"

#include <cfloat>
#include <vector>

#include "ingot/core/check.h"
#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/mlp/mlp.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "tensors.h"

namespace ingot::python {
namespace {

struct PythonSide {
  PyObject *rms_norm_apply, *rms_norm_run, *rms_norm_save, *mlp_apply, *mlp_run, *any_autocast;
  // names
  PyObject *save_for_backward, *options, *parameters, *modules, *layers, *weight, *bias, *gain, *eps, *unit_offset,
      *module_options, *one_vector;
} python_;
using Objects = std::vector<nb::object>;

template <class... A> nb::object call(PyObject* f, A... arguments) {
  PyObject* values[] = {nullptr, nb::handle(arguments).ptr()...};
  PyObject* result = PyObject_Vectorcall(f, values + 1, sizeof...(A) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}
void set(nb::handle object, PyObject* name, nb::handle value) {
  if (PyObject_SetAttr(object.ptr(), name, value.ptr()) != 0) throw nb::python_error();
}
double number(nb::handle h) {
  const double value = PyFloat_AsDouble(h.ptr());
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}
DType sum_dtype(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }
// The same memory seen with another address: outputs have the shape of an operand.
Tensor at(Tensor like, void* data) {
  like.data = data;
  return like;
}
template <class Op> void unlocked(Op&& op) {
  nb::gil_scoped_release release;
  op();
}

nb::object attribute_of(nb::handle h, PyObject* name) {
  PyObject* value = PyObject_GetAttr(h.ptr(), name);
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}
// An entry of a dictionary, borrowed; not valid where there is none.
nb::handle entry(nb::handle dictionary, PyObject* key) {
  if (!PyDict_Check(dictionary.ptr())) return {};
  PyObject* found = PyDict_GetItemWithError(dictionary.ptr(), key);
  if (found == nullptr && PyErr_Occurred()) throw nb::python_error();
  return found;
}

// --- rms_norm --------------------------------------------------------------------------------------------------------

// Up to this many elements backward forms rstd again, which costs a GPU nothing that shows; keeping it costs the host
// an allocation, a sixth of the call.
constexpr int64_t kRecomputeRstd = 1 << 20;

// x, weight, eps and unit_offset of `a`; false where rows are not dense, or empty.
bool describe_rms_norm(nb::handle x, nb::handle w, nb::handle eps, nb::handle unit_offset, RmsNorm& a) {
  const char* op = "rms_norm";
  if (!dense_matrix(op, "x", x, a.x) || a.x.numel() == 0) return false;
  if (!w.is_none() && !dense_vector(op, "weight", w, a.w)) return false;
  a.eps = eps.is_none() ? (a.x.dtype == DType::f64 ? DBL_EPSILON : FLT_EPSILON) : number(eps);
  a.unit_offset = PyObject_IsTrue(unit_offset.ptr()) == 1;
  return true;
}

}  // namespace

nb::object rms_norm_call(nb::handle x, nb::handle w, nb::handle eps, nb::handle unit_offset) {
  switch (route({x, w})) {
    case kDispatch: return nb::none();
    case kDifferentiate: return call(python_.rms_norm_apply, x, w, eps, unit_offset);
    default: break;
  }
  RmsNorm a;
  if (!describe_rms_norm(x, w, eps, unit_offset, a)) return call(python_.rms_norm_run, x, w, eps, unit_offset);
  nb::object y = empty_like(x);
  a.y = at(a.x, address("rms_norm", "y", y));
  const Stream stream = stream_of(a.x);
  unlocked([&] { rmsnorm(a, stream); });
  return y;
}

nb::object rms_norm_of_module(nb::handle x, nb::handle attributes) {
  const nb::handle parameters = entry(attributes, python_.parameters);
  const nb::handle weight = parameters.is_valid() ? entry(parameters, python_.weight) : nb::handle();
  if (!weight.is_valid() || weight.is_none()) return nb::none();
  const nb::object held = nb::borrow(weight);  // another thread may replace it meanwhile
  const nb::handle eps = entry(attributes, python_.eps), unit_offset = entry(attributes, python_.unit_offset);
  if (!eps.is_valid() || !unit_offset.is_valid()) return nb::none();
  if (entry(attributes, python_.one_vector).ptr() != Py_True) return nb::none();
  return rms_norm_call(x, held, eps, unit_offset);
}

nb::object rms_norm_forward(nb::handle ctx, nb::handle x, nb::handle w, nb::handle eps, nb::handle unit_offset) {
  RmsNorm a;
  nb::object y, rstd = nb::none();
  if (describe_rms_norm(x, w, eps, unit_offset, a)) {
    y = empty_like(x);
    a.y = at(a.x, address("rms_norm", "y", y));
    if (a.x.numel() > kRecomputeRstd) {
      rstd = empty_vector(x, a.x.rows(), sum_dtype(a.x.dtype));
      a.rstd = Tensor(address("rms_norm", "rstd", rstd), sum_dtype(a.x.dtype), {a.x.rows()}, a.x.device);
    }
    const Stream stream = stream_of(a.x);
    unlocked([&] { rmsnorm(a, stream); });
  } else {
    const nb::object pair = call(python_.rms_norm_save, x, w, eps, unit_offset);
    y = pair[0], rstd = pair[1];
  }
  PyObject* saved[] = {ctx.ptr(), x.ptr(), w.ptr(), rstd.ptr()};
  nb::steal(PyObject_VectorcallMethod(python_.save_for_backward, saved, 4, nullptr));
  if (PyErr_Occurred()) throw nb::python_error();
  set(ctx, python_.options, nb::make_tuple(eps, unit_offset));
  return y;
}

// --- mlp -------------------------------------------------------------------------------------------------------------

namespace {

int options_of(nb::handle h) {
  const long value = PyLong_AsLong(h.ptr());
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return int(value);
}

// x and layers of `a`; false where an operand is not dense, or the CPU has no form for its type.
bool describe_mlp(nb::handle x, const Objects& parameters, int options, Mlp& a) {
  const char* op = "mlp";
  const bool bias = options & kBias, gain = options & kWeightNorm;
  const size_t each = 1 + bias + gain;
  if (parameters.empty() || parameters.size() % each != 0 || !dense_matrix(op, "x", x, a.x)) return false;
  if (a.x.device.kind == Device::cpu && size_of(a.x.dtype) < 4) return false;
  a.layers.resize(parameters.size() / each);
  auto next = parameters.begin();
  for (MlpLayer& layer : a.layers) {
    if (!dense_matrix(op, "weight", *next++, layer.w)) return false;
    if (bias && !dense_vector(op, "bias", *next++, layer.b)) return false;
    if (gain && !dense_vector(op, "gain", *next++, layer.g)) return false;
  }
  a.act = Act(options & 0xff);
  a.activate_last = options & kActivateLast;
  return true;
}

// Allocates y, `saved` where asked for and the workspace, and runs.
nb::object run_mlp(nb::handle x, Mlp& a, bool save, nb::object& saved) {
  const char* op = "mlp";
  const int64_t columns = a.layers.back().w.rows();
  nb::object y = columns == a.x.cols() ? empty_like(x) : empty_rows(x, columns), workspace;
  a.y = Tensor(address(op, "y", y), a.x.dtype, {a.x.rows(), columns}, a.x.device);
  if (save) {
    const int64_t elements = mlp_saved_elements(a.x.rows(), a.layers, a.activate_last);
    saved = empty_vector(x, elements);
    a.saved = Tensor(address(op, "saved", saved), a.x.dtype, {elements}, a.x.device);
  }
  if (const int64_t bytes = mlp_workspace_bytes(a)) {
    workspace = empty_vector(x, bytes, DType::u8);
    a.workspace = Tensor(address(op, "workspace", workspace), DType::u8, {bytes}, a.x.device);
  }
  const Stream stream = stream_of(a.x);
  unlocked([&] { mlp(a, stream); });
  return y;
}

nb::object tuple_of(const Objects& objects) {
  nb::object tuple = nb::steal(PyTuple_New(Py_ssize_t(objects.size())));
  for (size_t i = 0; i < objects.size(); ++i)
    PyTuple_SetItem(tuple.ptr(), Py_ssize_t(i), nb::object(objects[i]).release().ptr());
  return tuple;
}

nb::object mlp_over(nb::handle x, const Objects& parameters, nb::handle options) {
  const int way = route(x, parameters);
  if (way == kDispatch) return nb::none();
  if (way == kDifferentiate) {
    std::vector<PyObject*> arguments = {nullptr, x.ptr(), options.ptr()};
    for (const nb::object& p : parameters) arguments.push_back(p.ptr());
    PyObject* y = PyObject_Vectorcall(python_.mlp_apply, arguments.data() + 1,
                                      (arguments.size() - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (y == nullptr) throw nb::python_error();
    return nb::steal(y);
  }
  Mlp a;
  nb::object saved;
  if (describe_mlp(x, parameters, options_of(options), a)) return run_mlp(x, a, false, saved);
  return call(python_.mlp_run, x, tuple_of(parameters), options, nb::bool_(false))[0];
}

}  // namespace

nb::object mlp_call(nb::handle x, nb::sequence parameters, nb::handle options) {
  Objects held;
  for (nb::handle p : parameters) held.push_back(nb::borrow(p));
  return mlp_over(x, held, options);
}

nb::object mlp_of_module(nb::handle x, nb::handle attributes) {
  if (call(python_.any_autocast).ptr() == Py_True) return nb::none();
  const nb::handle options = entry(attributes, python_.module_options), modules = entry(attributes, python_.modules);
  const nb::handle list = modules.is_valid() ? entry(modules, python_.layers) : nb::handle();
  if (!options.is_valid() || !list.is_valid()) return nb::none();
  const int flags = options_of(options);
  PyObject* const names[] = {python_.weight, flags & kBias ? python_.bias : nullptr,
                             flags & kWeightNorm ? python_.gain : nullptr};
  Objects held;  // another thread may replace a parameter meanwhile
  for (auto [name, layer] : nb::borrow<nb::dict>(attribute_of(list, python_.modules))) {
    const nb::object parameters = attribute_of(layer, python_.parameters);
    for (PyObject* key : names) {
      if (key == nullptr) continue;
      const nb::handle found = entry(parameters, key);
      if (!found.is_valid()) return nb::none();  // computed at every access: a parametrisation
      held.push_back(nb::borrow(found));
    }
  }
  return mlp_over(x, held, options);
}

nb::object mlp_forward(nb::args arguments) {
  const nb::handle ctx = arguments[0], x = arguments[1], options = arguments[2];
  Objects parameters;
  for (size_t i = 3; i < arguments.size(); ++i) parameters.push_back(nb::borrow(arguments[i]));
  const int flags = options_of(options);
  Mlp a;
  nb::object y, saved = nb::none();
  if (describe_mlp(x, parameters, flags, a)) {
    y = run_mlp(x, a, flags & kSave, saved);
  } else {
    const nb::object pair = call(python_.mlp_run, x, tuple_of(parameters), options, nb::bool_((flags & kSave) != 0));
    y = pair[0], saved = pair[1];
  }
  std::vector<PyObject*> kept = {ctx.ptr(), x.ptr(), saved.ptr()};
  for (const nb::object& p : parameters) kept.push_back(p.ptr());
  nb::steal(PyObject_VectorcallMethod(python_.save_for_backward, kept.data(), kept.size(), nullptr));
  if (PyErr_Occurred()) throw nb::python_error();
  set(ctx, python_.options, options);
  return y;
}

void attach_calls(nb::handle any_autocast, nb::handle rms_norm_apply, nb::handle rms_norm_run, nb::handle rms_norm_save,
                  nb::handle mlp_apply, nb::handle mlp_run) {
  auto keep = [](nb::handle h) { return h.inc_ref().ptr(); };
  auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
  python_ = {.rms_norm_apply = keep(rms_norm_apply),
             .rms_norm_run = keep(rms_norm_run),
             .rms_norm_save = keep(rms_norm_save),
             .mlp_apply = keep(mlp_apply),
             .mlp_run = keep(mlp_run),
             .any_autocast = keep(any_autocast),
             .save_for_backward = name("save_for_backward"),
             .options = name("options"),
             .parameters = name("_parameters"),
             .modules = name("_modules"),
             .layers = name("layers"),
             .weight = name("weight"),
             .bias = name("bias"),
             .gain = name("gain"),
             .eps = name("eps"),
             .unit_offset = name("unit_offset"),
             .module_options = name("_options"),
             .one_vector = name("_one_vector")};
}

}  // namespace ingot::python
