#pragma once
// The types of numbers in GPU kernels.
#include "ingot/core/dtype.h"

namespace ingot {

// Calls use(T{}) with the C++ type of the dtype; unsupported types are refused by name.
template <class Use> decltype(auto) with_gpu_float_type(DType t, const char* op, Use&& use) {
  switch (t) {
    case DType::f32: return use(float{});
    case DType::bf16: return use(bf16{});
    case DType::f16: return use(f16{});
    default: fail(ErrorCode::unsupported, op, ": found dtype ", t, " on a GPU, expected f32, bf16 or f16");
  }
}

}  // namespace ingot
