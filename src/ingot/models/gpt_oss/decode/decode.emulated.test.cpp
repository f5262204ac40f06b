// The kernels of a decode step on the CPU: what a sanitizer can see of them, and that their numbers are right.
#include "ingot/models/gpt_oss/decode/decode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "ingot/models/gpt_oss/decode/decode_cases.test.h"
#include "ingot/models/gpt_oss/decode/megakernel.h"
#include "ingot/models/gpt_oss/gpt_oss.h"

namespace ingot {
namespace {

using testing::DecodeCase;
using testing::DecodeModel;

// A model in ordinary memory, as its kernels see it.
struct Emulated {
  const GptOssConfig& c;
  uint32_t capacity;
  std::vector<char> memory, cache;
  std::vector<float> cos, sin;
  gpt_oss_decode::Model model;
  gpt_oss_decode::Buffers buffers;
  bool megakernel = false;  // for single tokens
  std::vector<gpt_oss_decode::LayerStages> stages;
  uint32_t stop = gpu::kRunning, host_stop = 0;
  gpu::WaitRecord record;

  Emulated(const DecodeModel& m, uint32_t room) : c(m.config), capacity(room) {
    using namespace gpt_oss_decode;
    memory.resize(size_t(lay_out(c, capacity, nullptr, buffers)) + 256);
    lay_out(c, capacity, aligned(memory), buffers);
    cos.resize(size_t(capacity * c.head_dim / 2)), sin = cos;
    rope_table(rope_frequencies(c.head_dim, c.rope_base, c.rope_scaling),
               Tensor(cos.data(), {capacity, c.head_dim / 2}), Tensor(sin.data(), {capacity, c.head_dim / 2}));
    model.config = c;
    model.embed = m.weights.embed.data.ptr<bf16>();
    model.norm = m.weights.norm.ptr<float>(), model.cos = cos.data(), model.sin = sin.data();
    model.head = matrix_of(m.weights.head);
    const int64_t rows_of_all = capacity * c.kv_heads * cache_dim(c) * 2 * 2;
    cache.resize(size_t(rows_of_all * c.layers) + 256, char(0xff));  // NaN: nothing may be read before it is written
    char* at = aligned(cache);
    for (size_t l = 0; l < m.weights.layers.size(); ++l) {
      const GptOssLayer& w = m.weights.layers[l];
      const auto vector = [](const Tensor& t) { return t ? t.ptr<float>() : nullptr; };
      Layer y{.attn_norm = vector(w.attn_norm),
              .mlp_norm = vector(w.mlp_norm),
              .b_qkv = vector(w.b_qkv),
              .b_o = vector(w.b_o),
              .b_router = vector(w.b_router),
              .sinks = vector(w.sinks),
              .b_gate_up = vector(w.b_gate_up),
              .b_down = vector(w.b_down)};
      y.qkv = matrix_of(w.qkv), y.o = matrix_of(w.o), y.router = matrix_of(w.router);
      y.gate_up = matrix_of(w.gate_up), y.down = matrix_of(w.down);
      y.window = c.sliding[l] ? uint32_t(c.window) : 0;
      y.cache_rows = c.sliding[l] ? std::min<uint32_t>(capacity, uint32_t(c.window) - 1 + kColumns) : capacity;
      y.keys = reinterpret_cast<bf16*>(at), y.values = y.keys + c.kv_heads * y.cache_rows * cache_dim(c);
      at += rows_of_all;
      // Numbers beyond head_dim are zeros by agreement.
      std::fill(reinterpret_cast<char*>(y.keys), at, cache_dim(c) > c.head_dim ? char(0) : char(0xff));
      model.layers.push_back(y);
    }
    stages = stages_of(model, buffers, capacity);
  }
  static char* aligned(std::vector<char>& v) {
    return reinterpret_cast<char*>((uintptr_t(v.data()) + 255) / 256 * 256);
  }

  void run_one_kernel(const gpt_oss_decode::Step& step, uint32_t missing = ~0u) {
    const gpu::Watch watch{.stop = &stop, .host_stop = &host_stop, .record = &record, .limit_ns = 50'000'000};
    run_megakernel(model, buffers, step, {.layers = stages.data(), .watch = watch, .blocks = 3, .missing = missing},
                   {});
  }

  // The logits of the last `rows` tokens.
  std::vector<std::vector<double>> extend(std::span<const int32_t> ids, uint32_t rows) {
    std::copy(ids.begin(), ids.end(), buffers.state->tokens);
    std::fill_n(buffers.logits, rows * c.vocab, NAN);
    const gpt_oss_decode::Step step{.T = uint32_t(ids.size()), .head_rows = rows, .capacity = capacity};
    if (megakernel && ids.size() == 1 && megakernel_takes(model))  // not heads of more than 64
      run_one_kernel(step);
    else
      gpt_oss_decode::run(model, buffers, step, {});
    std::vector<std::vector<double>> all;
    for (uint32_t j = 0; j < rows; ++j)
      all.emplace_back(buffers.logits + j * c.vocab, buffers.logits + (j + 1) * c.vocab);
    return all;
  }
};

void check_case(const DecodeCase& t, bool megakernel) {
  std::unique_ptr<Emulated> gpu;
  testing::check_decode(t, [&](const DecodeModel& m, int64_t room) {
    gpu = std::make_unique<Emulated>(m, uint32_t(room));
    gpu->megakernel = megakernel;
    return testing::DecodeUnderTest{
        .extend = [&](std::span<const int32_t> ids) { return gpu->extend(ids, uint32_t(ids.size())); },
        .choices = [&](size_t i) { return testing::choices_of(gpu->buffers, gpu->c.layers, i); },
        .state = [&] { return *gpu->buffers.state; }};
  });
}

TEST(GptOssDecodeEmulated, EveryCaseIsTheModel) {
  for (const DecodeCase& t : testing::decode_cases()) check_case(t, false);
}
TEST(GptOssDecodeEmulated, EveryCaseIsTheModelThroughTheMegakernel) {
  for (const DecodeCase& t : testing::decode_cases()) check_case(t, true);
}

TEST(GptOssDecodeEmulated, AMissingHandOffEndsTheMegakernelAndAppendsNothing) {
  const DecodeCase t = testing::decode_cases()[0];
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  Emulated gpu(m, 9), sound(m, 9);
  const int32_t id = 5;
  sound.megakernel = true;
  const std::vector<std::vector<double>> want = sound.extend({&id, 1}, 1);
  gpu.buffers.state->tokens[0] = id;
  gpu.run_one_kernel({.capacity = 9}, 3);
  EXPECT_EQ(gpu.record.state, gpu::kTimedOut);
  EXPECT_EQ(gpu.record.what, 3u);
  EXPECT_EQ(gpu.record.seen, 2u);
  EXPECT_EQ(gpu.record.expected, 3u);
  EXPECT_EQ(gpu.buffers.state->position, 0);
  gpu.stop = gpu::kRunning, gpu.record = {};
  std::memset(gpu.buffers.handoff, 0, size_t(gpu.buffers.counter_bytes));
  gpu.megakernel = true;
  EXPECT_EQ(gpu.extend({&id, 1}, 1), want);
  EXPECT_EQ(gpu.buffers.state->position, 1);
}

}  // namespace
}  // namespace ingot
