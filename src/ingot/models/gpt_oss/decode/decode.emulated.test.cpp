// The kernels of a decode step on the CPU: what a sanitizer can see of them, and that their numbers are right.
#include "ingot/models/gpt_oss/decode/decode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "ingot/models/gpt_oss/decode/decode_cases.test.h"
#include "ingot/models/gpt_oss/decode/megakernel.h"
#include "ingot/models/gpt_oss/decode/trace.h"
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

  void run_one_kernel(const gpt_oss_decode::Step& step, uint32_t missing = ~0u, const megakernel::Trace& trace = {}) {
    const gpu::Watch watch{.stop = &stop, .host_stop = &host_stop, .record = &record, .limit_ns = 50'000'000};
    run_megakernel(model, buffers, step,
                   {.layers = stages.data(), .watch = watch, .blocks = 3, .trace = trace, .missing = missing}, {});
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

// In every format of the dense matrices; what the blocks read adds up to the matrices.
TEST(GptOssDecodeEmulated, ATracedTokenIsTheSameAndKeepsTimesAndBytes) {
  const DecodeCase t = testing::decode_cases()[0];
  for (WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
    SCOPED_TRACE(::testing::Message() << dense);
    const DecodeModel m(t.config, dense, WeightFormat::mxfp4, 7);
    Emulated gpu(m, 9), plain(m, 9);
    const int32_t id = 5;
    plain.megakernel = true;
    const std::vector<std::vector<double>> want = plain.extend({&id, 1}, 1);
    constexpr uint32_t kBlocks = 2;  // of three: the last one writes nothing
    megakernel::Trace trace = trace_of(gpu.model, kBlocks, nullptr);
    std::vector<uint64_t> words(size_t((kBlocks + 1) * trace.words_of_block()));
    trace.words = words.data();
    gpu.buffers.state->tokens[0] = id;
    gpu.run_one_kernel({.capacity = 9}, ~0u, trace);
    const std::vector<double> row(gpu.buffers.logits, gpu.buffers.logits + t.config.vocab);
    EXPECT_EQ(row, want[0]);
    const size_t kept = kBlocks * trace.words_of_block();
    EXPECT_TRUE(std::all_of(words.begin() + int64_t(kept), words.end(), [](uint64_t w) { return w == 0; }));
    const auto spans = gpt_oss_decode::spans_of(trace, std::span(words).first(kept));
    ASSERT_EQ(spans.size(), size_t(kBlocks * (5 * t.config.layers + 1)));

    words.assign(words.size(), 0);
    trace = trace_of(gpu.model, kBlocks + 1, words.data());
    gpu.run_one_kernel({.capacity = 9}, ~0u, trace);
    uint64_t qkv = 0, head = 0, experts = 0;
    for (const auto& s : gpt_oss_decode::spans_of(trace, words)) {
      const std::string name = gpt_oss_decode::stage_name(s.stage);
      if (name == "head") head += s.bytes;
      if (s.layer != 0) continue;
      if (name == "qkv") qkv += s.bytes;
      if (name == "gate and up" || name == "down") experts += s.bytes;
    }
    const auto granules = [](const gpt_oss_decode::Matrix& w) {  // without what a band of fp8 ends in
      return uint64_t(w.bands) * w.granules * uint64_t(granule_bytes(w.format));
    };
    const gpt_oss_decode::Layer& l = gpu.model.layers[0];
    EXPECT_EQ(qkv, granules(l.qkv));
    EXPECT_EQ(head, granules(gpu.model.head));
    EXPECT_EQ(experts, uint64_t(t.config.experts_per_token) * (granules(l.gate_up) + granules(l.down)));
  }
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
