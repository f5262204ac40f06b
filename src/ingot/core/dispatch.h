#pragma once
// INGOT_DISPATCH(ROOM, device, op, arguments...); calls cpu::op or cuda::op, both declared in the room's .cpp. CMake
// defines INGOT_HAS_CUDA_<ROOM> where kernels/<room>/<room>.cu is part of the build; elsewhere cuda::op is never
// referred to, and a CUDA tensor is refused by name. The room's sizes of workspace ask INGOT_HAS_CUDA(ROOM) too:
//   if constexpr (INGOT_HAS_CUDA(ROOM))
//     if (device.kind == Device::cuda) return cuda::op_workspace_bytes(...);
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

// 1 where the room's macro is defined as 1, else 0: a defined macro becomes "0," and shifts the arguments.
#define INGOT_HAS_CUDA(ROOM) INGOT_DETAIL_IS_ONE(INGOT_HAS_CUDA_##ROOM)
#define INGOT_DETAIL_IS_ONE(value) INGOT_DETAIL_SHIFTED(value)
#define INGOT_DETAIL_SHIFTED(value) INGOT_DETAIL_PICK(INGOT_DETAIL_SHIFT_##value 1, 0, 0)
#define INGOT_DETAIL_SHIFT_1 0,
#define INGOT_DETAIL_PICK(...) INGOT_DETAIL_SECOND(__VA_ARGS__)  // the comma counts after expansion of the macro
#define INGOT_DETAIL_SECOND(first, second, ...) second

#define INGOT_DISPATCH(ROOM, device, op, ...)  \
  do {                                         \
    if ((device).kind == ::ingot::Device::cpu) \
      cpu::op(__VA_ARGS__);                    \
    else if constexpr (INGOT_HAS_CUDA(ROOM))   \
      cuda::op(__VA_ARGS__);                   \
    else                                       \
      ::ingot::detail::no_cuda(#op, (device)); \
  } while (0)
// For an op without CUDA code.
#define INGOT_DISPATCH_CPU_ONLY(device, op, ...)                                        \
  do {                                                                                  \
    if ((device).kind != ::ingot::Device::cpu) ::ingot::detail::no_cuda(#op, (device)); \
    cpu::op(__VA_ARGS__);                                                               \
  } while (0)
