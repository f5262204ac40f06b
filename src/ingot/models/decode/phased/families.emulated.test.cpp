// The kernels of a decode step compute models other than GPT-OSS, on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "ingot/models/decode/fixtures/defined_model.test.h"
#include "ingot/models/decode/fixtures/emulated_model.test.h"
#include "ingot/models/decode/fixtures/family_cases.test.h"
#include "ingot/models/decode/fixtures/prefilter_cases.test.h"
#include "ingot/models/decode/model/trace.h"
#include "ingot/models/decode/phased/stages.cuh"

namespace ingot {
namespace {

using testing::Emulated;
using testing::FamilyCase;
using testing::RandomModel;

testing::DecodeUnderTest under_test(const std::shared_ptr<Emulated>& gpu) {
  return {.extend = [gpu](std::span<const int32_t> ids) { return gpu->extend(ids, uint32_t(ids.size())); },
          .choices = [gpu](size_t i) { return testing::choices_of(gpu->buffers, gpu->c.layers, i); },
          .state = [gpu] { return *gpu->buffers.state; }};
}

TEST(FamiliesDecodeEmulated, EveryFamilyIsTheModel) {
  for (const FamilyCase& t : testing::family_cases())
    testing::check_family(t, [&](const RandomModel& m, int64_t room) {
      return under_test(std::make_shared<Emulated>(m.spec, m.weights, uint32_t(room)));
    });
}

// One layer of 4 choices among 9 experts, whose heads have norms.
DecoderSpec one_expert_layer(const testing::FamilyShape& n) {
  DecoderSpec s = testing::expert_family_spec(n, 9, 4);
  s.layers = 1, s.layer.resize(1), s.qk_norm = true;
  return s;
}

// The megakernel computes one token after the other. The cases are the families that the megakernel supports, and
// further cases for its own limits.
TEST(FamiliesDecodeEmulated, EveryFamilyIsTheModelThroughTheMegakernel) {
  for (const FamilyCase& t : testing::megakernel_family_cases()) {
    // Under a sanitizer only the short cases run, which execute every line.
    if (testing::kSanitized && t.length > 12) continue;
    testing::check_family(t, [&](const RandomModel& m, int64_t room) {
      const auto gpu = std::make_shared<Emulated>(m.spec, m.weights, uint32_t(room));
      EXPECT_TRUE(supports_megakernel(gpu->model));
      gpu->megakernel = true;
      return under_test(gpu);
    });
  }
}
// Blocks without weights in some stage or in all, and blocks with several rounds of a stage.
TEST(FamiliesDecodeEmulated, ATokenDoesNotDependOnTheNumberOfBlocks) {
  for (DecoderSpec s : {testing::family_spec({64, 2, 1, 64, 208}, 3), one_expert_layer({64, 2, 1, 128, 80})}) {
    s.vocab = 208;
    const RandomModel m(s, WeightFormat::bf16, WeightFormat::bf16);
    std::vector<std::vector<double>> want;
    for (const int64_t blocks : {3, 1, 30}) {
      if (testing::kSanitized && blocks > 3) continue;
      SCOPED_TRACE(::testing::Message() << s.experts << " experts, " << blocks << " blocks");
      Emulated gpu(s, m.weights, 8);
      gpu.megakernel = true, gpu.blocks = blocks;
      std::vector<std::vector<double>> got;
      for (const int32_t id : {3, 200}) got.push_back(gpu.extend({&id, 1}, 1)[0]);
      EXPECT_EQ(gpu.stop, uint32_t(gpu::kRunning));
      if (want.empty()) want = got;
      // The partial sums of a row tile that two blocks share are added in another order; the logits have a deviation of
      // 1.5, and an activation rounds to 8 bits.
      for (size_t t = 0; t < want.size(); ++t)
        for (size_t v = 0; v < want[t].size(); ++v) EXPECT_NEAR(got[t][v], want[t][v], 0.05) << t << " " << v;
    }
  }
}

// A chain of tokens with the int8 prefilter is the chain of the whole head: greedy tokens, and samples.
TEST(FamiliesDecodeEmulated, APrefilteredHeadContinuesAsTheWholeHead) {
  for (DecoderSpec s : {testing::family_spec({96, 4, 2, 64, 64}), testing::family_spec({96, 4, 2, 128, 64}),
                        one_expert_layer({96, 4, 2, 128, 64})}) {
    const int64_t head_dim = s.head_dim;
    SCOPED_TRACE(::testing::Message() << "heads of " << head_dim << ", " << s.experts << " experts");
    s.vocab = 333, s.qk_norm = head_dim == 128;
    const RandomModel m(s, WeightFormat::bf16, WeightFormat::bf16);
    Emulated whole(s, m.weights, 12), gpu(s, m.weights, 12);
    ASSERT_TRUE(supports_prefilter(gpu.model));
    gpu.make_prefilter();
    whole.buffers.state->tokens[0] = gpu.buffers.state->tokens[0] = 9;
    if (head_dim == 64) *whole.buffers.noise = *gpu.buffers.noise = {.seed = 5, .step = 0, .temperature = 1};
    for (int i = 0; i < (testing::kSanitized ? 3 : 8); ++i) {  // the third token takes the whole head
      whole.run_one_kernel({.capacity = 12});
      gpu.run_one_kernel({.capacity = 12}, ~0u, {}, i % 3 != 2);
      ASSERT_EQ(std::memcmp(gpu.buffers.state, whole.buffers.state, sizeof(decode::State)), 0) << i;
      testing::expect_sampled(*gpu.buffers.state, whole.buffers.logits, s.vocab,
                              {.seed = 5, .step = uint32_t(i), .temperature = head_dim == 64 ? 1.f : 0.f});
    }
  }
}

TEST(FamiliesDecodeEmulated, AMissingGridBarrierEndsTheMegakernelAndAppendsNothing) {
  for (const auto& [missing, experts] :
       {std::pair{0u, false}, {1u, false}, {3u, false}, {9u, false}, {0u, true}, {2u, true}, {4u, true}}) {
    SCOPED_TRACE(::testing::Message() << missing << (experts ? " with experts" : ""));
    DecoderSpec s = experts ? one_expert_layer({64, 4, 2, 128, 64}) : testing::family_spec({64, 4, 2, 128, 64});
    s.qk_norm = true;
    const RandomModel m(s, WeightFormat::bf16, WeightFormat::bf16);
    Emulated gpu(s, m.weights, 9), sound(s, m.weights, 9);
    const int32_t id = 5;
    sound.megakernel = gpu.megakernel = true;
    const std::vector<std::vector<double>> want = sound.extend({&id, 1}, 1);
    gpu.buffers.state->tokens[0] = id;
    gpu.run_one_kernel({.capacity = 9}, missing);
    EXPECT_EQ(gpu.record.state, gpu::kTimedOut);
    EXPECT_EQ(gpu.record.what, missing);
    EXPECT_EQ(gpu.buffers.state->position, 0);
    gpu.stop = gpu::kRunning, gpu.record = {};
    std::memset(gpu.buffers.grid_barrier, 0, size_t(gpu.buffers.handover_bytes));
    EXPECT_EQ(gpu.extend({&id, 1}, 1), want);
    EXPECT_EQ(gpu.buffers.state->position, 1);
  }
}

TEST(FamiliesDecodeEmulated, ATracedTokenIsTheSameAndReadsTheBytesOfTheMatrices) {
  for (const DecoderSpec& s : {testing::family_spec({64, 4, 2, 64, 70}), testing::family_spec({64, 4, 2, 128, 70}),
                               one_expert_layer({64, 4, 2, 128, 70})}) {
    SCOPED_TRACE(::testing::Message() << "heads of " << s.head_dim << ", " << s.experts << " experts");
    const RandomModel m(s, WeightFormat::bf16, WeightFormat::bf16);
    Emulated gpu(s, m.weights, 9), plain(s, m.weights, 9);
    const int32_t id = 5;
    plain.megakernel = true;
    const std::vector<std::vector<double>> want = plain.extend({&id, 1}, 1);
    megakernel::Trace trace = trace_of(gpu.model, uint32_t(gpu.blocks), nullptr);
    std::vector<uint64_t> words(size_t(gpu.blocks * trace.words_of_block()));
    trace.words = words.data();
    gpu.buffers.state->tokens[0] = id;
    gpu.run_one_kernel({.capacity = 9}, ~0u, trace);
    EXPECT_EQ(std::vector<double>(gpu.buffers.logits, gpu.buffers.logits + s.vocab), want[0]);
    uint64_t bytes = 0;
    for (const auto& span : decode::spans_of(trace, words)) bytes += span.bytes;
    const auto weight_tiles = [](const decode::Matrix& w) {
      return uint64_t(w.row_tiles) * w.weight_tiles * uint64_t(weight_tile_bytes(w.format));
    };
    const uint64_t choices = uint64_t(decode::bank_choices(s));
    uint64_t all = weight_tiles(gpu.model.head), most = 0;
    for (const decode::Layer& l : gpu.model.layers) {
      all += weight_tiles(l.qkv) + weight_tiles(l.o) + choices * (weight_tiles(l.gate_up) + weight_tiles(l.down));
      if (l.experts) all += weight_tiles(l.router), most += weight_tiles(l.router);
    }
    // Two blocks that share a row tile of the output both read the router's weights of this row tile.
    EXPECT_GE(bytes, all);
    EXPECT_LE(bytes, all + most);
  }
}

// The comparison fails if the kernels leave out a property.
TEST(FamiliesDecodeEmulated, AnOmittedPropertyChangesTheLogits) {
  const struct {
    const char *model, *name;
    void (*leave_out)(DecoderSpec& s);
  } kLeftOut[] = {
      {"Llama, one token at a time", "the scaling of angles", [](DecoderSpec& s) { s.rope[0].scaling = {}; }},
      {"groups of 7, a tied head, a layer without a rotation", "no rotation",
       [](DecoderSpec& s) { s.layer[1].rope = 0; }},
      {"windows", "a window", [](DecoderSpec& s) { s.layer[0].window = 0; }},
      {"norms of heads of 128", "the norms of heads", [](DecoderSpec& s) { s.qk_norm = false; }},
      {"Gemma", "1 + w", [](DecoderSpec& s) { s.norm.unit_offset = false; }},
      {"Gemma", "its gate", [](DecoderSpec& s) { s.gate = {.alpha = 4}; }},
      {"Gemma", "the second table", [](DecoderSpec& s) { s.layer[2].rope = 0; }},
      {"Gemma", "the scale of attention", [](DecoderSpec& s) { s.attention_scale = 0; }},
      {"Gemma", "the scale of embeddings", [](DecoderSpec& s) { s.embedding_scale = 1; }},
      {"softcaps", "the softcap of scores", [](DecoderSpec& s) { s.attention_softcap = 0; }},
      {"softcaps", "the softcap of logits", [](DecoderSpec& s) { s.logit_softcap = 0; }},
      {"softcaps", "the norms of branches", [](DecoderSpec& s) { s.norm.post = false; }},
      {"GPT-OSS's gate in a dense MLP", "the clamp", [](DecoderSpec& s) { s.gate.limit = 0; }},
  };
  const std::vector<FamilyCase> cases = testing::family_cases();
  for (const auto& [model, name, leave_out] : kLeftOut) {
    SCOPED_TRACE(::testing::Message() << model << " without " << name);
    const auto t = std::find_if(cases.begin(), cases.end(), [&](const FamilyCase& c) { return c.name == model; });
    ASSERT_NE(t, cases.end());
    const testing::FamilyErrors e = compare_family(*t, [&](const RandomModel& m, int64_t room) {
      DecoderSpec without = m.spec;
      leave_out(without);
      DecoderWeights weights;
      weights.embed = m.weights.embed, weights.head = m.weights.head, weights.norm = m.weights.norm;
      weights.layers = m.weights.layers;
      if (!without.norm.post)
        for (DecoderLayer& l : weights.layers) l.attn_post_norm = l.mlp_post_norm = Tensor();
      if (!without.qk_norm)
        for (DecoderLayer& l : weights.layers) l.q_norm = l.k_norm = Tensor();
      return under_test(std::make_shared<Emulated>(without, weights, uint32_t(room)));
    });
    EXPECT_FALSE(e.agree());
  }
}

// Compares the gates with their formulas directly, because the logits hardly depend on the last term of a gate.
TEST(FamiliesDecodeEmulated, TheGatesFollowTheirFormulas) {
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  for (double gate = -40; gate <= 40; gate += 0.37)
    for (const double up : {-3.0, 0.25, 9.0}) {
      const double gelu = 0.5 * gate * (1 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate))),
                   held = std::min(gate, 7.0);
      const struct {
        GateOptions gate;
        double want;
      } cases[] = {{{}, gate * sigmoid(gate) * up},
                   {gelu_gate(), gelu * up},
                   {clamped_gate(7, 1.702), held * sigmoid(1.702 * held) * (std::min(up, 7.0) + 1)}};
      for (const auto& [options, want] : cases) {
        const decode::Gate p{float(options.limit), float(options.alpha), float(options.up_offset),
                             float(options.cubic)};
        EXPECT_NEAR(double(decode::gated(float(gate), float(up), p)), want, 1e-5 * (1 + std::abs(want))) << gate;
      }
    }
}

}  // namespace
}  // namespace ingot
