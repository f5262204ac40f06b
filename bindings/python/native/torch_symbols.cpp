#include "torch_symbols.h"

#include <dlfcn.h>

#include <utility>

namespace ingot::python {
namespace {

template <class F> bool look_up(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

bool look_up_constant(void* library, const char* name, int32_t& value) {
  int32_t (*function)() = nullptr;
  if (!look_up(library, name, function)) return false;
  value = function();
  return true;
}

bool look_up_all(void* library, TorchSymbols& s) {
  const std::pair<const char*, DType> dtypes[] = {
      {"aoti_torch_dtype_float64", DType::f64},   {"aoti_torch_dtype_float32", DType::f32},
      {"aoti_torch_dtype_bfloat16", DType::bf16}, {"aoti_torch_dtype_float16", DType::f16},
      {"aoti_torch_dtype_int64", DType::i64},     {"aoti_torch_dtype_int32", DType::i32},
      {"aoti_torch_dtype_uint8", DType::u8}};
  for (const auto& [name, dtype] : dtypes) {
    int32_t code = -1;
    if (!look_up_constant(library, name, code) || code < 0 || code >= s.kDtypes) return false;
    s.dtypes[code] = {true, dtype};
  }
  return look_up_constant(library, "aoti_torch_device_type_cpu", s.cpu) &&
         look_up_constant(library, "aoti_torch_device_type_cuda", s.cuda) &&
         look_up_constant(library, "aoti_torch_device_type_meta", s.meta) &&
         look_up_constant(library, "aoti_torch_layout_strided", s.strided) &&
         look_up(library, "aoti_torch_get_dim", s.dim) && look_up(library, "aoti_torch_get_sizes", s.sizes) &&
         look_up(library, "aoti_torch_get_strides", s.strides) && look_up(library, "aoti_torch_get_data_ptr", s.data) &&
         look_up(library, "aoti_torch_get_dtype", s.dtype) && look_up(library, "aoti_torch_get_layout", s.layout) &&
         look_up(library, "aoti_torch_get_device_type", s.device_type) &&
         look_up(library, "aoti_torch_get_device_index", s.device_index) &&
         look_up(library, "_ZNK3c1010TensorImpl13requires_gradEv", s.requires_grad) &&
         look_up(library, "_ZNK2at10TensorBase7is_leafEv", s.is_leaf) &&
         look_up(library, "_ZN2at25compositeimplicitautograd6is_negERKNS_6TensorE", s.is_neg) &&
         look_up(library, "_ZN2at25compositeimplicitautograd14_is_zerotensorERKNS_6TensorE", s.is_zero) &&
         look_up(library, "_ZN3c108GradMode10is_enabledEv", s.grad_enabled) &&
         look_up(library, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", s.dispatch_modes) &&
         look_up(library, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", s.function_modes) &&
         look_up(library, "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE", s.autocast);
}

// Compares the functions' description of a tensor with its attributes.
bool describes(const TorchSymbols& s, nb::handle h) {
  if (reinterpret_cast<uintptr_t>(s.implementation(h)) != nb::cast<uintptr_t>(h.attr("_cdata"))) return false;
  const void* t = s.tensor(h);
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = -1, layout = -1, device = -1;
  void* data = nullptr;
  if (s.dim(t, &dim) != 0 || s.sizes(t, &sizes) != 0 || s.strides(t, &strides) != 0 || s.data(t, &data) != 0)
    return false;
  if (s.dtype(t, &dtype) != 0 || s.layout(t, &layout) != 0 || s.device_type(t, &device) != 0) return false;
  if (dim != nb::cast<int64_t>(h.attr("dim")())) return false;
  for (int64_t i = 0; i < dim; ++i)
    if (sizes[i] != nb::cast<int64_t>(h.attr("shape")[i]) || strides[i] != nb::cast<int64_t>(h.attr("stride")(i)))
      return false;
  return reinterpret_cast<uintptr_t>(data) == nb::cast<uintptr_t>(h.attr("data_ptr")()) && layout == s.strided &&
         device == s.cpu && s.requires_grad(s.implementation(h)) == nb::cast<bool>(h.attr("requires_grad")) &&
         s.is_leaf(t) == nb::cast<bool>(h.attr("is_leaf")) && s.is_neg(t) == nb::cast<bool>(h.attr("is_neg")()) &&
         s.is_zero(t) == nb::cast<bool>(h.attr("_is_zerotensor")());
}

// Restores the previous value.
struct GradMode {
  const nb::object set, was;
  explicit GradMode(nb::handle c) : set(c.attr("_set_grad_enabled")), was(c.attr("is_grad_enabled")()) {}
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;
  ~GradMode() {
    try {
      set(was);
    } catch (const nb::python_error&) {}
  }
};

bool answer_as_python_does(const TorchSymbols& s, nb::module_ torch) {
  const nb::object c = torch.attr("_C");
  const auto ones = [&](auto... sizes) {  // wherever and of whatever type tensors are made by default
    return torch.attr("ones")(sizes..., nb::arg("device") = "cpu", nb::arg("dtype") = torch.attr("float32"));
  };
  bool same = s.dispatch_modes() == nb::cast<int64_t>(c.attr("_len_torch_dispatch_stack")()) &&
              s.function_modes() == nb::cast<int64_t>(c.attr("_len_torch_function_stack")());
  const nb::object plain = ones(2, 3);
  const GradMode mode(c);
  for (const bool on : {false, true}) {
    mode.set(on);
    same = same && s.grad_enabled() == on;
  }
  if (const nb::object c_neg = c.attr("_VariableFunctions"); nb::hasattr(c_neg, "_neg_view"))
    same = same && describes(s, c_neg.attr("_neg_view")(plain));
  const nb::object leaf = ones(3).attr("requires_grad_")(), made = leaf.attr("unsqueeze")(1);
  return same && describes(s, plain) && describes(s, leaf) && describes(s, made) && describes(s, plain.attr("t")());
}

}  // namespace

const TorchSymbols* find_torch_symbols(nb::module_ torch) {
  static TorchSymbols found;
  try {
    void* library = dlopen("libtorch_python.so", RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr || !look_up_all(library, found)) return nullptr;
    found.at = int64_t(sizeof(PyObject));
    return answer_as_python_does(found, torch) ? &found : nullptr;
  } catch (const std::exception&) { return nullptr; }
}

}  // namespace ingot::python
