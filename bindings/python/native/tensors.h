#pragma once
// torch.Tensor objects as ingot::Tensor views and back-end streams. This code is compiled without PyTorch and asks the
// objects themselves.
#include <nanobind/nanobind.h>

#include <initializer_list>
#include <vector>

#include "ingot/core/tensor.h"

namespace ingot::python {

namespace nb = nanobind;

// Called once by ingot/__init__: the torch module, the source of all further objects looked up and kept.
void attach(nb::module_ torch);

// The tensor with its leading dimensions merged until at most `rank` are left; the last stays separate. None: an empty
// view. A merge forbidden by the strides is an error with op and argument.
Tensor view(const char* op, const char* name, nb::handle tensor, int rank);
inline Tensor matrix(const char* op, const char* name, nb::handle t) { return view(op, name, t, 2); }
// (T, H, D) of a tensor with at least three dimensions.
Tensor heads(const char* op, const char* name, nb::handle t);
// (B, R, C) of a tensor with three dimensions, unchanged.
Tensor bank(const char* op, const char* name, nb::handle t);
inline Tensor vector(const char* op, const char* name, nb::handle t) { return view(op, name, t, 1); }

// PyTorch's name of a dtype, for error messages: torch.float32.
const char* torch_name(DType dtype);
// Returns `t`, or throws if the operations do not compute in its dtype.
const Tensor& floats(const char* op, const char* name, const Tensor& t);

// Whether kernels can read whole vectors: an address at a multiple of 16 bytes on a GPU, like allocations.
inline bool aligned(const Tensor& t) {
  return t.device.kind == Device::cpu || reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}
constexpr int kMaxDims = 64;  // PyTorch's own limit
struct Sizes {
  int rank = 0;
  int64_t of[kMaxDims];
};
// The view (rows, columns), or of all elements, of a contiguous tensor; false for all further tensors, and for tensors
// without dimensions.
bool dense_matrix(const char* op, const char* name, nb::handle tensor, Tensor& out, Sizes* sizes = nullptr);
bool dense_vector(const char* op, const char* name, nb::handle tensor, Tensor& out, int* rank = nullptr);

// New tensors from PyTorch's allocator, and their views in `view`. `like`: any tensor on the device.
nb::object empty(nb::handle like, Device device, DType dtype, const Sizes& sizes,
                 Tensor& view);  // view: (rows, columns)
nb::object empty_vector(nb::handle like, Device device, DType dtype, int64_t size, Tensor& view);

// Runs an op without the interpreter lock: a launch may wait for room in the GPU's queue, and a CPU op takes long.
template <class Op> void unlocked(Op&& op) {
  const nb::gil_scoped_release released;
  op();
}

// The stream PyTorch would launch on for this tensor's device.
Stream stream_of(const Tensor& t);

// The ways for a module to run an op on these tensors.
enum Route : int {
  kDispatch = 0,  // through torch.ops: something watches or transforms operations, or an operand is not a plain tensor
  kPlain = 1,     // straight to the kernel: no gradients are recorded
  kDifferentiate = 2,  // through an autograd.Function
};
int route(nb::args tensors);
int route(std::initializer_list<nb::handle> tensors);
int route(nb::handle first, const std::vector<nb::object>& more);

// Whether each tensor is a leaf with a required gradient; false also where only Python could determine this.
bool all_wanted_leaves(const std::vector<nb::object>& tensors);
const void* implementation(nb::handle tensor);  // address of the C++ tensor behind such an object
bool any_autocast();                            // for a CPU or a GPU; true where PyTorch does not say

// Allows the faster ways to ask PyTorch: functions of its libraries, then DLPack's exchange (2.10 and later); the last
// way is Python.
void use_ways(bool symbols, bool exchange);
bool has_exchange();
bool has_symbols();

}  // namespace ingot::python
