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
#include "ingot/models/decode/phased/step_memory.h"
#include "ingot/models/gpt_oss/gpt_oss.h"

namespace ingot {
namespace {

using testing::DecodeCase;
using testing::DecodeModel;
using testing::Emulated;

// Whether a step may have several tokens; with the limits of INGOT_GPU_AS=8.6 every token is a step.
bool takes_several_tokens(const DecoderSpec& c) { return decode::max_step_tokens(c) > 1; }

void check_case(DecodeCase t, bool megakernel, const gpu::Limits& limits = gpu::limits_of("9.0")) {
  if (!takes_several_tokens(t.config)) t.batches.clear();
  std::unique_ptr<Emulated> gpu;
  testing::check_decode(t, [&](const DecodeModel& m, int64_t room) {
    gpu = std::make_unique<Emulated>(m, uint32_t(room));
    gpu->megakernel = megakernel, gpu->limits = limits;
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

// With the copy engine and the limits of a B200, without it and with those of an A100, and with memory for only five
// slots, as the published sizes leave on an RTX 3090.
TEST(GptOssDecodeEmulated, EveryCaseIsTheModelThroughTheMegakernelOfOtherGpus) {
  gpu::Limits five_slots = gpu::limits_of("8.6");
  five_slots.smem_per_block = 72 * 1024;
  for (const DecodeCase& t : testing::decode_cases()) {
    check_case(t, true, gpu::limits_of("8.0"));
    if (testing::kSanitized) continue;
    check_case(t, true, five_slots);
    check_case(t, true, gpu::limits_of("10.0"));
  }
}
TEST(GptOssDecodeEmulated, RandomCasesAreTheModelThroughTheMegakernelWithoutTheCopyEngine) {
  for (const DecodeCase& t : testing::random_cases(testing::kSanitized ? 1 : 4))
    check_case(t, true, gpu::limits_of("8.6"));
}
// In GPT-OSS's published sizes a block has memory for the activations and for a ring of weights.
TEST(GptOssDecodeEmulated, TheMegakernelTakesThePublishedSizesFromComputeCapability80On) {
  const auto matrix = [](uint32_t rows, uint32_t cols) {
    return decode::Matrix{.rows = rows, .cols = cols, .row_tiles = rows / 16, .weight_tiles = cols / 64};
  };
  for (const int64_t experts : {32, 128}) {
    decode::Model m{};
    m.config = testing::published_config(2, experts, 1000);
    decode::Layer l{};
    l.qkv = matrix(5120, 2880), l.o = matrix(2880, 4096), l.router = matrix(uint32_t(experts), 2880);
    l.gate_up = matrix(5760, 2880), l.down = matrix(2880, 2880);
    m.layers = {l, l};
    for (const char* capability : {"8.0", "8.6", "8.9", "9.0", "10.0", "12.0"})
      EXPECT_TRUE(supports_megakernel(m, gpu::limits_of(capability))) << capability << ", " << experts << " experts";
    gpu::Limits turing = gpu::limits_of("8.6");
    turing.capability = 75;
    EXPECT_FALSE(supports_megakernel(m, turing));
    gpu::Limits too_small = gpu::limits_of("8.6");
    too_small.smem_per_block = 64 * 1024;
    EXPECT_FALSE(supports_megakernel(m, too_small));
  }
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

// The launches of a step fit into a block's shared memory, whatever the sizes of the model, and GPUs with 163 KB and
// more hold all wanted vectors of down.
TEST(GptOssDecodeEmulated, TheKernelsForSeveralTokensFitTheSharedMemoryOfEveryGpu) {
  int several = 0;
  for (const char* capability : {"8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}) {
    const gpu::Limits limits = gpu::limits_of(capability);
    const bool small = limits.smem_per_block == 99 * 1024;
    for (const int64_t experts : {32, 128}) {
      const DecoderSpec published = testing::published_config(2, experts, 1000);
      EXPECT_TRUE(decode::holds_rounded_experts(published, limits)) << capability;
      EXPECT_LE(decode::one_token_bytes(published), decode::shared_of_block(limits)) << capability;
      EXPECT_EQ(decode::max_step_tokens(published, limits), small                     ? 1u
                                                            : limits.capability == 80 ? 8u
                                                                                      : 16u)
          << capability;
    }
    for (const int64_t hidden : {32, 896, 2880, 4096, 5120, 8192})
      for (const int64_t intermediate : {25, 768, 2880, 11008, 18944, 28672})
        for (const int64_t heads : {4, 64})
          for (const auto& [experts, k] : {std::pair<int64_t, int64_t>{0, 0}, {8, 2}, {32, 4}, {128, 8}, {512, 10}}) {
            SCOPED_TRACE(::testing::Message()
                         << capability << ", hidden " << hidden << ", intermediate " << intermediate << ", " << heads
                         << " heads, " << k << " of " << experts << " experts");
            DecoderSpec c;
            c.hidden = hidden, c.intermediate = intermediate, c.heads = heads, c.head_dim = 64;
            c.experts = experts, c.experts_per_token = k;
            const uint32_t most = decode::max_step_tokens(c, limits);
            several += most > 1;
            for (uint32_t T = 1; T <= most; ++T) {
              const uint32_t room = decode::staged_vectors(T, intermediate, decode::most_expert_slots(c, T), limits);
              EXPECT_GE(room, T);
              if (T == 1 && most == 1 && !decode::holds_rounded_experts(c, limits)) continue;
              EXPECT_LE(decode::experts_bytes(c, T, room) + decode::small_batch::least_bytes(T),
                        decode::shared_of_block(limits))
                  << T << " tokens";
              if (most > 1) EXPECT_EQ(room, decode::wanted_vectors(T, intermediate)) << T << " tokens";
            }
          }
  }
  EXPECT_GT(several, 100);
}

TEST(GptOssDecodeEmulated, ALayerOfRoundedInputsIsRoundedNumberByNumber) {
  testing::for_rounded_layers([](const DecodeModel& m, const std::vector<int32_t>& ids) {
    if (ids.size() > 1 && !takes_several_tokens(m.config)) return;
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
