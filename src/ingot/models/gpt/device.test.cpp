// Requirements of a model on a device: memory from any allocator, and no reads of device memory on the host.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ingot/models/gpt/gpt.h"
#include "ingot/testing/poisoned_memory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;

GptConfig small(const std::string& preset) {
  GptConfig c = gpt_preset(preset);
  c.vocab = 37, c.dim = 24, c.heads = 4, c.kv_heads = preset == "golf" ? 2 : 4, c.head_dim = 8, c.mlp_hidden = 40;
  c.layers = preset == "golf" ? 6 : 2, c.context = 32;
  if (preset == "golf") c.rotary_dim = 4, c.xsa_layers = 4, c.lane_start = 4, c.loop_first = 1, c.loop_last = 2;
  return c;
}

struct Documents {
  std::vector<int32_t> tokens{1, 5, 9, 30, 2, 7, 7, 11}, targets{5, 9, 30, 2, -1, 7, 11, 3},
      positions{0, 1, 2, 3, 4, 0, 1, 2}, cu{0, 5, 8};
  TokenBatch batch() {
    return {Tensor(tokens.data(), {8}), Tensor(targets.data(), {8}), Tensor(positions.data(), {8}),
            Tensor(cu.data(), {3})};
  }
};

struct Numbers {
  std::vector<double> loss, grads;
  bool operator==(const Numbers&) const = default;
};
Numbers losses_and_gradients(const GptConfig& c, Allocator* memory, const TokenBatch& batch, bool keep_rows = false) {
  const ParameterLayout layout(c);
  Buffer weights(DType::f32, {layout.padded_count()}), grads(DType::f32, {layout.padded_count()});
  Buffer loss(DType::f32, {8}), dloss(DType::f32, {8});
  initialise(c, layout, weights, 3);
  testing::fill_normal(dloss, 5);
  fill_zero(grads);
  Gpt model(c, DType::f32, {.capacity = 9, .training = true, .keep_rows = keep_rows, .memory = memory});
  model.losses_and_gradients(weights.tensor(), batch, dloss, loss, grads);
  return {testing::values(loss), testing::values(grads)};
}

TEST(gpt_device, every_activation_is_written_before_it_is_read) {
  for (const char* preset : {"nano", "golf"}) {
    Documents d;
    testing::PoisonedMemory poisoned;
    EXPECT_EQ(losses_and_gradients(small(preset), &poisoned, d.batch()),
              losses_and_gradients(small(preset), nullptr, d.batch()))
        << preset;
    EXPECT_EQ(poisoned.taken(), 0);
  }
}

// The backward pass must find all rows that the forward pass kept.
TEST(gpt_device, kept_rows_change_no_bit) {
  for (const char* preset : {"nano", "golf"}) {
    Documents d;
    testing::PoisonedMemory poisoned;
    EXPECT_EQ(losses_and_gradients(small(preset), &poisoned, d.batch(), true),
              losses_and_gradients(small(preset), nullptr, d.batch()))
        << preset;
  }
}

TEST(gpt_device, control_flow_reads_the_host_copies) {
  Documents d, twin;
  TokenBatch batch = d.batch();
  batch.host_positions = twin.batch().positions, batch.host_cu_seqlens = twin.batch().cu_seqlens;
  EXPECT_EQ(losses_and_gradients(small("golf"), nullptr, batch),
            losses_and_gradients(small("golf"), nullptr, d.batch()));
  twin.cu = {0, 4, 9};
  batch.host_cu_seqlens = twin.batch().cu_seqlens;
  EXPECT_THROW(losses_and_gradients(small("golf"), nullptr, batch), Error);
  twin.positions[3] = 32;
  batch.host_cu_seqlens = {};
  EXPECT_THROW(losses_and_gradients(small("golf"), nullptr, batch), Error);
}

template <class Call> std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) { return e.what(); }
  return "no error";
}

#if !defined(INGOT_CUDA_BUILD) && !defined(INGOT_EMULATED_DEVICE)
TEST(gpt_device, a_gpu_is_refused_by_name_without_cuda) {
  const std::string error = error_of([] {
    Gpt(small("nano"), gpt_types({Device::cuda, 0}), {.capacity = 8, .device = {Device::cuda, 0}});
  });
  EXPECT_NE(error.find("cuda:0, but Ingot was built without CUDA"), std::string::npos) << error;
}
#endif

TEST(gpt_device, types_and_devices_that_do_not_fit_together_are_refused) {
  const GptConfig c = small("nano");
  const GptTypes mixed(DType::f32, DType::bf16, DType::bf16);
  EXPECT_NE(error_of([&] { Gpt(c, mixed, {.capacity = 8}); }).find("on cpu, expected one type"), std::string::npos);
  EXPECT_NE(error_of([&] { Gpt(c, DType::bf16, {.capacity = 8}); }).find("found weights of bf16"), std::string::npos);
  Documents d;
  const ParameterLayout layout(c);
  Buffer weights(DType::f32, {layout.padded_count()}), loss(DType::f32, {8});
  Gpt model(c, DType::f32, {.capacity = 8});
  TokenBatch elsewhere = d.batch();
  elsewhere.tokens.device = {Device::cuda, 0};
  EXPECT_NE(error_of([&] { model.losses(weights.tensor(), elsewhere, loss); }).find("cuda:0"), std::string::npos);
  const GptWeights copied(weights, weights);
  EXPECT_NE(error_of([&] { model.losses(copied, d.batch(), loss); }).find("a copy of the weights"), std::string::npos);
}

}  // namespace
}  // namespace ingot
