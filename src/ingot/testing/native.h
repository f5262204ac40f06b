#pragma once
// Shared by libingot_bench.so's functions (<room>.native.cpp): the shipped entry points over raw pointers and a stream,
// for timing in a Python process beside PyTorch. Every function returns 0, or 1 with the reason in ingot_bench_error().
// A build of some rooms (INGOT_ROOMS) has the functions of these.
#include <string>
#include <utility>

#include "ingot/core/tensor.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace ingot::testing {

inline thread_local std::string native_error;

template <class Use> int guarded(Use&& use) {
  try {
    std::forward<Use>(use)();
    return 0;
  } catch (const std::exception& e) {
    native_error = e.what();
    return 1;
  }
}

inline DType dtype_named(const std::string& name) {
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    if (name_of(t) == name) return t;
  fail(ErrorCode::usage, "bench: found dtype ", name, ", expected f32, bf16 or f16");
}

inline constexpr Device kGpu{Device::cuda, 0};
inline Tensor raw(void* data, int64_t bytes) { return Tensor(data, DType::u8, {bytes}, kGpu); }

}  // namespace ingot::testing
