#include "ingot/models/spec.h"

#include <gtest/gtest.h>

#include "ingot/models/gpt_oss/archive.h"
#include "ingot/models/gpt_oss/spec.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using testing::error_of;

DecoderSpec gpt_oss() { return spec_of(synthetic_gpt_oss("20b")); }
constexpr DecodePath kAllPaths[] = {DecodePath::cpu,    DecodePath::phased,     DecodePath::small_batch,
                                    DecodePath::prompt, DecodePath::megakernel, DecodePath::prefilter};

struct Case {
  const char* name;  // in the message
  void (*change)(DecoderSpec& s);
  // Which paths compute the changed model; the megakernel of GPT-OSS computes none of the changes.
  bool by_launches = true;  // the paths of a GPU that launch a kernel for each phase
  bool prefilter = true;    // the int8 prefilter, which the families' megakernel uses too
  bool on_cpu = true;
};
const Case kCases[] = {
    {"a dense MLP", [](DecoderSpec& s) { s.layer[3].experts = false; }},
    {"expert weights that are not renormalised", [](DecoderSpec& s) { s.renormalise = false; }, false, false},
    {"a layer whose queries and keys are not rotated", [](DecoderSpec& s) { s.layer[3].rope = -1; }},
    {"several RoPE tables",
     [](DecoderSpec& s) {
       s.rope.push_back(s.rope[0]);
       s.layer[3].rope = 1;
     }},
    {"interleaved RoPE", [](DecoderSpec& s) { s.rope[0].interleaved = true; }, false, false},
    {"partial RoPE", [](DecoderSpec& s) { s.rope[0].dim = 32; }, false, false},
    {"norms that multiply by 1 + w", [](DecoderSpec& s) { s.norm.unit_offset = true; }},
    {"norms that round before the weight", [](DecoderSpec& s) { s.norm.rounds_before_weight = true; }},
    {"norms after attention and MLP", [](DecoderSpec& s) { s.norm.post = true; }, true, false},
    {"norms of queries and keys", [](DecoderSpec& s) { s.qk_norm = true; }},
    {"an MLP without biases", [](DecoderSpec& s) { s.mlp_bias = false; }},
    {"attention without sinks", [](DecoderSpec& s) { s.sinks = false; }},
    {"a scale of attention other than 1 / sqrt(head_dim)", [](DecoderSpec& s) { s.attention_scale = 0.5; }},
    {"a softcap in attention", [](DecoderSpec& s) { s.attention_softcap = 50; }, true, false},
    {"a softcap of logits", [](DecoderSpec& s) { s.logit_softcap = 30; }, true, false},
    {"a gate other than GPT-OSS's", [](DecoderSpec& s) { s.gate = {}; }},
    {"a gate other than GPT-OSS's", [](DecoderSpec& s) { s.gate = gelu_gate(); }},
    {"a scale of embeddings", [](DecoderSpec& s) { s.embedding_scale = 64; }, true, false},
    {"inputs in e4m3 without experts",
     [](DecoderSpec& s) {
       for (LayerSpec& l : s.layer) l.experts = false;
       s.e4m3_inputs = true;
     },
     false, false, false},
    {"inputs in e4m3 of experts beside dense MLPs",
     [](DecoderSpec& s) { s.layer[3].experts = false, s.e4m3_inputs = true; }, false, false},
};

TEST(DecoderSpec, EveryPathComputesGptOss) {
  for (const DecodePath path : kAllPaths) EXPECT_EQ(unsupported_reason(gpt_oss(), path), "") << name_of(path);
}

TEST(DecoderSpec, APropertyThatAPathDoesNotComputeIsRefusedByItsNameAndThePaths) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    DecoderSpec s = gpt_oss();
    c.change(s);
    for (const DecodePath path : kAllPaths) {
      const std::string found = unsupported_reason(s, path);
      const bool computed = path == DecodePath::cpu         ? c.on_cpu
                            : path == DecodePath::prefilter ? c.prefilter
                                                            : path != DecodePath::megakernel && c.by_launches;
      if (computed) {
        EXPECT_EQ(found, "");
        continue;
      }
      // The first of several reasons: a model with inputs in e4m3 has dense MLPs too.
      const bool dense_first = s.e4m3_inputs && path == DecodePath::megakernel;
      EXPECT_EQ(found, std::string("found ") + (dense_first ? "a dense MLP" : c.name) + ", which " + name_of(path) +
                           " does not compute");
    }
  }
}

TEST(DecoderSpec, TheMegakernelOfTheFamiliesComputesThemAndRefusesOtherPropertiesByName) {
  constexpr DecodePath kPath = DecodePath::family_megakernel;
  DecoderSpec llama = gpt_oss();
  for (LayerSpec& l : llama.layer) l.experts = false;
  llama.gate = {}, llama.mlp_bias = llama.sinks = llama.output_bias = false;
  EXPECT_EQ(unsupported_reason(llama, kPath), "");
  DecoderSpec most = llama;
  most.qk_norm = most.norm.unit_offset = most.norm.rounds_before_weight = most.mlp_bias = most.sinks = true;
  most.attention_scale = 0.5, most.layer[1].rope = -1, most.layer[0].window = 64;
  EXPECT_EQ(unsupported_reason(most, kPath), "");
  DecoderSpec mixture = most;
  for (LayerSpec& l : mixture.layer) l.experts = true;
  EXPECT_EQ(unsupported_reason(mixture, kPath), "");
  EXPECT_EQ(unsupported_reason(gpt_oss(), kPath),
            "found a gate other than SwiGLU, which the megakernel of the families does not compute");
  for (const auto& [s, path] : {std::pair{gpt_oss(), DecodePath::megakernel}, {llama, kPath}, {mixture, kPath}})
    EXPECT_EQ(megakernel_path(s), path);
  const struct {
    const char* name;
    void (*change)(DecoderSpec& s);
  } cases[] = {{"a dense MLP beside experts", [](DecoderSpec& s) { s.layer[1].experts = true; }},
               {"expert weights that are not renormalised",
                [](DecoderSpec& s) {
                  for (LayerSpec& l : s.layer) l.experts = true;
                  s.renormalise = false;
                }},
               {"a gate other than SwiGLU", [](DecoderSpec& s) { s.gate = gelu_gate(); }},
               {"a gate other than SwiGLU", [](DecoderSpec& s) { s.gate = clamped_gate(7, 1.702); }},
               {"norms after attention and MLP", [](DecoderSpec& s) { s.norm.post = true; }},
               {"a softcap in attention", [](DecoderSpec& s) { s.attention_softcap = 50; }},
               {"a softcap of logits", [](DecoderSpec& s) { s.logit_softcap = 30; }},
               {"a scale of embeddings", [](DecoderSpec& s) { s.embedding_scale = 64; }},
               {"partial RoPE", [](DecoderSpec& s) { s.rope[0].dim = 32; }}};
  for (const auto& [name, change] : cases) {
    DecoderSpec s = llama;
    change(s);
    EXPECT_EQ(unsupported_reason(s, kPath),
              std::string("found ") + name + ", which the megakernel of the families does not compute");
  }
}

TEST(DecoderSpec, APropertyThatOnePathAloneLacksIsRefusedByThatPath) {
  DecoderSpec rounded = gpt_oss();
  rounded.e4m3_inputs = true;
  DecoderSpec windows = gpt_oss();
  windows.layer[0].window = 64;
  for (const DecodePath path : kAllPaths) {
    EXPECT_EQ(
        unsupported_reason(rounded, path),
        path == DecodePath::megakernel ? "found experts' inputs in e4m3, which the megakernel does not compute" : "");
    EXPECT_EQ(
        unsupported_reason(windows, path),
        path == DecodePath::prompt ? "found windows of several lengths, which the prompt path does not compute" : "");
  }
}

TEST(DecoderSpec, TheSpecOfGptOssFollowsItsConfiguration) {
  const GptOssConfig c = synthetic_gpt_oss("20b");
  const DecoderSpec s = spec_of(c);
  check(s, "spec");
  EXPECT_EQ(s.layers, c.layers);
  EXPECT_EQ(s.longest_window(), 128);
  EXPECT_EQ(s.window_reach(), 127);
  for (size_t l = 0; l < s.layer.size(); ++l) EXPECT_EQ(s.layer[l].window, l % 2 == 0 ? 128 : 0) << l;
  EXPECT_EQ(s.scale_of_attention(), 0.125);
  EXPECT_EQ(s.gate.limit, 7);
  EXPECT_EQ(s.rope.size(), 1u);
}

TEST(DecoderSpec, SizesThatDoNotFitTogetherAreRefusedByName) {
  const auto refusal = [](void (*change)(DecoderSpec&)) {
    DecoderSpec s = gpt_oss();
    change(s);
    return error_of([&] { check(s, "m"); });
  };
  EXPECT_EQ(refusal([](DecoderSpec& s) { s.kv_heads = 7; }),
            "bad data: m: found heads 64, expected a multiple of kv_heads");
  EXPECT_EQ(refusal([](DecoderSpec& s) { s.layer.pop_back(); }),
            "bad data: m: found properties of layers 23, expected one for each layer");
  EXPECT_EQ(refusal([](DecoderSpec& s) { s.layer[0].rope = 1; }),
            "bad data: m: found rope 1, expected -1 or the number of a table");
  EXPECT_EQ(refusal([](DecoderSpec& s) { s.rope[0].dim = 66; }),
            "bad data: m: found rotated dimensions 66, expected an even number, at most head_dim");
  EXPECT_EQ(refusal([](DecoderSpec& s) { s.experts_per_token = 33; }),
            "bad data: m: found experts_per_token 33, expected 1 to the number of experts");
}

}  // namespace
}  // namespace ingot
