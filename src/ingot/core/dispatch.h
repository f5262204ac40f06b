#pragma once
// INGOT_DISPATCH(room, device, op, arguments...) calls cpu::op or cuda::op. CMake defines INGOT_HAS_CUDA_<ROOM> to 1
// where kernels/<room>/<room>.cu is part of the build; elsewhere a CUDA tensor is refused by name.
#include "ingot/core/tensor.h"

namespace ingot::detail {
[[noreturn]] inline void no_cuda(const char* op, Device device) {
#ifdef INGOT_CUDA_BUILD
  fail(ErrorCode::unsupported, op, ": found a tensor on ", device,
       ", but this op has no CUDA kernel yet; expected cpu");
#else
  fail(ErrorCode::unsupported, op, ": found a tensor on ", device, ", but Ingot was built without CUDA; expected cpu");
#endif
}
}  // namespace ingot::detail

#define INGOT_DISPATCH_CPU_ONLY(device, op, ...)                \
  ((device).kind == ::ingot::Device::cpu ? cpu::op(__VA_ARGS__) \
                                         : (::ingot::detail::no_cuda(#op, (device)), cpu::op(__VA_ARGS__)))
#define INGOT_DISPATCH_WITH_CUDA(device, op, ...) \
  ((device).kind == ::ingot::Device::cpu ? cpu::op(__VA_ARGS__) : cuda::op(__VA_ARGS__))
