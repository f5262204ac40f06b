#pragma once
// torch.Tensor objects as ingot::Tensor views and back-end streams. This code is compiled without PyTorch: it asks the
// objects themselves.
#include <nanobind/nanobind.h>

#include <initializer_list>
#include <vector>

#include "ingot/core/tensor.h"

namespace ingot::python {

namespace nb = nanobind;

// Called once by ingot/__init__: the torch module, from which everything else is looked up and kept.
void attach(nb::module_ torch);

// The tensor with its leading dimensions merged until at most `rank` are left; the last stays alone. None: an empty
// view. Merging that the strides do not allow is an error that names op and argument.
Tensor view(const char* op, const char* name, nb::handle tensor, int rank);
inline Tensor matrix(const char* op, const char* name, nb::handle t) { return view(op, name, t, 2); }
// (T, H, D) of a tensor with at least three dimensions.
Tensor heads(const char* op, const char* name, nb::handle t);
// (B, R, C) of a tensor with three dimensions, as they are.
Tensor bank(const char* op, const char* name, nb::handle t);
inline Tensor vector(const char* op, const char* name, nb::handle t) { return view(op, name, t, 1); }

// `t` itself, which must be of a type that the operations compute in.
const Tensor& floats(const char* op, const char* name, const Tensor& t);

// Where kernels that read whole vectors can: a GPU's memory at a multiple of 16 bytes, as it is allocated.
inline bool aligned(const Tensor& t) {
  return t.device.kind == Device::cpu || reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}
constexpr int kMaxDims = 64;  // PyTorch's own limit
struct Sizes {
  int rank = 0;
  int64_t of[kMaxDims];
};
// (rows, columns), or all elements, of a tensor that is; false of one that is not, or has no dimension.
bool dense_matrix(const char* op, const char* name, nb::handle tensor, Tensor& out, Sizes* sizes = nullptr);
bool dense_vector(const char* op, const char* name, nb::handle tensor, Tensor& out);

// New tensors from PyTorch's allocator, and in `view` what they view. `like`: any tensor on that device.
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

// How a module may run an op on these tensors.
enum Route : int {
  kDispatch = 0,  // through torch.ops: something watches or transforms operations, or an operand is not a plain tensor
  kPlain = 1,     // straight to the kernel: nobody will ask for gradients
  kDifferentiate = 2,  // through an autograd.Function
};
int route(nb::args tensors);
int route(std::initializer_list<nb::handle> tensors);
int route(nb::handle first, const std::vector<nb::object>& more);

// Whether autograd would give each of these a gradient and stop there; false too where only Python could tell.
bool all_wanted_leaves(const std::vector<nb::object>& tensors);
const void* implementation(nb::handle tensor);  // what its object stands for, of these
bool any_autocast();                            // for a CPU or a GPU at least; true where PyTorch does not say

// Of the ways to ask PyTorch, from the fastest on: functions of its libraries, DLPack's exchange (2.10 and later),
// Python.
void use_ways(bool symbols, bool exchange);
bool has_exchange();
bool has_symbols();

}  // namespace ingot::python
