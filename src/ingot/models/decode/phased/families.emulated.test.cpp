// The kernels of a decode step compute models other than GPT-OSS, on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "ingot/models/decode/fixtures/defined_model.test.h"
#include "ingot/models/decode/fixtures/emulated_model.test.h"
#include "ingot/models/decode/fixtures/family_cases.test.h"
#include "ingot/models/decode/phased/stages.cuh"

namespace ingot {
namespace {

using testing::Emulated;
using testing::FamilyCase;
using testing::RandomModel;

testing::DecodeUnderTest under_test(const std::shared_ptr<Emulated>& gpu) {
  gpu->megakernel = true;  // asks for the megakernel, which does not support the families; launches are used instead
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

// The comparison sees a property that the kernels leave out.
TEST(FamiliesDecodeEmulated, APropertyThatIsLeftOutShowsInTheLogits) {
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

// The same gate as swiglu_gate(), whose definition stands beside the definition of the gates: the logits hardly depend
// on a gate's last term.
TEST(FamiliesDecodeEmulated, TheGatesAreThoseOfTheSpec) {
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
