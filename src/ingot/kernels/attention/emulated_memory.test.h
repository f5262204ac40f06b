#pragma once
// The calls of the GPU's entry points on the emulator (attention_fp64.test.h).
#include "ingot/kernels/attention/attention_fp64.test.h"
#include "ingot/testing/emulated_buffer.h"

namespace ingot::cuda {
void attention(const Attention& a, Stream stream);
void attention_backward(const AttentionBackward& a, Stream stream);
int64_t attention_backward_workspace_bytes(const AttentionBackward& a);
}  // namespace ingot::cuda

namespace ingot::testing {

struct OnEmulator {
  using Storage = EmulatedBuffer;
  static void run(const Attention& a) { cuda::attention(a, {}); }
  static void run(const AttentionBackward& a) { cuda::attention_backward(a, {}); }
  static int64_t workspace_bytes(const AttentionBackward& a) { return cuda::attention_backward_workspace_bytes(a); }
};

}  // namespace ingot::testing
