// Runs the kernels of a decode step on the CPU, also under sanitizers, and compares their results with the definition.
#include "ingot/models/decode/phased/decode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "ingot/gpu/tile/epoch_words.cuh"
#include "ingot/models/decode/fixtures/decode_cases.test.h"
#include "ingot/models/decode/fixtures/emulated_model.test.h"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/model/trace.h"
#include "ingot/models/gpt_oss/gpt_oss.h"

namespace ingot {
namespace {

using testing::DecodeCase;
using testing::DecodeModel;
using testing::Emulated;

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

TEST(GptOssDecodeEmulated, RandomCasesAreTheModel) {
  for (const DecodeCase& t : testing::random_cases(2))
    for (const bool megakernel : {false, true})
      if (megakernel || !testing::kSanitized) check_case(t, megakernel);  // batches take the phased path in both cases
}

// The megakernel does not take rounded inputs.
TEST(GptOssDecodeEmulated, EveryCaseOfRoundedInputsIsTheModel) {
  for (const DecodeCase& t : testing::rounded_cases()) check_case(t, true);
}

TEST(GptOssDecodeEmulated, ALayerOfRoundedInputsIsRoundedNumberByNumber) {
  testing::for_rounded_layers([](const DecodeModel& m, const std::vector<int32_t>& ids) {
    Emulated gpu(m, 16);
    std::copy(ids.begin(), ids.end(), gpu.buffers.state->tokens);
    testing::check_rounded_layer(
        m, gpu.buffers, uint32_t(ids.size()),
        [&](uint32_t phases) {
          run(gpu.model, gpu.buffers, {.T = uint32_t(ids.size()), .capacity = 16, .phases = phases}, {});
        },
        [](const auto* from, int64_t n) {
          return std::vector<std::remove_const_t<std::remove_pointer_t<decltype(from)>>>(from, from + n);
        });
  });
}

// In every format of the dense matrices: the bytes that the blocks read add up to the matrices.
TEST(GptOssDecodeEmulated, ATracedTokenIsTheSameAndKeepsTimesAndBytes) {
  const DecodeCase t = testing::decode_cases()[0];
  for (WeightFormat dense : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
    SCOPED_TRACE(::testing::Message() << dense);
    const DecodeModel m(t.config, dense, WeightFormat::mxfp4, 7);
    Emulated gpu(m, 9), plain(m, 9);
    const int32_t id = 5;
    plain.megakernel = true;
    const std::vector<std::vector<double>> want = plain.extend({&id, 1}, 1);
    constexpr uint32_t kBlocks = 2;  // of three: the last block writes nothing
    megakernel::Trace trace = trace_of(gpu.model, kBlocks, nullptr);
    std::vector<uint64_t> words(size_t((kBlocks + 1) * trace.words_of_block()));
    trace.words = words.data();
    gpu.buffers.state->tokens[0] = id;
    gpu.run_one_kernel({.capacity = 9}, ~0u, trace);
    const std::vector<double> row(gpu.buffers.logits, gpu.buffers.logits + t.config.vocab);
    EXPECT_EQ(row, want[0]);
    const size_t kept = kBlocks * trace.words_of_block();
    EXPECT_TRUE(std::all_of(words.begin() + int64_t(kept), words.end(), [](uint64_t w) { return w == 0; }));
    const auto spans = decode::spans_of(trace, std::span(words).first(kept));
    ASSERT_EQ(spans.size(), size_t(kBlocks * (5 * t.config.layers + 1)));

    words.assign(words.size(), 0);
    trace = trace_of(gpu.model, kBlocks + 1, words.data());
    gpu.run_one_kernel({.capacity = 9}, ~0u, trace);
    uint64_t qkv = 0, head = 0, experts = 0;
    for (const auto& s : decode::spans_of(trace, words)) {
      const std::string name = decode::stage_name(s.stage);
      if (name == "head") head += s.bytes;
      if (s.layer != 0) continue;
      if (name == "qkv") qkv += s.bytes;
      if (name == "gate and up" || name == "down") experts += s.bytes;
    }
    const auto weight_tiles = [](const decode::Matrix& w) {  // without the scales behind an fp8 row tile
      return uint64_t(w.row_tiles) * w.weight_tiles * uint64_t(weight_tile_bytes(w.format));
    };
    const decode::Layer& l = gpu.model.layers[0];
    EXPECT_EQ(qkv, weight_tiles(l.qkv));
    EXPECT_EQ(head, weight_tiles(gpu.model.head));
    EXPECT_EQ(experts, uint64_t(t.config.experts_per_token) * (weight_tiles(l.gate_up) + weight_tiles(l.down)));
  }
}

TEST(GptOssDecodeEmulated, AMissingGridBarrierEndsTheMegakernelAndAppendsNothing) {
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
  // A block that begins after a wait gave up may already write the epochs of the next token; nothing of it may remain.
  for (int64_t i = 0; i < t.config.heads * t.config.head_dim / 4; ++i)
    gpu.buffers.attention.mixed[i] = {{~0u, ~0u, 0}, *gpu.buffers.last_epoch + 1};
  gpu.stop = gpu::kRunning, gpu.record = {};
  std::memset(gpu.buffers.grid_barrier, 0, size_t(gpu.buffers.handover_bytes));
  gpu.megakernel = true;
  EXPECT_EQ(gpu.extend({&id, 1}, 1), want);
  EXPECT_EQ(gpu.buffers.state->position, 1);
}

}  // namespace
}  // namespace ingot
