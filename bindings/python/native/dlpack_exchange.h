#pragma once
// The binary interface through which PyTorch (2.10 and later) describes a tensor's memory, and its current stream,
// without Python calls: DLPack 1.x, `torch.Tensor.__dlpack_c_exchange_api__`. Only the fields read here are declared;
// the names are Ingot's, the layout is the standard's.
#include <cstdint>

namespace ingot::python::dlpack {

enum DeviceKind : int32_t { kCpu = 1, kCuda = 2, kCudaPinned = 3 };
enum TypeCode : uint8_t { kInt = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4 };

struct View {
  void* data;
  int32_t device_kind, device_index;
  int32_t rank;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;  // in elements; the tensor's own arrays
  uint64_t byte_offset;
};
static_assert(sizeof(View) == 48, "the layout of DLTensor on a 64-bit machine");

struct Exchange {
  uint32_t major, minor;
  Exchange* previous;
  void* allocate;
  void* own_from_python;
  void* own_to_python;
  int (*view)(void* py_object, View* out);  // borrows; 0, or -1 with a Python error set
  int (*current_stream)(int32_t device_kind, int32_t device_index, void** out);
};

}  // namespace ingot::python::dlpack
