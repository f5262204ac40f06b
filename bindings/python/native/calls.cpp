// The call of a module in a single step, for plain dense tensors without hooks, modes or transforms. Every further call
// goes back to Python (_rms_norm.py, _mlp.py).
#include "calls.h"

#include <cfloat>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "edge.h"
#include "ingot/core/check.h"
#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/mlp/mlp.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "mlp_arguments.h"
#include "norm_arguments.h"
#include "tensors.h"

namespace ingot::python {
namespace {

struct PythonSide {
  PyObject *rms_norm_apply, *rms_norm_run, *rms_norm_save, *mlp_apply, *mlp_edge_apply, *mlp_run;
  // names
  PyObject *to_save, *options, *parameters, *modules, *layers, *weight, *bias, *gain, *eps, *unit_offset,
      *module_options, *one_vector, *edge;
} python_;
struct ModuleSide {
  PyObject *type = nullptr, *call, *rms_norm_forward, *mlp_forward;  // nn.Module and its __call__; our modules' forward
  PyObject *call_name, *forward_name, *compiled;
  PyObject* hooks[4];         // the names of a module's dictionaries of hooks
  PyObject* global_hooks[4];  // the dictionaries of hooks that apply to all modules
} module_;
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
// Returns false if `h` is not a number.
bool read_number(nb::handle h, double& value) {
  value = PyFloat_AsDouble(h.ptr());
  if (value != -1 || !PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}
DType sum_dtype(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

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

// An object's __dict__, in which nn.Module's lookup searches last.
nb::object dictionary_of(nb::handle object) {
  PyObject* found = PyObject_GenericGetDict(object.ptr(), nullptr);
  if (found == nullptr) throw nb::python_error();
  return nb::steal(found);
}

// Arguments of `forward` besides the tensors, which bypass `apply`, because apply checks every argument for a tensor
// and its need of a gradient. A nested call (of a finalizer, while apply allocates) restores the arguments of the outer
// call.
class Beside {
 public:
  explicit Beside(std::initializer_list<nb::handle> values) : outer_(current_) {
    for (nb::handle v : values) held_[count_++] = nb::borrow(v);
    current_ = this;
  }
  ~Beside() { current_ = outer_; }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;
  static nb::handle of_this_call(int i) {
    INGOT_CHECK(current_ != nullptr && i < current_->count_, "forward: found it called by itself, expected apply");
    return current_->held_[i];
  }

 private:
  static thread_local const Beside* current_;
  const Beside* outer_;
  nb::object held_[2];
  int count_ = 0;
};
thread_local const Beside* Beside::current_ = nullptr;

// Whether nn.Module.__call__ would only call the `forward` of the class: no hooks, no compiled form, no replaced
// method, no profiler of module calls.
bool calls_only_forward(nb::handle attributes) {
  if (PyThreadState_Get()->c_profilefunc != nullptr) return false;
  for (PyObject* hooks : module_.global_hooks)
    if (PyDict_GET_SIZE(hooks) != 0) return false;
  for (PyObject* name : module_.hooks) {
    const nb::handle hooks = entry(attributes, name);
    if (!hooks.is_valid() || !PyDict_Check(hooks.ptr()) || PyDict_GET_SIZE(hooks.ptr()) != 0) return false;
  }
  if (entry(attributes, module_.forward_name).is_valid()) return false;
  const nb::handle compiled = entry(attributes, module_.compiled);
  return (!compiled.is_valid() || compiled.is_none()) && attribute_of(module_.type, module_.call_name).is(module_.call);
}

// autograd.Function.apply looks up attributes of its class by newly made names, which miss the interpreter's attribute
// cache: type's own lookup goes through every base of the class and of its type each time. Classes made by quick_class
// have a table instead.
struct QuickClass {
  PyObject* type;
  std::vector<std::pair<PyObject*, PyObject*>> own;  // names and values
};
std::vector<QuickClass> quick_classes_;

bool same_text(PyObject* a, PyObject* b) {
  const Py_ssize_t size = PyUnicode_GET_LENGTH(a);
  return size == PyUnicode_GET_LENGTH(b) && PyUnicode_IS_COMPACT_ASCII(a) && PyUnicode_IS_COMPACT_ASCII(b) &&
         std::memcmp(PyUnicode_DATA(a), PyUnicode_DATA(b), size_t(size)) == 0;
}
PyObject* attribute_of_class(PyObject* type, PyObject* name) {
  for (const QuickClass& c : quick_classes_) {
    if (c.type != type) continue;
    for (const auto& [known, value] : c.own)
      if (same_text(known, name)) return Py_NewRef(value);
  }
  return PyType_Type.tp_getattro(type, name);
}
// The type of these classes.
nb::object quick_type() {
  PyType_Slot slots[] = {
      {Py_tp_base, &PyType_Type}, {Py_tp_getattro, reinterpret_cast<void*>(attribute_of_class)}, {0, nullptr}};
  PyType_Spec spec{
      .name = "ingot._C.QuickType", .basicsize = 0, .itemsize = 0, .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw nb::python_error();
  return nb::steal(type);
}

// --- rms_norm --------------------------------------------------------------------------------------------------------

// Up to this many elements the backward pass computes rstd again, at no measurable cost on a GPU; keeping rstd costs
// the host an allocation, a sixth of the call.
constexpr int64_t kRecomputeRstd = 1 << 20;

// Reads x, weight, eps and unit_offset into `a`. Returns false if the rows are not dense or are empty, or if eps is not
// a number: the functions written in Python make such rows dense and refuse such an eps.
bool describe_rms_norm(nb::handle x, nb::handle w, nb::handle eps, nb::handle unit_offset, RmsNorm& a, Sizes& sizes) {
  const char* op = "rms_norm";
  if (!dense_matrix(op, "x", x, a.x, &sizes) || floats(op, "x", a.x).numel() == 0) return false;
  int rank = 1;
  if (!w.is_none() && (!dense_vector(op, "weight", w, a.w, &rank) || rank != 1)) return false;
  check_weight(a.x, a.w);
  if (eps.is_none())
    a.eps = a.x.dtype == DType::f64 ? DBL_EPSILON : FLT_EPSILON;
  else if (!read_number(eps, a.eps))
    return false;
  const int truth = PyObject_IsTrue(unit_offset.ptr());
  if (truth < 0) throw nb::python_error();
  a.unit_offset = truth == 1;
  return true;
}

}  // namespace

nb::object rms_norm_call(nb::handle x, nb::handle w, nb::handle eps, nb::handle unit_offset) {
  switch (route({x, w})) {
    case kDispatch: return nb::none();
    case kDifferentiate: {
      const Beside beside({eps, unit_offset});
      return call(python_.rms_norm_apply, x, w);
    }
    default: break;
  }
  RmsNorm a;
  Sizes sizes;
  if (!describe_rms_norm(x, w, eps, unit_offset, a, sizes)) return call(python_.rms_norm_run, x, w, eps, unit_offset);
  nb::object y = empty(x, a.x.device, a.x.dtype, sizes, a.y);
  const Stream stream = stream_of(a.x);
  unlocked([&] { rmsnorm(a, stream); });
  return y;
}

nb::object rms_norm_of_module(nb::handle x, nb::handle attributes) {
  const nb::handle parameters = entry(attributes, python_.parameters);
  const nb::handle weight = parameters.is_valid() ? entry(parameters, python_.weight) : nb::handle();
  if (!weight.is_valid() || weight.is_none()) return nb::none();
  const nb::object held = nb::borrow(weight);  // a second thread may replace the weight meanwhile
  const nb::handle eps = entry(attributes, python_.eps), unit_offset = entry(attributes, python_.unit_offset);
  if (!eps.is_valid() || !unit_offset.is_valid()) return nb::none();
  if (entry(attributes, python_.one_vector).ptr() != Py_True) return nb::none();
  return rms_norm_call(x, held, nb::borrow(eps), nb::borrow(unit_offset));
}
nb::object rms_norm_forward(nb::handle ctx, nb::handle x, nb::handle w) {
  const nb::handle eps = Beside::of_this_call(0), unit_offset = Beside::of_this_call(1);
  RmsNorm a;
  Sizes sizes;
  nb::object y, rstd = nb::none();
  if (describe_rms_norm(x, w, eps, unit_offset, a, sizes)) {
    y = empty(x, a.x.device, a.x.dtype, sizes, a.y);
    if (a.x.numel() > kRecomputeRstd) rstd = empty_vector(x, a.x.device, sum_dtype(a.x.dtype), a.x.rows(), a.rstd);
    const Stream stream = stream_of(a.x);
    unlocked([&] { rmsnorm(a, stream); });
  } else {
    const nb::object pair = call(python_.rms_norm_save, x, w, eps, unit_offset);
    y = pair[0], rstd = pair[1];
  }
  set(ctx, python_.to_save, nb::make_tuple(x, w, rstd));
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

// Reads x and the layers into `a`. Returns false if an operand is not dense or not aligned, or if the CPU has no kernel
// for its type.
bool describe_mlp(nb::handle x, const Objects& parameters, int options, Mlp& a, Sizes& sizes) {
  const char* op = "mlp";
  const bool bias = options & kBias, gain = options & kWeightNorm;
  const size_t each = 1 + bias + gain;
  if (parameters.empty() || parameters.size() % each != 0 || !dense_matrix(op, "x", x, a.x, &sizes)) return false;
  if (floats(op, "x", a.x).device.kind == Device::cpu && size_of(a.x.dtype) < 4) return false;
  a.layers.resize(parameters.size() / each);
  if (!aligned(a.x)) return false;
  auto next = parameters.begin();
  Sizes of_weight;
  for (MlpLayer& layer : a.layers) {
    if (!dense_matrix(op, "weights", *next++, layer.w, &of_weight) || !aligned(layer.w)) return false;
    INGOT_CHECK(of_weight.rank == 2, op, ": weights: found ", of_weight.rank, " dimensions, expected 2");
    if (bias && (!dense_vector(op, "biases", *next++, layer.b) || !aligned(layer.b))) return false;
    if (gain && (!dense_vector(op, "gains", *next++, layer.g) || !aligned(layer.g))) return false;
  }
  check_layers(op, a.x, a.layers);
  a.act = Act(options & 0xff);
  a.activate_last = options & kActivateLast;
  return true;
}

// Allocates y, `saved` if `save` is set, and the workspace, and runs the op. `sizes` are the sizes of x.
nb::object run_mlp(nb::handle x, Mlp& a, Sizes& sizes, bool save, nb::object& saved) {
  sizes.of[sizes.rank - 1] = a.layers.back().w.rows();
  nb::object y = empty(x, a.x.device, a.x.dtype, sizes, a.y), workspace;
  if (save)
    saved = empty_vector(x, a.x.device, a.x.dtype, mlp_saved_elements(a.x.rows(), a.layers, a.activate_last), a.saved);
  if (const int64_t bytes = mlp_workspace_bytes(a))
    workspace = empty_vector(x, a.x.device, DType::u8, bytes, a.workspace);
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

// A call through a module's edge, described before apply is called: the arguments of forward besides x. Calls nest like
// the calls of Beside.
struct EdgeCall {
  const Objects& parameters;
  nb::object options;
  Mlp a;
  Sizes sizes;
  static thread_local EdgeCall* current;
};
thread_local EdgeCall* EdgeCall::current = nullptr;

// The result is not valid if the parameters have no edge.
nb::object mlp_through(Edge& edge, nb::handle x, const Objects& parameters, nb::handle options) {
  EdgeCall self{.parameters = parameters, .options = nb::borrow(options)};
  if (!describe_mlp(x, parameters, options_of(options), self.a, self.sizes)) return edge.forget(), nb::object();
  const nb::object tensor = edge.of(parameters, self.a.layers, stream_of(self.a.x));
  if (!tensor.is_valid()) return {};
  struct Nested {
    EdgeCall* const outer = EdgeCall::current;
    ~Nested() { EdgeCall::current = outer; }
  } const nested;
  EdgeCall::current = &self;
  return call(python_.mlp_edge_apply, x, tensor);
}

nb::object mlp_over(nb::handle x, const Objects& parameters, nb::handle options, const nb::object& edge = {}) {
  const int way = route(x, parameters);
  if (way == kDispatch) return nb::none();
  if (way == kDifferentiate) {
    if (edge.is_valid() && nb::isinstance<Edge>(edge))
      if (nb::object y = mlp_through(*nb::inst_ptr<Edge>(edge), x, parameters, options); y.is_valid()) return y;
    const Beside beside({options});
    std::vector<PyObject*> arguments;
    arguments.reserve(parameters.size() + 2);
    arguments.insert(arguments.end(), {nullptr, x.ptr()});
    for (const nb::object& p : parameters) arguments.push_back(p.ptr());
    PyObject* y = PyObject_Vectorcall(python_.mlp_apply, arguments.data() + 1,
                                      (arguments.size() - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (y == nullptr) throw nb::python_error();
    return nb::steal(y);
  }
  Mlp a;
  Sizes sizes;
  nb::object saved;
  if (describe_mlp(x, parameters, options_of(options), a, sizes)) return run_mlp(x, a, sizes, false, saved);
  return call(python_.mlp_run, x, tuple_of(parameters), options, nb::bool_(false))[0];
}

}  // namespace

nb::object mlp_call(nb::handle x, nb::sequence parameters, nb::handle options) {
  Objects held;
  for (nb::handle p : parameters) held.push_back(nb::borrow(p));
  return mlp_over(x, held, options);
}

nb::object mlp_dense(nb::handle x, nb::sequence parameters, nb::handle options, bool save) {
  Objects held;
  for (nb::handle p : parameters) held.push_back(nb::borrow(p));
  Mlp a;
  Sizes sizes;
  if (!describe_mlp(x, held, options_of(options), a, sizes)) return nb::none();
  nb::object saved = nb::none();
  const nb::object y = run_mlp(x, a, sizes, save, saved);
  return nb::make_tuple(y, saved);
}

nb::object mlp_of_module(nb::handle x, nb::handle attributes) {
  if (any_autocast()) return nb::none();
  // A second thread, or Python code run by the call, may replace these objects and the parameters during the call.
  const nb::object options = nb::borrow(entry(attributes, python_.module_options));
  const nb::object edge = nb::borrow(entry(attributes, python_.edge));
  const nb::handle modules = entry(attributes, python_.modules);
  const nb::handle list = modules.is_valid() ? entry(modules, python_.layers) : nb::handle();
  if (!options.is_valid() || !list.is_valid()) return nb::none();
  const int flags = options_of(options);
  PyObject* const names[] = {python_.weight, flags & kBias ? python_.bias : nullptr,
                             flags & kWeightNorm ? python_.gain : nullptr};
  Objects held;
  held.reserve(16);
  const nb::handle found_layers = entry(dictionary_of(list), python_.modules);
  if (!found_layers.is_valid()) return nb::none();
  for (auto [name, layer] : nb::borrow<nb::dict>(found_layers)) {
    const nb::object own = dictionary_of(layer);
    const nb::handle parameters = entry(own, python_.parameters);
    for (PyObject* key : names) {
      if (key == nullptr) continue;
      const nb::handle found = parameters.is_valid() ? entry(parameters, key) : nb::handle();
      if (!found.is_valid()) return nb::none();  // a parametrised module computes this parameter at every access
      held.push_back(nb::borrow(found));
    }
  }
  return mlp_over(x, held, options, edge);
}

nb::object mlp_edge_forward(nb::handle ctx, nb::handle x, nb::handle) {
  INGOT_CHECK(EdgeCall::current != nullptr, "forward: found it called by itself, expected apply");
  EdgeCall& now = *EdgeCall::current;
  nb::object saved = nb::none();
  nb::object y = run_mlp(x, now.a, now.sizes, options_of(now.options) & kSave, saved);
  nb::object keep = nb::steal(PyTuple_New(Py_ssize_t(now.parameters.size() + 2)));
  Py_ssize_t i = 0;
  const auto add = [&](nb::object o) { PyTuple_SET_ITEM(keep.ptr(), i++, o.release().ptr()); };
  add(nb::borrow(x));
  add(std::move(saved));
  for (const nb::object& p : now.parameters) add(p);
  set(ctx, python_.to_save, keep);
  set(ctx, python_.options, now.options);
  return y;
}

nb::object mlp_forward(nb::args arguments) {
  const nb::handle ctx = arguments[0], x = arguments[1], options = Beside::of_this_call(0);
  Objects parameters;
  parameters.reserve(arguments.size() + 2);  // and the tensors saved before the parameters
  for (size_t i = 2; i < arguments.size(); ++i) parameters.push_back(nb::borrow(arguments[i]));
  const int flags = options_of(options);
  Mlp a;
  Sizes sizes;
  nb::object y, saved = nb::none();
  if (describe_mlp(x, parameters, flags, a, sizes)) {
    y = run_mlp(x, a, sizes, flags & kSave, saved);
  } else {
    const nb::object pair = call(python_.mlp_run, x, tuple_of(parameters), options, nb::bool_((flags & kSave) != 0));
    y = pair[0], saved = pair[1];
  }
  parameters.insert(parameters.begin(), {nb::borrow(x), saved});
  set(ctx, python_.to_save, tuple_of(parameters));
  set(ctx, python_.options, options);
  return y;
}

// --- modules and classes ---------------------------------------------------------------------------------------------

nb::object module_call(nb::handle self, nb::handle positional, nb::handle named) {
  if (module_.type == nullptr || PyTuple_GET_SIZE(positional.ptr()) != 1 || PyDict_GET_SIZE(named.ptr()) != 0)
    return nb::none();
  const nb::object attributes = dictionary_of(self);
  if (!calls_only_forward(attributes)) return nb::none();
  const nb::object forward = attribute_of(reinterpret_cast<PyObject*>(Py_TYPE(self.ptr())), module_.forward_name);
  const nb::handle x = PyTuple_GET_ITEM(positional.ptr(), 0);
  if (forward.is(module_.rms_norm_forward)) return rms_norm_of_module(x, attributes);
  return forward.is(module_.mlp_forward) ? mlp_of_module(x, attributes) : nb::none();
}

nb::object quick_class(nb::handle name, nb::handle bases, nb::dict own) {
  static PyObject* const type = quick_type().release().ptr();
  nb::object made = call(type, name, bases, own);
  QuickClass c{.type = nb::object(made).release().ptr()};  // never released, like all objects attached by Python
  for (auto [key, _] : own) {
    const nb::object value = attribute_of(made, key.ptr());
    c.own.emplace_back(key.inc_ref().ptr(), value.inc_ref().ptr());
  }
  quick_classes_.push_back(std::move(c));
  return made;
}

void attach_calls(nb::handle rms_norm_apply, nb::handle rms_norm_run, nb::handle rms_norm_save, nb::handle mlp_apply,
                  nb::handle mlp_edge_apply, nb::handle mlp_run) {
  auto keep = [](nb::handle h) { return h.inc_ref().ptr(); };
  auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
  python_ = {.rms_norm_apply = keep(rms_norm_apply),
             .rms_norm_run = keep(rms_norm_run),
             .rms_norm_save = keep(rms_norm_save),
             .mlp_apply = keep(mlp_apply),
             .mlp_edge_apply = keep(mlp_edge_apply),
             .mlp_run = keep(mlp_run),
             .to_save = name("to_save"),
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
             .one_vector = name("_one_vector"),
             .edge = name("_edge")};
}

void attach_modules(nb::handle rms_norm_forward, nb::handle mlp_forward) {
  const nb::module_ modules = nb::module_::import_("torch.nn.modules.module");
  const char* const kinds[] = {"backward_pre_hooks", "backward_hooks", "forward_pre_hooks", "forward_hooks"};
  ModuleSide m;
  for (int i = 0; i < 4; ++i) {
    const std::string global = std::string("_global_") + kinds[i];
    // in another version of PyTorch, nn.Module.__call__ itself decides
    if (!nb::hasattr(modules, global.c_str())) return;
    m.global_hooks[i] = nb::object(modules.attr(global.c_str())).release().ptr();
    if (!PyDict_Check(m.global_hooks[i])) return;
    m.hooks[i] = PyUnicode_InternFromString((std::string("_") + kinds[i]).c_str());
  }
  m.call_name = PyUnicode_InternFromString("__call__");
  m.forward_name = PyUnicode_InternFromString("forward");
  m.compiled = PyUnicode_InternFromString("_compiled_call_impl");
  m.rms_norm_forward = rms_norm_forward.inc_ref().ptr();
  m.mlp_forward = mlp_forward.inc_ref().ptr();
  m.type = nb::object(modules.attr("Module")).release().ptr();
  m.call = attribute_of(m.type, m.call_name).release().ptr();
  module_ = m;
}

}  // namespace ingot::python
