// Runs the portable kernels on the CPU, under sanitizers, and compares them with the fp64 loop under the bounds of the
// GPU suite. Shapes are small, because a block of 128 threads takes milliseconds for each step.
#include "ingot/kernels/attention/portable/portable.h"

#include <gtest/gtest.h>

#include "ingot/kernels/attention/delta.h"
#include "ingot/kernels/attention/emulated_memory.test.h"

namespace ingot {
namespace {

using Case = testing::AttentionCase;
using testing::Definition;
using testing::Lengths;
using testing::Order;

class AttentionPortableEmulated : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(, AttentionPortableEmulated, ::testing::Values(DType::bf16, DType::f16),
                         [](const auto& info) { return std::string(ingot::detail::concat(info.param)); });

// Selects the kernels for a GPU of this compute capability: 8.0 and 8.6 have less shared memory than 9.0.
const char* capability = "9.0";
struct OnGpuOfCapability {
  using Storage = testing::EmulatedBuffer;
  static void run(const Attention& a) { cuda::attention_portable::forward(a, gpu::limits_of(capability), {}); }
  static void run(const AttentionBackward& a) {
    float* const delta = static_cast<float*>(a.workspace.data);
    if (a.q.size(0) > 0) cuda::attention_row_sums(a, delta, a.q.size(0), {});
    cuda::attention_portable::backward(a, delta, gpu::limits_of(capability), {});
  }
  static int64_t workspace_bytes(const AttentionBackward& a) { return a.q.size(0) * a.q.size(1) * 4; }
};

void expect_fp64(Case c) {
  if (c.keys.empty()) c.keys = c.queries;
  SCOPED_TRACE(::testing::PrintToString(c));
  testing::AttentionOperands<OnGpuOfCapability> a(c);
  double of_output = 0, of_gradients[3] = {};
  testing::expect_output(a, of_output);
  std::optional<Definition> want;
  testing::expect_gradients(a, Order::fixed, want, of_gradients);
}

TEST_P(AttentionPortableEmulated, AgreesWithFp64AtEveryHeadSizeAndGroup) {
  const DType type = GetParam();
  for (int64_t d : {8, 40, 64, 128, 256}) {
    expect_fp64({.queries = {70, 0, 5}, .heads = 3, .kv_heads = 1, .d = d, .type = type, .gap = 8});
    expect_fp64({.queries = {20}, .heads = 2, .kv_heads = 2, .d = d, .type = type, .causal = false});
  }
  expect_fp64({.queries = {33}, .heads = 7, .kv_heads = 1, .type = type});
  expect_fp64({.queries = {9, 30}, .heads = 14, .kv_heads = 2, .type = type});
}

TEST_P(AttentionPortableEmulated, AgreesWithFp64WithWindowsSinksCapsAndKeysOfTheirOwn) {
  const DType type = GetParam();
  const Case some[] = {
      {.queries = {150, 0, 20}, .window = 40, .sinks = true},
      {.queries = {150}, .window = 5},
      {.queries = {140}, .softcap = 10, .window = 1, .sinks = true},
      {.queries = {5, 66}, .keys = {130, 70}, .sinks = true},
      {.queries = {90, 9}, .keys = {31, 9}},                               // the first queries see nothing
      {.queries = {90, 9}, .keys = {31, 9}, .window = 12, .sinks = true},  // the first queries see nothing but the sink
      {.queries = {33, 20}, .keys = {100, 0}, .causal = false, .sinks = true},
      {.queries = {10, 20}, .keys = {0, 0}, .sinks = true},
      {.queries = {100}, .size = 12},  // huge scores
      {.queries = {60}, .scale = -0.1},
      {.queries = {60}, .scale = 0},
      {.queries = {130}, .d = 128, .softcap = 20, .window = 50},
      {.queries = {70}, .d = 256, .softcap = 20},
      {.queries = Lengths(9, 17), .heads = 3, .kv_heads = 3},
  };
  for (Case c : some) {
    c.type = type;
    expect_fp64(c);
  }
}

// Up to 128 columns the kernels differ by the GPU's shared memory; the cases have several tiles and several heads of a
// group.
TEST_P(AttentionPortableEmulated, AgreesWithFp64ForEverySizeOfSharedMemory) {
  const DType type = GetParam();
  for (const char* one : {"8.0", "8.6", "9.0"}) {
    SCOPED_TRACE(one);
    capability = one;
    expect_fp64({.queries = {150, 0, 20}, .heads = 3, .d = 128, .type = type, .window = 70, .sinks = true});
    expect_fp64({.queries = {40}, .keys = {90}, .d = 72, .type = type, .gap = 8});
    expect_fp64({.queries = {70, 9}, .heads = 3, .d = 64, .type = type, .window = 30});
    expect_fp64({.queries = {33, 20}, .keys = {100, 0}, .d = 96, .type = type, .causal = false});
  }
  capability = "9.0";
}

TEST(AttentionPortable, TwoBlocksFitOrTheSmallerVariantIsTaken) {
  using cuda::attention_portable::forward_kernel, cuda::attention_portable::key_gradient_kernel,
      cuda::attention_portable::query_gradient_kernel, cuda::attention_portable::two_fit;
  for (const char* one : {"8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}) {
    const gpu::Limits limits = gpu::limits_of(one);
    for (int width : {64, 128}) {
      EXPECT_TRUE(two_fit(forward_kernel<f16>(width, limits).smem, limits)) << one << ' ' << width;
      EXPECT_TRUE(two_fit(query_gradient_kernel<f16>(width, limits).smem, limits)) << one << ' ' << width;
      for (bool capped : {false, true})
        EXPECT_TRUE(two_fit(key_gradient_kernel<f16>(width, capped, limits).smem, limits)) << one << ' ' << width;
    }
  }
  // Tiles are larger where shared memory has room for two blocks.
  EXPECT_GT(forward_kernel<f16>(128, gpu::limits_of("8.0")).rows, forward_kernel<f16>(128, gpu::limits_of("8.6")).rows);
  EXPECT_GT(query_gradient_kernel<f16>(64, gpu::limits_of("9.0")).rows,
            query_gradient_kernel<f16>(64, gpu::limits_of("8.6")).rows);
}

}  // namespace
}  // namespace ingot
