#pragma once
// Exported functions of PyTorch's libraries, looked up by name in the running process: each takes a few nanoseconds, a
// tenth of its Python counterpart. This code is compiled without PyTorch, so the functions are used only if all exist
// and describe a few test tensors as Python does; otherwise Python's functions are called.
#include <nanobind/nanobind.h>

#include "ingot/core/tensor.h"

namespace ingot::python {

namespace nb = nanobind;

struct TorchSymbols {
  // Of the stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h). A tensor is the address of an at::Tensor.
  int32_t (*dim)(const void* tensor, int64_t* out);
  int32_t (*sizes)(const void* tensor, int64_t** out);  // the tensor's own array, as are strides
  int32_t (*strides)(const void* tensor, int64_t** out);
  int32_t (*data)(const void* tensor, void** out);
  int32_t (*dtype)(const void* tensor, int32_t* out);
  int32_t (*layout)(const void* tensor, int32_t* out);
  int32_t (*device_type)(const void* tensor, int32_t* out);
  int32_t (*device_index)(const void* tensor, int32_t* out);
  // C++ functions: their mangled names state their arguments.
  bool (*requires_grad)(const void* impl);
  bool (*is_leaf)(const void* tensor);
  bool (*is_neg)(const void* tensor);   // its memory holds the values' negatives
  bool (*is_zero)(const void* tensor);  // zeros without memory
  bool (*grad_enabled)();
  int64_t (*dispatch_modes)();
  int64_t (*function_modes)();
  bool (*autocast)(int8_t device_type);

  int64_t at = 0;  // where a torch.Tensor object holds its at::Tensor, a pointer to the implementation
  int32_t cpu, cuda, meta, strided;
  static constexpr int kDtypes = 32;
  struct Known {
    bool known = false;
    DType dtype = DType::f32;
  } dtypes[kDtypes];

  const void* tensor(nb::handle h) const { return reinterpret_cast<const char*>(h.ptr()) + at; }
  const void* implementation(nb::handle h) const { return *static_cast<void* const*>(tensor(h)); }
  bool any_autocast() const { return autocast(int8_t(cpu)) || autocast(int8_t(cuda)); }
};

// Null if the functions must not be used.
const TorchSymbols* find_torch_symbols(nb::module_ torch);

}  // namespace ingot::python
