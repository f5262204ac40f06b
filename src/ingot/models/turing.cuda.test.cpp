// What a GPU of compute capability 7.5 gets: operations over rows run, every other operation is refused in one line.
// The GPU is the emulator's, or a newer one that INGOT_GPU_AS=7.5 limits.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "ingot/gpu/device.h"
#include "ingot/gpu/limits.h"
#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/cross_entropy/cross_entropy.h"
#include "ingot/kernels/grouped/grouped.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/kernels/mlp/mlp.h"
#include "ingot/kernels/muon/muon.h"
#include "ingot/kernels/softcap/softcap.h"
#include "ingot/kernels/swiglu/swiglu.h"
#include "ingot/testing/emulated_limits.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

class TuringCuda : public testing::GpuTest<> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    if (gpu::limits(0).capability != 75) GTEST_SKIP() << "needs INGOT_GPU_AS=7.5";
    memory_ = gpu::DeviceMemory(kBytes);
    gpu::fill_bytes(memory_.data(), 0, kBytes, {});
  }
  // A tensor of zeros; all tensors share the memory.
  Tensor zeros(DType dtype, Shape shape) const { return Tensor(memory_.data(), dtype, shape, {Device::cuda, 0}); }

 private:
#ifdef INGOT_EMULATED_DEVICE
  const testing::EmulatedLimits limits_{"7.5"};
#endif
  static constexpr int64_t kBytes = int64_t(64) << 20;
  gpu::DeviceMemory memory_;
};

TEST_F(TuringCuda, EveryOperationWithoutAKernelIsRefusedInOneLine) {
  const Tensor m = zeros(DType::bf16, {32, 64}), square = zeros(DType::bf16, {64, 64}),
               heads = zeros(DType::bf16, {32, 2, 32});
  const Tensor bank = zeros(DType::f32, {1, 64, 64}), one = zeros(DType::f32, {64, 64}),
               each = zeros(DType::f32, {2, 32, 32});
  const Tensor room = zeros(DType::u8, {64 << 20}), loss = zeros(DType::f32, {32}), lse = zeros(DType::f32, {2, 32});
  const Tensor cu = zeros(DType::i32, {2}), targets = zeros(DType::i32, {32});
  const std::vector<MlpLayer> layers{{.w = square}};
  const struct {
    const char* op;
    std::function<void()> call;
  } calls[] = {
      {"linear", [&] { linear({.x = m, .w = square, .y = m}, {}); }},
      {"linear", [&] { linear({.x = m, .w = square, .y = m, .act = activation_named("relu")}, {}); }},
      {"linear_backward", [&] { linear_backward({.dy = m, .x = m, .w = square, .dx = m, .dw = square}, {}); }},
      {"linear_backward", [&] { linear_backward({.dy = m, .db = zeros(DType::f32, {64})}, {}); }},
      {"matmul", [&] { matmul({.a = m, .b = square, .c = m}, {}); }},
      {"matmul_each", [&] { matmul_each({.a = each, .b = each, .c = each}, {}); }},
      {"gated_linear",
       [&] { gated_linear({.x = m, .w_gate = square, .w_up = square, .h = m, .workspace = room}, {}); }},
      {"gated_linear_backward",
       [&] {
         gated_linear_backward(
             {.dh = m, .x = m, .w_gate = square, .w_up = square, .gate = m, .up = m, .dx = m, .workspace = room}, {});
       }},
      {"linear_cross_entropy",
       [&] { linear_cross_entropy({.x = m, .w = square, .targets = targets, .loss = loss, .workspace = room}, {}); }},
      {"muon", [&] { muon({.p = bank, .g = bank, .momentum = bank, .workspace = room}, {}); }},
      {"newton_schulz", [&] { newton_schulz({.x = one, .workspace = room}, {}); }},
      {"attention", [&] { attention({.q = heads, .k = heads, .v = heads, .cu_q = cu, .out = heads, .lse = lse}, {}); }},
      {"attention_backward",
       [&] {
         attention_backward({.q = heads,
                             .k = heads,
                             .v = heads,
                             .cu_q = cu,
                             .out = heads,
                             .lse = lse,
                             .dout = heads,
                             .dq = heads,
                             .dk = heads,
                             .dv = heads,
                             .workspace = room},
                            {});
       }},
#ifdef INGOT_HAS_CUDA_GROUPED  // has no form for a CPU
      {"grouped_linear",
       [&] {
         grouped_linear({.x = m,
                         .w = static_cast<const uint8_t*>(square.data),
                         .format = WeightFormat::bf16,
                         .groups = 1,
                         .n = 64,
                         .bias = nullptr,
                         .offsets = cu.ptr<int32_t>(),
                         .y = zeros(DType::f32, {32, 64})},
                        {});
       }},
#endif
#ifdef INGOT_HAS_CUDA_MLP  // has no emulated form
      {"mlp", [&] { mlp({.x = m, .y = m, .layers = layers, .workspace = room}, {}); }},
      {"mlp_backward",
       [&] { mlp_backward({.dy = m, .x = m, .dx = m, .layers = layers, .grads = {{}}, .workspace = room}, {}); }},
#endif
  };
  for (const auto& [op, call] : calls)
    EXPECT_EQ(testing::error_of(call),
              std::string("unsupported: ") + op + ": found a GPU of compute capability 7.5, expected 8.0 or later");
}

// The rooms' own tests compare values (with INGOT_GPU_AS=7.5: docs/gpu-layer.md).
TEST_F(TuringCuda, AnOperationOverRowsRuns) {
  const Tensor x = zeros(DType::f32, {3, 5});
  softcap({.x = x, .y = x, .cap = 30}, {});
  gpu::synchronize();
}

}  // namespace
}  // namespace ingot
