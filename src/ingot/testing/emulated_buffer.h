#pragma once
// Ordinary memory with the members of DeviceBuffer, for tests that run on a GPU or on the emulator.
#include "ingot/testing/testing.h"

namespace ingot::testing {

class EmulatedBuffer {
 public:
  EmulatedBuffer(DType dtype, Shape shape) : memory_(dtype, shape) {}
  EmulatedBuffer(DType dtype, Shape shape, int64_t row_stride) : memory_(dtype, shape, row_stride) {}
  Tensor host() const { return memory_; }
  Tensor tensor() const { return memory_; }
  operator Tensor() const { return memory_; }
  void upload() {}
  void download() {}
  bool untouched() const { return memory_.guards_intact(); }

 private:
  Buffer memory_;
};

}  // namespace ingot::testing
