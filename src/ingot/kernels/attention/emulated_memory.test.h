#pragma once
// Ordinary memory as the storage of attention's operands, and the calls of the GPU's entry points on the emulator
// (attention_fp64.test.h).
#include "ingot/kernels/attention/attention_fp64.test.h"

namespace ingot::cuda {
void attention(const Attention& a, Stream stream);
void attention_backward(const AttentionBackward& a, Stream stream);
int64_t attention_backward_workspace_bytes(const AttentionBackward& a);
}  // namespace ingot::cuda

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

struct OnEmulator {
  using Storage = EmulatedBuffer;
  static void run(const Attention& a) { cuda::attention(a, {}); }
  static void run(const AttentionBackward& a) { cuda::attention_backward(a, {}); }
  static int64_t workspace_bytes(const AttentionBackward& a) { return cuda::attention_backward_workspace_bytes(a); }
};

}  // namespace ingot::testing
