#include "tensors.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

#include "dlpack_exchange.h"
#include "ingot/core/check.h"
#include "ingot/gpu/device.h"
#include "torch_symbols.h"

namespace ingot::python {
namespace {

using dlpack::Exchange;
using dlpack::View;

// Objects of PyTorch that are looked up once. They are held until the process ends, because their destruction at exit
// would come after the interpreter's.
struct Torch {
  PyTypeObject *tensor = nullptr, *parameter = nullptr;
  const Exchange* exchange = nullptr;
  // `symbols` are in use; `found_symbols` are those that exist
  const TorchSymbols *symbols = nullptr, *found_symbols = nullptr;
  bool use_exchange = true;
  PyObject* requires_grad = nullptr;  // the attribute's name
  PyObject *grad_enabled = nullptr, *dispatch_modes = nullptr, *function_modes = nullptr, *transforms = nullptr,
           *tracing = nullptr, *raw_stream = nullptr, *any_autocast = nullptr;
  PyObject *new_empty = nullptr, *dtype_keyword = nullptr;
  PyObject *empty_on_cpu = nullptr, *empty_on_gpu = nullptr;  // where PyTorch has these functions; see empty()
  PyObject *forward_ad = nullptr, *current_level = nullptr;   // a module's __dict__, and a name in this dictionary
  struct Known {
    PyObject* object;
    DType dtype;
  } dtypes[16];
  int known = 0;
};
Torch torch_;

PyObject* kept(nb::object o) { return o.release().ptr(); }

nb::object attribute(nb::handle h, PyObject* name) {
  PyObject* value = PyObject_GetAttr(h.ptr(), name);
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}
nb::object call(PyObject* f) {
  PyObject* result = PyObject_CallNoArgs(f);
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}
bool counts(PyObject* f) {  // whether a function returns an int above zero
  return PyLong_AsLong(call(f).ptr()) > 0;
}

bool is_plain_tensor(nb::handle h) {
  PyTypeObject* type = Py_TYPE(h.ptr());
  return type == torch_.tensor || type == torch_.parameter;
}
bool is_tensor(nb::handle h) { return is_plain_tensor(h) || PyType_IsSubtype(Py_TYPE(h.ptr()), torch_.tensor); }

[[noreturn]] void fail_of_dtype(const char* op, const char* name, nb::handle dtype) {
  fail(ErrorCode::invalid_argument, op, ": ", name, ": found dtype ", nb::cast<std::string>(nb::str(dtype)),
       ", expected torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32 or "
       "torch.uint8");
}

DType dtype_of_view(const char* op, const char* name, nb::handle h, const View& v) {
  if (v.lanes == 1) {
    if (v.code == dlpack::kFloat && v.bits == 64) return DType::f64;
    if (v.code == dlpack::kFloat && v.bits == 32) return DType::f32;
    if (v.code == dlpack::kFloat && v.bits == 16) return DType::f16;
    if (v.code == dlpack::kBfloat && v.bits == 16) return DType::bf16;
    if (v.code == dlpack::kInt && v.bits == 64) return DType::i64;
    if (v.code == dlpack::kInt && v.bits == 32) return DType::i32;
    if (v.code == dlpack::kUnsigned && v.bits == 8) return DType::u8;
  }
  fail_of_dtype(op, name, nb::object(h.attr("dtype")));
}

// The description of a tensor by either way: sizes and strides are borrowed from the object or copied.
struct Described {
  void* data;
  DType dtype;
  Device device;
  int rank;
  const int64_t *shape, *strides;
  int64_t copies[2 * kMaxDims];
};

// The error for a tensor without a block of memory: sparse, nested, or on the meta device.
[[noreturn]] void fail_undescribed(const char* op, const char* name, nb::handle h) {
  const nb::object layout = h.attr("layout"), device = h.attr("device");
  const auto word = [](const nb::object& o) { return nb::cast<std::string>(nb::str(o)); };
  fail(ErrorCode::unsupported, op, ": ", name, ": found a ", nb::cast<bool>(h.attr("is_nested")) ? "nested " : "",
       word(layout), " tensor on ", word(device), ", expected a dense one on cpu or cuda");
}

void describe_fast(const char* op, const char* name, nb::handle h, Described& d) {
  View v{};
  if (torch_.exchange->view(h.ptr(), &v) != 0) {
    PyErr_Clear();
    fail_undescribed(op, name, h);
  }
  INGOT_CHECK(v.device_kind == dlpack::kCpu || v.device_kind == dlpack::kCuda || v.device_kind == dlpack::kCudaPinned,
              op, ": ", name, ": found a tensor on DLPack device type ", v.device_kind, ", expected cpu or cuda");
  d.data = static_cast<char*>(v.data) + v.byte_offset;
  d.dtype = dtype_of_view(op, name, h, v);
  d.device = v.device_kind == dlpack::kCuda ? Device{Device::cuda, v.device_index} : Device{};
  d.rank = v.rank;
  d.shape = v.shape;
  d.strides = v.strides;
}

void describe_slow(const char* op, const char* name, nb::handle h, Described& d) {
  const nb::object layout = h.attr("layout"), device = h.attr("device"), dtype = h.attr("dtype");
  if (nb::cast<std::string>(nb::str(layout)) != "torch.strided" || nb::cast<bool>(h.attr("is_nested")))
    fail_undescribed(op, name, h);
  const nb::object shape = h.attr("shape");
  const nb::object strides = h.attr("stride")();
  const std::string kind = nb::cast<std::string>(nb::str(device.attr("type")));
  INGOT_CHECK(kind == "cpu" || kind == "cuda", op, ": ", name, ": found a tensor on ", kind, ", expected cpu or cuda");
  d.device = kind == "cuda" ? Device{Device::cuda, nb::cast<int>(device.attr("index"))} : Device{};
  int known = 0;
  while (known < torch_.known && torch_.dtypes[known].object != dtype.ptr()) ++known;
  if (known == torch_.known) fail_of_dtype(op, name, dtype);
  d.dtype = torch_.dtypes[known].dtype;
  d.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(h.attr("data_ptr")()));
  d.rank = int(nb::len(shape));
  INGOT_CHECK_LE(d.rank, kMaxDims, op, ": rank of ", name);
  for (int i = 0; i < d.rank; ++i) {
    d.copies[i] = nb::cast<int64_t>(shape[i]);
    d.copies[kMaxDims + i] = nb::cast<int64_t>(strides[i]);
  }
  d.shape = d.copies;
  d.strides = d.copies + kMaxDims;
}

std::string shape_text(const Described& d) {
  std::string text = "(";
  for (int i = 0; i < d.rank; ++i) text += (i ? ", " : "") + std::to_string(d.shape[i]);
  return text + ")";
}

// Returns false if the tensor has to be described, and the error reported, in another way.
bool describe_at_once(nb::handle h, Described& d) {
  const TorchSymbols& s = *torch_.symbols;
  const void* t = s.tensor(h);
  int64_t rank = 0, *shape = nullptr, *strides = nullptr;
  int32_t dtype = -1, layout = -1, kind = -1, index = 0;
  if (s.layout(t, &layout) != 0 || layout != s.strided || s.device_type(t, &kind) != 0) return false;
  if ((kind != s.cpu && kind != s.cuda) || s.device_index(t, &index) != 0) return false;
  if (s.dtype(t, &dtype) != 0 || dtype < 0 || dtype >= s.kDtypes || !s.dtypes[dtype].known) return false;
  if (s.dim(t, &rank) != 0 || s.sizes(t, &shape) != 0 || s.strides(t, &strides) != 0 || s.data(t, &d.data) != 0)
    return false;
  d.dtype = s.dtypes[dtype].dtype;
  d.device = kind == s.cuda ? Device{Device::cuda, index} : Device{};
  d.rank = int(rank);
  d.shape = shape;
  d.strides = strides;
  return true;
}

void refuse_without_memory(const char* op, const char* name, const Described& d) {
  int64_t elements = 1;
  for (int i = 0; i < d.rank; ++i) elements *= d.shape[i];
  if (elements != 0)
    fail(ErrorCode::unsupported, op, ": ", name, ": found a tensor of shape ", shape_text(d),
         " without memory, expected a dense one on cpu or cuda");
}

void describe(const char* op, const char* name, nb::handle h, Described& d) {
  if (!is_tensor(h)) [[unlikely]]
    throw nb::type_error(
        (std::string(op) + ": " + name + ": found " + Py_TYPE(h.ptr())->tp_name + ", expected torch.Tensor").c_str());
  if (torch_.symbols == nullptr || !is_plain_tensor(h) || !describe_at_once(h, d)) {
    if (torch_.exchange != nullptr && torch_.use_exchange)
      describe_fast(op, name, h, d);
    else
      describe_slow(op, name, h, d);
  }
  if (d.data == nullptr) [[unlikely]]
    refuse_without_memory(op, name, d);
#ifndef INGOT_CUDA_BUILD
  if (d.device.kind != Device::cpu) [[unlikely]]  // before anything is allocated there
    fail(ErrorCode::unsupported, op, ": ", name, ": found a tensor on ", d.device,
         ", but Ingot was built without CUDA; expected cpu");
#endif
}

// Appends dimensions [begin, end) of `d` to `t`, merged into as few dimensions as the strides allow (at most `room`, at
// least one).
void merge(const Described& d, int begin, int end, Tensor& t, int room, const char* op, const char* name) {
  int64_t size = 1, stride = 0;
  bool empty = false, open = false;
  for (int i = begin; i < end; ++i) empty |= d.shape[i] == 0;
  auto close = [&] {
    INGOT_CHECK(room-- > 0, op, ": ", name, ": found shape ", shape_text(d),
                " with strides that its leading dimensions cannot be merged over; expected it contiguous");
    t.shape.dim[t.shape.rank] = size;
    t.stride[t.shape.rank++] = stride;
  };
  if (empty) {
    size = 0;
    stride = end < d.rank ? d.shape[end] : 1;
    return close();
  }
  for (int i = begin; i < end; ++i) {
    if (d.shape[i] == 1) continue;
    if (open && stride == d.shape[i] * d.strides[i]) {
      size *= d.shape[i];
    } else {
      if (open) close();
      size = d.shape[i];
    }
    stride = d.strides[i];
    open = true;
  }
  if (!open) stride = end < d.rank ? d.shape[end] * d.strides[end] : 1;
  close();
}

Tensor start(const Described& d) {
  Tensor t;
  t.data = d.data;
  t.dtype = d.dtype;
  t.device = d.device;
  return t;
}
void append(const Described& d, int i, Tensor& t) {
  t.shape.dim[t.shape.rank] = d.shape[i];
  t.stride[t.shape.rank++] = d.strides[i];
}
// Strides mean nothing where a size is 0 or 1, but operations may still read these strides.
Tensor tidy(Tensor t) {
  if (t.numel() == 0) return Tensor(t.data, t.dtype, t.shape, t.device);
  if (t.size(-1) == 1) t.stride[t.rank() - 1] = 1;
  return t;
}

}  // namespace

void attach(nb::module_ torch) {
  Torch t;
  t.tensor = reinterpret_cast<PyTypeObject*>(kept(torch.attr("Tensor")));
  t.parameter = reinterpret_cast<PyTypeObject*>(kept(torch.attr("nn").attr("Parameter")));
  if (nb::hasattr(torch.attr("Tensor"), "__dlpack_c_exchange_api__")) {
    const nb::object capsule = torch.attr("Tensor").attr("__dlpack_c_exchange_api__");
    auto* exchange = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (exchange == nullptr) PyErr_Clear();
    // The table lives as long as the process; a later major version may change the fields behind its head.
    while (exchange != nullptr && exchange->major != 1) exchange = exchange->previous;
    if (exchange != nullptr && exchange->view != nullptr && exchange->current_stream != nullptr) t.exchange = exchange;
  }
  t.requires_grad = PyUnicode_InternFromString("requires_grad");
  t.current_level = PyUnicode_InternFromString("_current_level");
  t.new_empty = PyUnicode_InternFromString("new_empty");
  t.dtype_keyword = kept(nb::make_tuple("dtype"));
  const nb::object c = torch.attr("_C");
  if (nb::hasattr(c, "_dynamo") && nb::hasattr(c.attr("_dynamo"), "guards")) {
    const nb::object guards = c.attr("_dynamo").attr("guards");
    if (nb::hasattr(guards, "_empty_strided_cpu")) t.empty_on_cpu = kept(guards.attr("_empty_strided_cpu"));
    if (nb::hasattr(guards, "_empty_strided_cuda")) t.empty_on_gpu = kept(guards.attr("_empty_strided_cuda"));
  }
  t.grad_enabled = kept(c.attr("is_grad_enabled"));
  t.dispatch_modes = kept(c.attr("_len_torch_dispatch_stack"));
  if (nb::hasattr(c, "_is_any_autocast_enabled")) t.any_autocast = kept(c.attr("_is_any_autocast_enabled"));
  t.function_modes = kept(c.attr("_len_torch_function_stack"));
  t.transforms = kept(c.attr("_are_functorch_transforms_active"));
  t.tracing = kept(c.attr(nb::hasattr(c, "_is_tracing") ? "_is_tracing" : "_get_tracing_state"));
  t.forward_ad = kept(nb::module_::import_("torch.autograd.forward_ad").attr("__dict__"));
  if (nb::hasattr(c, "_cuda_getCurrentRawStream")) t.raw_stream = kept(c.attr("_cuda_getCurrentRawStream"));
  const std::pair<const char*, DType> dtypes[] = {
      {"float64", DType::f64}, {"float32", DType::f32}, {"bfloat16", DType::bf16}, {"float16", DType::f16},
      {"int64", DType::i64},   {"int32", DType::i32},   {"uint8", DType::u8}};
  for (const auto& [name, dtype] : dtypes) t.dtypes[t.known++] = {kept(torch.attr(name)), dtype};
  t.symbols = t.found_symbols = find_torch_symbols(torch);
  torch_ = t;
}

Tensor view(const char* op, const char* name, nb::handle h, int rank) {
  if (h.is_none()) return {};
  Described d;
  describe(op, name, h, d);
  INGOT_CHECK(d.rank >= 1 || rank == 1, op, ": ", name, ": found a tensor without dimensions, expected at least one");
  Tensor t = start(d);
  if (rank == 1) {
    merge(d, 0, d.rank, t, 1, op, name);
  } else {
    merge(d, 0, d.rank - 1, t, rank - 1, op, name);
    append(d, d.rank - 1, t);
  }
  return tidy(t);
}

Tensor heads(const char* op, const char* name, nb::handle h) {
  if (h.is_none()) return {};
  Described d;
  describe(op, name, h, d);
  INGOT_CHECK(d.rank >= 3, op, ": ", name, ": found shape ", shape_text(d),
              ", expected (..., tokens, heads, dimensions)");
  Tensor t = start(d);
  merge(d, 0, d.rank - 2, t, 1, op, name);
  append(d, d.rank - 2, t);
  append(d, d.rank - 1, t);
  return tidy(t);
}

Tensor bank(const char* op, const char* name, nb::handle h) {
  if (h.is_none()) return {};
  Described d;
  describe(op, name, h, d);
  INGOT_CHECK(d.rank == 3, op, ": ", name, ": found shape ", shape_text(d), ", expected (matrices, rows, columns)");
  Tensor t = start(d);
  for (int i = 0; i < 3; ++i) append(d, i, t);
  return tidy(t);
}

const char* torch_name(DType dtype) {
  switch (dtype) {
    case DType::f64: return "torch.float64";
    case DType::f32: return "torch.float32";
    case DType::bf16: return "torch.bfloat16";
    case DType::f16: return "torch.float16";
    case DType::i64: return "torch.int64";
    case DType::i32: return "torch.int32";
    case DType::u8: return "torch.uint8";
    default: return "another dtype";
  }
}

const Tensor& floats(const char* op, const char* name, const Tensor& t) {
  const bool narrow = t.dtype == DType::f32 || t.dtype == DType::bf16 || t.dtype == DType::f16;
  INGOT_CHECK(narrow || t.dtype == DType::f64, op, ": ", name, ": found dtype ", torch_name(t.dtype),
              ", expected torch.float64, torch.float32, torch.bfloat16 or torch.float16");
  if (!narrow && t.device.kind != Device::cpu)
    fail(ErrorCode::unsupported, op, ": ", name,
         ": found dtype torch.float64 on a GPU, expected torch.float32, torch.bfloat16 or torch.float16");
  return t;
}

namespace {
bool is_contiguous(const Described& d) {
  int64_t step = 1;
  for (int i = d.rank - 1; i >= 0; --i) {
    if (d.shape[i] == 0) return true;
    if (d.shape[i] != 1 && d.strides[i] != step) return false;
    step *= d.shape[i];
  }
  return true;
}
}  // namespace
bool dense_matrix(const char* op, const char* name, nb::handle h, Tensor& out, Sizes* sizes) {
  Described d;
  describe(op, name, h, d);
  if (d.rank == 0 || !is_contiguous(d)) return false;
  if (sizes != nullptr) {
    sizes->rank = d.rank;
    for (int i = 0; i < d.rank; ++i) sizes->of[i] = d.shape[i];
  }
  int64_t rows = 1;
  for (int i = 0; i + 1 < d.rank; ++i) rows *= d.shape[i];
  out = Tensor(d.data, d.dtype, {rows, d.shape[d.rank - 1]}, d.device);
  return true;
}
bool dense_vector(const char* op, const char* name, nb::handle h, Tensor& out, int* rank) {
  Described d;
  describe(op, name, h, d);
  if (d.rank == 0 || !is_contiguous(d)) return false;
  if (rank != nullptr) *rank = d.rank;
  int64_t size = 1;
  for (int i = 0; i < d.rank; ++i) size *= d.shape[i];
  out = Tensor(d.data, d.dtype, {size}, d.device);
  return true;
}

namespace {
nb::object known_dtype(DType dtype) {
  int known = 0;
  while (torch_.dtypes[known].dtype != dtype) ++known;
  return nb::borrow(torch_.dtypes[known].object);
}
nb::object tuple_of(const int64_t* values, int n) {
  PyObject* tuple = PyTuple_New(n);
  if (tuple == nullptr) throw nb::python_error();
  for (int i = 0; i < n; ++i) PyTuple_SET_ITEM(tuple, i, PyLong_FromLongLong(values[i]));
  return nb::steal(tuple);
}

// Allocates like the code of torch.compile: without the dispatcher, always on the current device. The result is not
// valid if another device is current, or if PyTorch has no such function.
nb::object empty_quickly(Device device, const nb::object& dtype, const Sizes& sizes) {
  const bool cpu = device.kind == Device::cpu;
  PyObject* f = cpu ? torch_.empty_on_cpu : torch_.empty_on_gpu;
  if (f == nullptr || (!cpu && gpu::current_device() != device.index)) return {};
  int64_t strides[kMaxDims], step = 1;
  for (int i = sizes.rank - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<int64_t>(1, sizes.of[i]);
  }
  const nb::object shape = tuple_of(sizes.of, sizes.rank), steps = tuple_of(strides, sizes.rank);
  PyObject* arguments[] = {nullptr, shape.ptr(), steps.ptr(), dtype.ptr()};
  PyObject* t = PyObject_Vectorcall(f, arguments + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (t == nullptr) throw nb::python_error();
  return nb::steal(t);
}
nb::object empty_like_it(nb::handle like, const nb::object& dtype, const Sizes& sizes) {
  const nb::object shape = tuple_of(sizes.of, sizes.rank);
  PyObject* arguments[] = {like.ptr(), shape.ptr(), dtype.ptr()};
  PyObject* t = PyObject_VectorcallMethod(torch_.new_empty, arguments, 2, torch_.dtype_keyword);
  if (t == nullptr) throw nb::python_error();
  return nb::steal(t);
}
void* data_on(Device device, nb::handle h) {  // null where the tensor is on a different device
  Described d;
  describe("allocation", "result", h, d);
  return d.device == device ? d.data : nullptr;
}
nb::object allocate(nb::handle like, Device device, DType dtype, const Sizes& sizes, void*& data) {
  const nb::object type = known_dtype(dtype);
  nb::object t = empty_quickly(device, type, sizes);
  if (!t.is_valid() || (data = data_on(device, t)) == nullptr) {
    t = empty_like_it(like, type, sizes);
    data = data_on(device, t);
  }
  return t;
}
}  // namespace

nb::object empty(nb::handle like, Device device, DType dtype, const Sizes& sizes, Tensor& view) {
  void* data = nullptr;
  nb::object t = allocate(like, device, dtype, sizes, data);
  int64_t rows = 1;
  for (int i = 0; i + 1 < sizes.rank; ++i) rows *= sizes.of[i];
  view = Tensor(data, dtype, {rows, sizes.of[sizes.rank - 1]}, device);
  return t;
}
nb::object empty_vector(nb::handle like, Device device, DType dtype, int64_t size, Tensor& view) {
  Sizes sizes;
  sizes.rank = 1;
  sizes.of[0] = size;
  void* data = nullptr;
  nb::object t = allocate(like, device, dtype, sizes, data);
  view = Tensor(data, dtype, {size}, device);
  return t;
}

Stream stream_of(const Tensor& t) {
  if (t.device.kind == Device::cpu) return {};
  Stream stream;
  if (torch_.exchange != nullptr && torch_.use_exchange) {
    if (torch_.exchange->current_stream(dlpack::kCuda, t.device.index, &stream.handle) != 0) throw nb::python_error();
    return stream;
  }
  INGOT_CHECK(torch_.raw_stream != nullptr, "stream: found a tensor on ", t.device,
              " beside a PyTorch without CUDA, expected cpu");
  stream.handle = reinterpret_cast<void*>(nb::cast<uintptr_t>(nb::handle(torch_.raw_stream)(t.device.index)));
  return stream;
}

namespace {
bool requires_grad(nb::handle h) {  // of a plain tensor
  if (const TorchSymbols* s = torch_.symbols) return s->requires_grad(s->implementation(h));
  return attribute(h, torch_.requires_grad).ptr() == Py_True;
}
// Whether the values lie in memory without a lazy negation, and not on the meta device. Parameters have no lazy
// negation, and a parameter on the meta device is refused at its description.
bool holds_values(nb::handle h) {
  if (Py_TYPE(h.ptr()) == torch_.parameter) return true;
  if (const TorchSymbols* s = torch_.symbols) {
    const void* t = s->tensor(h);
    int32_t kind = -1;
    return s->device_type(t, &kind) == 0 && kind != s->meta && !s->is_neg(t) && !s->is_zero(t);
  }
  const auto is = [](const nb::object& found) { return found.ptr() == Py_True; };
  return !is(h.attr("is_meta")) && !is(h.attr("is_neg")()) && !is(h.attr("_is_zerotensor")());
}
// Folds an operand into `way`. Returns false if only the dispatcher can run the call.
bool join(nb::handle h, bool grad, int& way) {
  if (h.is_none()) return true;
  if (!is_plain_tensor(h) || !holds_values(h)) return false;
  if (grad && way != kDifferentiate && requires_grad(h)) way = kDifferentiate;
  return true;
}
bool modes() {
  if (const TorchSymbols* s = torch_.symbols) return s->dispatch_modes() > 0 || s->function_modes() > 0;
  return counts(torch_.dispatch_modes) || counts(torch_.function_modes);
}
bool observed() {  // a mode, transform or tracer is active
  if (modes() || call(torch_.transforms).ptr() == Py_True) return true;
  const nb::object tracing = call(torch_.tracing);
  return tracing.ptr() != Py_False && !tracing.is_none();
}
bool forward_mode() {
  PyObject* level = PyDict_GetItemWithError(torch_.forward_ad, torch_.current_level);
  // Negative outside forward mode. A version of PyTorch without this name counts as forward mode.
  const long found = level == nullptr ? 0 : PyLong_AsLong(level);
  if (PyErr_Occurred()) throw nb::python_error();
  return found >= 0;
}
template <class Tensors> int route_over(nb::handle first, const Tensors& tensors) {
  if (observed()) return kDispatch;
  const bool grad = torch_.symbols ? torch_.symbols->grad_enabled() : call(torch_.grad_enabled).ptr() == Py_True;
  if (forward_mode()) return kDispatch;  // unaffected by no_grad
  int way = kPlain;
  if (first.is_valid() && !join(first, grad, way)) return kDispatch;
  for (nb::handle h : tensors)
    if (!join(h, grad, way)) return kDispatch;
  return way;
}
}  // namespace

int route(nb::args tensors) { return route_over(nb::handle(), tensors); }
int route(std::initializer_list<nb::handle> tensors) { return route_over(nb::handle(), tensors); }
int route(nb::handle first, const std::vector<nb::object>& more) { return route_over(first, more); }

bool all_wanted_leaves(const std::vector<nb::object>& tensors) {
  const TorchSymbols* s = torch_.symbols;
  return s != nullptr && std::all_of(tensors.begin(), tensors.end(), [&](nb::handle t) {
           return is_plain_tensor(t) && s->requires_grad(s->implementation(t)) && s->is_leaf(s->tensor(t));
         });
}

const void* implementation(nb::handle tensor) { return torch_.symbols->implementation(tensor); }

bool any_autocast() {
  if (torch_.symbols != nullptr) return torch_.symbols->any_autocast();
  return torch_.any_autocast == nullptr || call(torch_.any_autocast).ptr() == Py_True;
}

void use_ways(bool symbols, bool exchange) {
  torch_.symbols = symbols ? torch_.found_symbols : nullptr;
  torch_.use_exchange = exchange;
}
bool has_exchange() { return torch_.exchange != nullptr; }
bool has_symbols() { return torch_.found_symbols != nullptr; }

}  // namespace ingot::python
