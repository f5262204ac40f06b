#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "ingot/io/file.h"
#include "ingot/io/formats/gguf_writer.test.h"
#include "ingot/io/formats/safetensors.h"
#include "ingot/io/json.h"
#include "ingot/models/families/family.h"
#include "ingot/models/families/weights.h"
#include "ingot/models/registry.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::GgufWriter;
using testing::TemporaryDirectory;

// --- config.json -------------------------------------------------------------------------------------------------

// Published configurations, without the keys that have no effect in any of them.
const char kLlama32[] = R"({"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
  "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
  "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
  "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
  "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
  "use_cache": true, "vocab_size": 128256})";
const char kSmolLm2[] = R"({"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": true,
  "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
  "num_key_value_heads": 3, "pad_token_id": 2, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
  "rope_theta": 100000, "tie_word_embeddings": true, "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
  "vocab_size": 49152})";
const char kQwen25[] = R"({"architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645,
  "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
  "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
  "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
  "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936})";
const char kQwen3[] = R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "bos_token_id": 151643,
  "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
  "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
  "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
  "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true, "use_sliding_window": false,
  "vocab_size": 151936})";
const char kQwen3Moe[] = R"({"attention_bias": false, "bos_token_id": 151643, "decoder_sparse_step": 1,
  "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
  "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
  "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
  "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
  "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936})";
const char kMistral[] = R"({"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
  "sliding_window": null, "tie_word_embeddings": false, "vocab_size": 32768})";
const char kGemma3[] = R"({"attention_bias": false, "attn_logit_softcapping": null, "bos_token_id": 2,
  "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
  "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
  "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
  "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512,
  "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144})";

// A configuration with a key changed; a null value removes the key.
std::string with(const char* config, const char* key, const char* value) {
  Json json = Json::parse(config);
  json[key] = Json::parse(value);
  if (json[key].is_null()) json.erase(key);
  return json.dump();
}
std::string refusal(const std::string& config) {
  return error_of([&] { (void)family_spec_from_json(config, "config.json"); });
}

TEST(Families, ReadPublishedConfigurations) {
  const DecoderSpec llama = family_spec_from_json(kLlama32, "c");
  EXPECT_EQ(llama.rope[0].scaling.kind, RopeScaling::llama3);
  EXPECT_EQ(llama.rope[0].scaling.factor, 32);
  EXPECT_EQ(llama.rope[0].theta, 500000);
  EXPECT_EQ(llama.end_tokens, (std::vector<int64_t>{128001, 128008, 128009}));
  EXPECT_TRUE(llama.tied_embeddings && !llama.qkv_bias && !llama.qk_norm && !llama.layer[0].experts);

  const DecoderSpec smol = family_spec_from_json(kSmolLm2, "c");
  EXPECT_EQ(smol.head_dim, 64);  // hidden / heads: the file names none
  EXPECT_EQ(smol.rope[0].theta, 100000);

  const DecoderSpec qwen25 = family_spec_from_json(kQwen25, "c");
  EXPECT_TRUE(qwen25.qkv_bias && !qwen25.output_bias);
  EXPECT_EQ(qwen25.longest_window(), 0);  // present and switched off
  const DecoderSpec sliding = family_spec_from_json(with(kQwen25, "use_sliding_window", "true"), "c");
  EXPECT_EQ(sliding.layer[20].window, 0);
  EXPECT_EQ(sliding.layer[21].window, 32768);  // from layer max_window_layers on

  const DecoderSpec qwen3 = family_spec_from_json(kQwen3, "c");
  EXPECT_TRUE(qwen3.qk_norm && !qwen3.qkv_bias);
  EXPECT_EQ(qwen3.q_width(), 2 * qwen3.hidden);  // head_dim is not hidden / heads

  const DecoderSpec moe = family_spec_from_json(kQwen3Moe, "c");
  EXPECT_TRUE(moe.layer[47].experts && moe.renormalise && moe.qk_norm && !moe.tied_embeddings);
  EXPECT_EQ(moe.intermediate, 768);
  EXPECT_EQ(moe.experts_per_token, 8);
  // max_window_layers is 48 in the file, and without effect.
  const DecoderSpec moe_windows =
      family_spec_from_json(with(with(kQwen3Moe, "use_sliding_window", "true").c_str(), "sliding_window", "512"), "c");
  EXPECT_EQ(moe_windows.layer[0].window, 512);
  EXPECT_EQ(moe_windows.layer[47].window, 512);

  EXPECT_EQ(family_spec_from_json(kMistral, "c").longest_window(), 0);
  EXPECT_EQ(family_spec_from_json(with(kMistral, "sliding_window", "512"), "c").layer[31].window, 512);

  const DecoderSpec gemma = family_spec_from_json(kGemma3, "c");
  EXPECT_EQ(gemma.layer[4].window, 512);
  EXPECT_EQ(gemma.layer[5].window, 0);
  EXPECT_EQ(gemma.rope[size_t(gemma.layer[4].rope)].theta, 1e4);
  EXPECT_EQ(gemma.rope[size_t(gemma.layer[5].rope)].theta, 1e6);
  EXPECT_EQ(gemma.embedding_scale, 34);  // sqrt(1152) = 33.94, in bf16
  EXPECT_TRUE(gemma.norm.post && gemma.norm.unit_offset && gemma.tied_embeddings);
}

TEST(Families, AnAbsentWindowIsTheDefaultOfTransformersAndANullWindowIsNone) {
  Json mistral = Json::parse(kMistral);
  mistral.erase("sliding_window");
  EXPECT_EQ(family_spec_from_json(mistral.dump(), "c").layer[31].window, 4096);
  Json qwen = Json::parse(kQwen25);
  qwen["use_sliding_window"] = true, qwen["sliding_window"] = nullptr;
  EXPECT_EQ(family_spec_from_json(qwen.dump(), "c").longest_window(), 0);
}

TEST(Families, TheEmbeddingOfGemmaIsScaledInTheTypeOfTheEmbedding) {
  const auto scale = [](const char* type) {
    return family_spec_from_json(with(kGemma3, "torch_dtype", type), "c").embedding_scale;
  };
  EXPECT_EQ(scale("\"bfloat16\""), 34);
  EXPECT_EQ(scale("\"float16\""), 33.9375);  // sqrt(1152) = 33.9411 with 11 bits
  EXPECT_EQ(scale("\"float32\""), std::sqrt(1152.0));
}

TEST(Families, ReadTheRotationInBothSpellings) {
  const DecoderSpec older = family_spec_from_json(kLlama32, "c");
  Json json = Json::parse(kLlama32);
  json["rope_parameters"] = json["rope_scaling"];
  json["rope_parameters"]["rope_theta"] = json["rope_theta"];
  json.erase("rope_scaling"), json.erase("rope_theta");
  EXPECT_EQ(to_json(family_spec_from_json(json.dump(), "c")), to_json(older));
}

TEST(Families, RefuseByItsKeyAPropertyThatTheSpecLacks) {
  EXPECT_EQ(
      refusal(with(kLlama32, "residual_multiplier", "0.22")),
      "unsupported: config.json: residual_multiplier: found number 0.22, a property of models that Ingot does not "
      "know; expected none");
  EXPECT_EQ(refusal(with(kLlama32, "rope_interleaved", "true")),
            "unsupported: config.json: rope_interleaved: found true, a property of models that Ingot does not know; "
            "expected none");
  for (const auto& [config, key, value] : {std::tuple{kLlama32, "hidden_act", "\"gelu\""},
                                           {kLlama32, "partial_rotary_factor", "0.5"},
                                           {kLlama32, "quantization_config", R"({"quant_method": "gptq"})"},
                                           {kLlama32, "rope_scaling", R"({"rope_type": "longrope", "factor": 4})"},
                                           {kQwen3Moe, "decoder_sparse_step", "2"},
                                           {kQwen3Moe, "mlp_only_layers", "[0]"},
                                           {kQwen3, "layer_types", "[\"full_attention\"]"},
                                           {kGemma3, "use_bidirectional_attention", "true"},
                                           {kGemma3, "sliding_window_pattern", "2"}}) {
    const std::string message = refusal(with(config, key, value));
    EXPECT_NE(message.find("unsupported: config.json: " + std::string(key)), message.npos) << message;
  }
  EXPECT_EQ(refusal(with(kQwen3Moe, "mlp_only_layers", "[0]")),
            "unsupported: config.json: mlp_only_layers: found array, expected an empty array");
  const std::string unknown = refusal(with(kLlama32, "model_type", "\"phi3\""));
  EXPECT_NE(unknown.find("model_type: found \"phi3\", expected one of gpt_oss, llama"), unknown.npos) << unknown;
  EXPECT_NE(refusal(with(kLlama32, "num_attention_heads", "0")), "");
  EXPECT_NE(refusal(with(kLlama32, "hidden_size", "null")), "");
}

TEST(Families, SpecsAreTheSameAfterTheyWereWrittenAndRead) {
  for (const char* config : {kLlama32, kSmolLm2, kQwen25, kQwen3, kQwen3Moe, kMistral, kGemma3}) {
    DecoderSpec spec = family_spec_from_json(config, "c");
    spec.rope[0].divisors.assign(size_t(spec.head_dim / 2), 1.5);
    spec.start_token = 7;
    const std::string text = to_json(spec);
    EXPECT_EQ(to_json(spec_from_json(text, "again")), text);
  }
}

// --- known faults of other engines: each test uses a configuration for which such an engine gives wrong logits -------

TEST(Families, TheScalingOfLlama3KeepsFastPairsBlendsTheMiddleAndDividesSlowPairs) {
  const DecoderSpec scaled = family_spec_from_json(kLlama32, "c");
  const std::vector<double> found = frequencies_of(scaled, scaled.rope[0]).theta;
  RopeTable plain = scaled.rope[0];
  plain.scaling = {};
  const std::vector<double> unscaled = frequencies_of(scaled, plain).theta;
  ASSERT_EQ(found.size(), 32u);
  for (size_t pair = 0; pair < found.size(); ++pair) {
    const double ratio = unscaled[pair] / found[pair];
    if (pair < 15)
      EXPECT_DOUBLE_EQ(ratio, 1) << pair;
    else if (pair < 18)
      EXPECT_TRUE(ratio > 1 && ratio < 32) << pair << ": " << ratio;
    else
      EXPECT_DOUBLE_EQ(ratio, 32) << pair;
  }
}

TEST(Families, TheBaseOfTheRotationComesFromRopeParametersWhereNoOlderKeyHasIt) {
  Json json = Json::parse(kQwen3);
  json.erase("rope_theta");
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5000000.0}};
  EXPECT_EQ(family_spec_from_json(json.dump(), "c").rope[0].theta, 5000000);
  Json gemma = Json::parse(kGemma3);
  gemma.erase("rope_theta"), gemma.erase("rope_local_base_freq");
  gemma["rope_parameters"] = {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 2000000.0}}},
                              {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 30000.0}}}};
  const DecoderSpec spec = family_spec_from_json(gemma.dump(), "c");
  EXPECT_EQ(spec.rope[size_t(spec.layer[5].rope)].theta, 2000000);
  EXPECT_EQ(spec.rope[size_t(spec.layer[5].rope)].scaling.kind, RopeScaling::linear);
  EXPECT_EQ(spec.rope[size_t(spec.layer[4].rope)].theta, 30000);
}

TEST(Families, TheWidthOfAHeadIsNotTakenFromTheHiddenSizeWhereTheFamilyHasAWidth) {
  const DecoderSpec qwen3 = family_spec_from_json(with(kQwen3, "head_dim", "null"), "c");
  EXPECT_EQ(qwen3.head_dim, 128);  // hidden / heads is 64
  EXPECT_DOUBLE_EQ(qwen3.scale_of_attention(), 1 / std::sqrt(128.0));
  EXPECT_EQ(family_spec_from_json(with(kGemma3, "head_dim", "null"), "c").head_dim, 256);  // hidden / heads is 288
  EXPECT_EQ(family_spec_from_json(with(kSmolLm2, "head_dim", "32"), "c").q_width(), 9 * 32);
}

// A GGUF file of Gemma 3 with heads of 4 numbers, without the weights of its layers.
DecoderSpec gemma_of_gguf(uint32_t layers, const std::function<void(GgufWriter&)>& more = {}) {
  const TemporaryDirectory dir;
  GgufWriter w;
  w.key("general.architecture", "gemma3").key("gemma3.block_count", layers).key("gemma3.context_length", 32u);
  w.key("gemma3.embedding_length", 1152u).key("gemma3.feed_forward_length", 8u);
  w.key("gemma3.attention.head_count", 2u).key("gemma3.attention.head_count_kv", 1u);
  w.key("gemma3.attention.key_length", 4u).key("gemma3.attention.layer_norm_rms_epsilon", 1e-6f);
  w.key("gemma3.attention.sliding_window", 16u);
  if (more) more(w);
  w.tensor("token_embd.weight", 0, {3, 1152}, std::string(3 * 1152 * 4, '\0'));
  write_file(dir / "gemma.gguf", w.bytes());
  return read_family_spec(dir / "gemma.gguf");
}
TEST(Families, GemmasNormsAddOneToWeightsOfSafetensorsAndNotToWeightsOfGguf) {
  EXPECT_TRUE(family_spec_from_json(kGemma3, "c").norm.unit_offset);
  EXPECT_FALSE(family_spec_from_json(kGemma3, "c").norm.rounds_before_weight);
  EXPECT_TRUE(family_spec_from_json(kLlama32, "c").norm.rounds_before_weight);
  const DecoderSpec spec = gemma_of_gguf(6);
  EXPECT_FALSE(spec.norm.unit_offset);
  EXPECT_TRUE(spec.norm.post && spec.qk_norm);
  EXPECT_EQ(spec.embedding_scale, 34);  // sqrt(1152), in bf16
}

TEST(Families, AGgufFileStatesTheScalingOfTheRotationByItsKeys) {
  const auto of = [](const std::function<void(GgufWriter&)>& more) { return gemma_of_gguf(6, more).rope[0].scaling; };
  const RopeScaling yarn = of([](GgufWriter& w) {
    w.key("gemma3.rope.scaling.type", "yarn").key("gemma3.rope.scaling.factor", 4.0f);
    w.key("gemma3.rope.scaling.original_context_length", 16u);
    w.key("gemma3.rope.scaling.yarn_beta_fast", 20.0f).key("gemma3.rope.scaling.yarn_beta_slow", 2.0f);
  });
  EXPECT_EQ(yarn.kind, RopeScaling::yarn);
  EXPECT_EQ(yarn.original_context, 16);
  EXPECT_EQ(yarn.beta_fast, 20);
  EXPECT_EQ(yarn.beta_slow, 2);
  // Older files have a factor alone.
  const RopeScaling linear = of([](GgufWriter& w) { w.key("gemma3.rope.scaling.factor", 8.0f); });
  EXPECT_EQ(linear.kind, RopeScaling::linear);
  EXPECT_EQ(linear.factor, 8);
  EXPECT_NE(error_of([] {
              gemma_of_gguf(6, [](GgufWriter& w) { w.key("gemma3.attention.sliding_window_pattern", 2u); });
            }).find("gemma3.attention.sliding_window_pattern: found 2, expected 6"),
            std::string::npos);
}

// A GGUF file does not state query_pre_attn_scalar, which is the width of a head but for the model of 62 layers.
TEST(Families, GemmasScoresAreScaledByTheHeadAndIn27BByTheHiddenSizeOfAHead) {
  EXPECT_DOUBLE_EQ(gemma_of_gguf(26).attention_scale, 1 / std::sqrt(4.0));
  EXPECT_DOUBLE_EQ(gemma_of_gguf(62).attention_scale, 1 / std::sqrt(1152.0 / 2));
}

TEST(Families, WeightsOfExpertsAreRenormalisedOnlyWhereTheFileSaysSo) {
  EXPECT_TRUE(family_spec_from_json(kQwen3Moe, "c").renormalise);
  EXPECT_FALSE(family_spec_from_json(with(kQwen3Moe, "norm_topk_prob", "false"), "c").renormalise);
  EXPECT_FALSE(family_spec_from_json(with(kQwen3Moe, "norm_topk_prob", "null"), "c").renormalise);
}

TEST(Families, AHeadThatRotatesOnlyInPartIsRefused) {
  for (const char* config : {kLlama32, kSmolLm2, kQwen3}) {
    EXPECT_NE(refusal(with(config, "partial_rotary_factor", "0.5")).find("partial_rotary_factor"), std::string::npos);
    EXPECT_EQ(refusal(with(config, "partial_rotary_factor", "1.0")), "");
  }
  const std::string nested = refusal(
      with(kQwen3, "rope_parameters", R"({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25})"));
  EXPECT_NE(nested.find("rope_parameters: partial_rotary_factor: found number 0.25"), nested.npos) << nested;
}

// --- checkpoints -------------------------------------------------------------------------------------------------

// A model of two layers. The integral part of a number is different for each tensor, and the rest counts the numbers of
// the tensor.
struct Tiny {
  TemporaryDirectory dir;
  std::map<std::string, std::vector<float>> numbers;
  std::map<std::string, std::vector<int64_t>> shapes;
  std::string config = R"({"model_type": "llama", "vocab_size": 5, "hidden_size": 8, "intermediate_size": 6,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6,
    "max_position_embeddings": 32, "attention_bias": true, "tie_word_embeddings": true, "eos_token_id": 2})";

  Tiny() {
    add("model.embed_tokens.weight", {5, 8}), add("model.norm.weight", {8});
    for (const std::string n : {"model.layers.0.", "model.layers.1."}) {
      add(n + "input_layernorm.weight", {8}), add(n + "post_attention_layernorm.weight", {8});
      for (const auto& [part, rows] : {std::pair{"q", 12}, {"k", 6}, {"v", 6}}) {
        add(n + "self_attn." + part + "_proj.weight", {rows, 8});
        add(n + "self_attn." + part + "_proj.bias", {rows});
      }
      add(n + "self_attn.o_proj.weight", {8, 12}), add(n + "self_attn.o_proj.bias", {8});
      add(n + "mlp.gate_proj.weight", {6, 8}), add(n + "mlp.up_proj.weight", {6, 8});
      add(n + "mlp.down_proj.weight", {8, 6});
    }
  }
  void add(const std::string& name, const std::vector<int64_t>& shape) {
    int64_t count = 1;
    for (const int64_t n : shape) count *= n;
    std::vector<float>& x = numbers[name];
    for (int64_t i = 0; i < count; ++i) x.push_back(float(numbers.size()) + float(i) / 1024);
    shapes[name] = shape;
  }
  std::string write_safetensors_files() {
    std::vector<NamedTensor> tensors;
    for (auto& [name, x] : numbers) {
      const auto& s = shapes[name];
      tensors.push_back({name, s.size() == 1 ? Tensor(x.data(), {s[0]}) : Tensor(x.data(), {s[0], s[1]})});
    }
    save_safetensors(dir / "model.safetensors", tensors);
    write_file(dir / "config.json", config);
    return dir.path();
  }
  // Rows (j, j + 3) of each head of 6 become rows (2j, 2j + 1), as in llama.cpp's converter.
  std::vector<float> paired(const std::string& name) {
    const std::vector<float>& x = numbers[name];
    const size_t cols = shapes[name].size() == 2 ? 8 : 1;
    std::vector<float> out(x.size());
    for (size_t row = 0; row < x.size() / cols; ++row) {
      const size_t in_head = row % 6, to = row - in_head + (in_head < 3 ? 2 * in_head : 2 * (in_head - 3) + 1);
      std::copy_n(x.begin() + int64_t(row * cols), cols, out.begin() + int64_t(to * cols));
    }
    return out;
  }
  std::string write_gguf(const std::function<void(GgufWriter&)>& more = {}) {
    GgufWriter w;
    w.key("general.architecture", "llama").key("llama.block_count", 2u).key("llama.context_length", 32u);
    w.key("llama.embedding_length", 8u).key("llama.feed_forward_length", 6u).key("llama.attention.head_count", 2u);
    w.key("llama.attention.head_count_kv", 1u).key("llama.attention.key_length", 6u);
    w.key("llama.attention.layer_norm_rms_epsilon", 1e-6f).key("llama.rope.freq_base", 10000.0f);
    w.key("tokenizer.ggml.eos_token_id", 2u);
    if (more) more(w);
    const std::pair<const char*, const char*> words[] = {{"model.layers.", "blk."},
                                                         {"model.embed_tokens", "token_embd"},
                                                         {"model.norm", "output_norm"},
                                                         {"input_layernorm", "attn_norm"},
                                                         {"post_attention_layernorm", "ffn_norm"},
                                                         {"self_attn.o_proj", "attn_output"},
                                                         {"self_attn.", "attn_"},
                                                         {"mlp.", "ffn_"},
                                                         {"_proj", ""}};
    for (auto& [name, x] : numbers) {
      std::string to = name;
      for (const auto& [from, word] : words)
        if (const size_t at = to.find(from); at != to.npos) to.replace(at, std::string(from).size(), word);
      const bool pairs = name.find("q_proj") != name.npos || name.find("k_proj") != name.npos;
      const std::vector<float> y = pairs ? paired(name) : x;
      w.tensor(to, 0, shapes[name], std::string(reinterpret_cast<const char*>(y.data()), y.size() * 4));
    }
    const std::vector<float> divisors = {1, 2, 4};
    w.tensor("rope_freqs.weight", 0, {3}, std::string(reinterpret_cast<const char*>(divisors.data()), 12));
    write_file(dir / "model.gguf", w.bytes());
    return dir / "model.gguf";
  }
};

struct Loaded {
  DecoderSpec spec;
  Arena arena;
  DecoderWeights weights;
};
Loaded load(const std::string& path) {
  Loaded l{.spec = read_family_spec(path)};
  const detail::Checkpoint checkpoint(path);
  l.arena = Arena(lay_out_family(checkpoint, l.spec, l.spec.layers, nullptr).bytes);
  detail::CheckpointLayout layout = lay_out_family(checkpoint, l.spec, l.spec.layers, &l.arena);
  detail::read_range(layout.reads, layout.weights.embed.data.data, l.arena.capacity());
  l.weights = std::move(layout.weights);
  return l;
}
std::vector<float> numbers_of(const Tensor& t) { return {t.ptr<float>(), t.ptr<float>() + t.numel()}; }

TEST(Families, ReadTheSameNumbersFromSafetensorsAndFromGgufWithPairedRows) {
  Tiny tiny;
  const Loaded a = load(tiny.write_safetensors_files()), b = load(tiny.write_gguf());
  const DecoderLayer &x = a.weights.layers[1], &y = b.weights.layers[1];
  const std::pair<Tensor, Tensor> pairs[] = {{x.qkv.data, y.qkv.data},
                                             {x.b_qkv, y.b_qkv},
                                             {x.o.data, y.o.data},
                                             {x.b_o, y.b_o},
                                             {x.gate_up.data, y.gate_up.data},
                                             {x.down.data, y.down.data},
                                             {x.attn_norm, y.attn_norm},
                                             {x.mlp_norm, y.mlp_norm}};
  for (const auto& [p, q] : pairs) EXPECT_EQ(numbers_of(p), numbers_of(q));
  std::vector<float> qkv;
  for (const char* part : {"q", "k", "v"}) {
    const auto& t = tiny.numbers["model.layers.1.self_attn." + std::string(part) + "_proj.weight"];
    qkv.insert(qkv.end(), t.begin(), t.end());
  }
  EXPECT_EQ(numbers_of(x.qkv.data), qkv);
  // Rows of gate and up take turns.
  EXPECT_EQ(numbers_of(x.gate_up.data)[8], tiny.numbers["model.layers.1.mlp.up_proj.weight"][0]);
  EXPECT_EQ(b.spec.rope[0].divisors, (std::vector<double>{1, 2, 4}));
  const auto angles = frequencies_of(a.spec, a.spec.rope[0]).theta,
             divided = frequencies_of(b.spec, b.spec.rope[0]).theta;
  EXPECT_DOUBLE_EQ(divided[2], angles[2] / 4);
}

TEST(Families, KeysOfAGgufFileAreReadOrWithoutEffectOrRefused) {
  Tiny tiny;
  const auto refusal_of = [&](const std::function<void(GgufWriter&)>& more) {
    const std::string path = tiny.write_gguf(more), message = error_of([&] { (void)read_family_spec(path); });
    return message.substr(0, message.find(path)) +
           (message.empty() ? "" : message.substr(message.find(path) + path.size()));
  };
  EXPECT_EQ(
      refusal_of([](GgufWriter& w) {
        w.key("llama.vocab_size", 5u).key("llama.rope.scaling.finetuned", true).key("llama.attention.causal", true);
        w.key("llama.expert_used_count", 0u).key("llama.pooling_type", 3u).key("qwen3.attention.scale", 0.5f);
      }),
      "");
  EXPECT_EQ(refusal_of([](GgufWriter& w) { w.key("llama.attention.scale", 0.5f); }),
            "unsupported: : llama.attention.scale: found number 0.5, a property of models that Ingot does not know; "
            "expected none");
  EXPECT_EQ(refusal_of([](GgufWriter& w) { w.key("llama.attention.causal", false); }),
            "unsupported: : llama.attention.causal: found false, expected true");
  for (const char* name :
       {"llama.attention.sliding_window", "llama.rope.scale_linear", "llama.rope.scaling.attn_factor"})
    EXPECT_NE(refusal_of([&](GgufWriter& w) { w.key(name, 2u); }).find(": " + std::string(name) + ": found "),
              std::string::npos)
        << name;
}

TEST(Families, ATiedHeadMayBeThereOrNotAndNoOtherTensorMay) {
  Tiny tiny;
  tiny.add("lm_head.weight", {5, 8});
  const std::vector<float> other = tiny.numbers["lm_head.weight"];
  tiny.numbers["lm_head.weight"] = tiny.numbers["model.embed_tokens.weight"];
  const Loaded redundant = load(tiny.write_safetensors_files());
  EXPECT_EQ(redundant.weights.head.data.data, redundant.weights.embed.data.data);
  tiny.numbers["lm_head.weight"] = other;
  tiny.write_safetensors_files();
  const std::string two = error_of([&] { load(tiny.dir.path()); });
  EXPECT_NE(two.find("found tie_word_embeddings and a lm_head.weight that is not model.embed_tokens.weight"), two.npos)
      << two;

  tiny.config = with(tiny.config.c_str(), "tie_word_embeddings", "false");
  EXPECT_NE(load(tiny.write_safetensors_files()).weights.head.data.data, nullptr);
  tiny.numbers.erase("lm_head.weight");
  tiny.write_safetensors_files();
  EXPECT_EQ(error_of([&] { load(tiny.dir.path()); }),
            "bad data: " + tiny.dir.path() + ": 1 tensors are missing, such as lm_head.weight");

  tiny.config = with(tiny.config.c_str(), "tie_word_embeddings", "true");
  tiny.add("model.layers.0.self_attn.sinks", {2});
  tiny.write_safetensors_files();
  const std::string left_over = error_of([&] { load(tiny.dir.path()); });
  EXPECT_NE(left_over.find("found tensor \"model.layers.0.self_attn.sinks\""), left_over.npos) << left_over;
}

TEST(Families, TheIdsThatEndAnAnswerAreThoseOfTheGenerationConfig) {
  Tiny tiny;
  const std::string path = tiny.write_safetensors_files();
  EXPECT_EQ(read_family_spec(path).end_tokens, std::vector<int64_t>{2});
  write_file(tiny.dir / "generation_config.json", R"({"eos_token_id": [2, 4], "temperature": 0.6})");
  EXPECT_EQ(read_family_spec(path).end_tokens, (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(open_model(path, {.device = DeviceChoice::cpu}).end_ids, (std::vector<int32_t>{2, 4}));
}

TEST(Families, PathsAreRecognisedByTheContentOfTheFiles) {
  Tiny tiny;
  EXPECT_TRUE(is_family(tiny.write_safetensors_files()));
  EXPECT_TRUE(is_family(tiny.write_gguf()));
  EXPECT_STREQ(model_kind_of(tiny.dir / "model.gguf").name, "decoder");
  write_file(tiny.dir / "other.gguf", GgufWriter().key("general.architecture", "gpt-oss").bytes());
  EXPECT_STREQ(model_kind_of(tiny.dir / "other.gguf").name, "gpt-oss");
  write_file(tiny.dir / "unknown.gguf", GgufWriter().key("general.architecture", "rwkv7").bytes());
  const std::string unknown = error_of([&] { (void)open_model(tiny.dir / "unknown.gguf"); });
  EXPECT_NE(unknown.find("general.architecture: found \"rwkv7\""), unknown.npos) << unknown;
  write_file(tiny.dir / "damaged.gguf", "GGUF\x03");
  EXPECT_FALSE(is_family(tiny.dir / "damaged.gguf"));
}

TEST(Families, ADirectoryAndAGgufFileOfOneModelGiveTheSameTokens) {
  Tiny tiny;
  const std::string directory = tiny.write_safetensors_files(), file = tiny.write_gguf();
  OpenedModel a = open_model(directory, {.device = DeviceChoice::cpu}),
              b = open_model(file, {.device = DeviceChoice::cpu});
  Sequence s(*a.decoder), t(*b.decoder);
  const std::vector<int32_t> ids = {1};  // at position 0 nothing is rotated
  s.extend(ids), t.extend(ids);
  EXPECT_EQ(s.sample({.sampling = {.temperature = 0}}, 1).tokens, t.sample({.sampling = {.temperature = 0}}, 1).tokens);
}

// --- forms ----------------------------------------------------------------------------------------------------------

TEST(Families, DenseMatricesOfACheckpointBecomeAnArchivesAtLoading) {
  Tiny tiny;
  const std::string directory = tiny.write_safetensors_files(), archive = tiny.dir / "model.ingot";
  const auto scored = [](const OpenedModel& m) {
    Sequence s(*m.decoder);
    s.extend(std::vector<int32_t>{1, 3});
    return s.sample({.sampling = {.temperature = 0}, .logprobs = 5}, 1).logprobs.at(0).sampled;
  };
  const double stored = scored(open_model(directory, {.device = DeviceChoice::cpu}));
  for (const auto& [name, form] : {std::pair{"bf16", WeightFormat::bf16}, {"fp8", WeightFormat::fp8}}) {
    convert_family(directory, archive, {.forms = {.dense = form, .experts = WeightFormat::bf16}});
    const OpenedModel loaded = open_model(directory, {.device = DeviceChoice::cpu, .dense = name}),
                      converted = open_model(archive, {.device = DeviceChoice::cpu});
    EXPECT_EQ(scored(loaded), scored(converted)) << name;
    EXPECT_NE(scored(loaded), stored) << name << " is the checkpoint's f32";
    EXPECT_EQ(loaded.weight_bytes, converted.weight_bytes);
    EXPECT_NE(loaded.note.find("dense matrices became " + std::string(name) + " at loading"), loaded.note.npos)
        << loaded.note;
  }
  EXPECT_NE(error_of([&] { (void)open_model(archive, {.dense = "fp8"}); }).find("--dense: found an archive"),
            std::string::npos);
  const std::string narrow = error_of([&] { (void)open_model(directory, {.dense = "mxfp4"}); });
  EXPECT_NE(narrow.find(directory + ": found dense rows of 8 numbers, expected a multiple of 32"), narrow.npos)
      << narrow;
  EXPECT_NE(error_of([&] { (void)open_model(directory, {.dense = "int8"}); }).find("expected bf16, fp8 or mxfp4"),
            std::string::npos);
}

// --- text --------------------------------------------------------------------------------------------------------

// A tokenizer.json has a token for each of the 256 bytes, here followed by two special tokens. The tests that use it
// give the model a larger vocabulary than Tiny's 5 tokens.
std::string tokenizer_json(const char* post_processor) {
  ByteBpeRules rules;
  for (int b = 0; b < 256; ++b) rules.tokens.push_back(std::string(1, char(b)));
  rules.specials = {{256, "<|im_start|>"}, {257, "<|im_end|>"}};
  Json json = Json::parse(ByteBpe(rules).to_json());
  json["post_processor"] = Json::parse(post_processor);
  return json.dump();
}

const char kSmolLm2Template[] =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}";

TEST(Families, TheChatFormatIsThatOfTheTemplateOrTheRequestedOne) {
  Tiny tiny;
  tiny.config = with(tiny.config.c_str(), "vocab_size", "258");
  const std::string path = tiny.write_safetensors_files();
  write_file(tiny.dir / "tokenizer.json", tokenizer_json("null"));
  const Vocabulary none = load_vocabulary(path);
  EXPECT_EQ(none.chat, nullptr);
  EXPECT_NE(none.no_chat.find("found no chat template, expected --chat-format NAME"), none.no_chat.npos)
      << none.no_chat;
  EXPECT_STREQ(load_vocabulary(path, {.chat_format = "smollm2"}).chat->name(), "smollm2");

  write_file(tiny.dir / "tokenizer_config.json", R"({"chat_template": "{{ messages }}"})");
  const Vocabulary unknown = load_vocabulary(path);
  EXPECT_EQ(unknown.chat, nullptr);
  EXPECT_NE(unknown.no_chat.find("found a chat template that is not known"), unknown.no_chat.npos) << unknown.no_chat;
  EXPECT_NE(error_of([&] { (void)load_vocabulary(path, {.chat = true}); }).find("a chat template that is not known"),
            std::string::npos);
  EXPECT_NE(error_of([&] { (void)load_vocabulary(path, {.chat_format = "qwen3"}); }).find("found no token <tool_call>"),
            std::string::npos);

  write_file(tiny.dir / "tokenizer_config.json",
             Json{{"chat_template", Json::array({{{"name", "default"}, {"template", kSmolLm2Template}}})}}.dump());
  EXPECT_STREQ(load_vocabulary(path, {.chat = true}).chat->name(), "smollm2");
  write_file(tiny.dir / "chat_template.jinja", "another");  // the file goes before the config
  EXPECT_EQ(load_vocabulary(path).chat, nullptr);
}

TEST(Families, AControlTokenMayLieAboveTheVocabularyAndAnOrdinaryTokenMayNot) {
  Tiny tiny;
  tiny.config = with(tiny.config.c_str(), "vocab_size", "257");
  const std::string path = tiny.write_safetensors_files();
  write_file(tiny.dir / "tokenizer.json", tokenizer_json("null"));
  EXPECT_EQ(load_vocabulary(path).tokenizer->vocab_size(), 258);
  tiny.config = with(tiny.config.c_str(), "vocab_size", "255");
  tiny.write_safetensors_files();
  EXPECT_NE(
      error_of([&] { (void)load_vocabulary(path); }).find("found a tokenizer of 258 tokens, expected at most 255"),
      std::string::npos);
}

TEST(Families, AKnownTemplateWhoseTokensAreMissingStillLetsTheModelContinueTexts) {
  Tiny tiny;
  tiny.config = with(tiny.config.c_str(), "vocab_size", "258");
  const std::string path = tiny.write_safetensors_files();
  ByteBpeRules rules;
  for (int b = 0; b < 256; ++b) rules.tokens.push_back(std::string(1, char(b)));
  write_file(tiny.dir / "tokenizer.json", ByteBpe(rules).to_json());
  write_file(tiny.dir / "chat_template.jinja", kSmolLm2Template);
  const Vocabulary v = load_vocabulary(path);
  EXPECT_EQ(v.chat, nullptr);
  EXPECT_NE(v.no_chat.find("found no token <|im_start|>"), std::string::npos) << v.no_chat;
  EXPECT_NE(error_of([&] { (void)load_vocabulary(path, {.chat = true}); }).find("found no token <|im_start|>"),
            std::string::npos);
}

TEST(Families, AnArchiveOfAGgufFileKeepsAVocabularyOfSentencePiece) {
  Tiny tiny;
  const std::string gguf = tiny.write_gguf([](GgufWriter& w) {
    std::string scores = GgufWriter::number(6u) + GgufWriter::number(uint64_t(5));
    for (int i = 0; i < 5; ++i) scores += GgufWriter::number(-float(i));
    w.key("tokenizer.ggml.model", "llama")
        .key("tokenizer.ggml.bos_token_id", 1u)
        .add("tokenizer.ggml.scores", 9, scores);
    w.key("tokenizer.ggml.tokens", std::vector<std::string>{"<unk>", "<s>", "</s>", "\u2581", "a"});
    w.key("tokenizer.ggml.token_type", std::vector<int32_t>{2, 3, 3, 1, 1});
  });
  const std::string archive = tiny.dir / "model.ingot";
  convert_family(gguf, archive, {});
  const Vocabulary before = load_vocabulary(gguf), after = load_vocabulary(archive);
  EXPECT_EQ(after.tokenizer->kind(), "sentencepiece");
  EXPECT_EQ(after.tokenizer->hash(), before.tokenizer->hash());
  EXPECT_EQ(after.tokenizer->encode("a a"), (std::vector<int32_t>{3, 4, 3, 4}));
  EXPECT_EQ(after.start, 1);
}

TEST(Families, ADirectoryMayHaveAModelFileOfSentencePieceAlone) {
  Tiny tiny;
  tiny.config = with(tiny.config.c_str(), "vocab_size", "2000");
  tiny.numbers.erase("model.embed_tokens.weight");
  tiny.add("model.embed_tokens.weight", {2000, 8});
  const std::string path = tiny.write_safetensors_files(), file = tiny.dir / "tokenizer.model";
  const std::string model = read_file(std::string(INGOT_SOURCE_DIR) + "/tests/data/text/sp.model");
  write_file(file, model);
  const Vocabulary v = load_vocabulary(path);
  EXPECT_EQ(v.tokenizer->kind(), "sentencepiece");
  EXPECT_EQ(v.start, v.tokenizer->bos());
  EXPECT_GE(v.start, 0);
  // An archive keeps both, also of a folder in the cache of Hugging Face's tools.
  const std::string cached = tiny.dir / "models--a--b/snapshots/1", archive = tiny.dir / "model.ingot";
  create_directories(cached);
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.model"})
    write_file(join_path(cached, name), read_file(tiny.dir / name));
  for (const std::string& from : {path, tiny.dir / "models--a--b"}) {
    convert_family(from, archive, {});
    EXPECT_EQ(load_vocabulary(archive).tokenizer->hash(), v.tokenizer->hash()) << from;
    EXPECT_EQ(load_vocabulary(archive).start, v.start) << from;
  }
  write_file(tiny.dir / "tokenizer_config.json", R"({"add_bos_token": false})");
  EXPECT_EQ(load_vocabulary(path).start, -1);
  // Llama 3's file of this name has ranks.
  write_file(file, "IQ== 0\nIg== 1\n");
  EXPECT_NE(error_of([&] { (void)load_vocabulary(path); }).find("found a model without a tokenizer"),
            std::string::npos);
}

TEST(Families, TheStartTokenIsThatOfTheTokenizerThatIsUsed) {
  Tiny tiny;
  tiny.config = with(tiny.config.c_str(), "vocab_size", "258");
  const std::string path = tiny.write_safetensors_files(), elsewhere = tiny.dir / "elsewhere.json";
  const char* const kTemplate =
      R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}], "pair": []})";
  write_file(elsewhere, tokenizer_json(kTemplate));
  EXPECT_EQ(load_vocabulary(path, {.tokenizer = elsewhere}).start, 256);
  write_file(tiny.dir / "tokenizer.json", tokenizer_json("null"));
  EXPECT_EQ(load_vocabulary(path, {.tokenizer = elsewhere}).start, 256);
  EXPECT_EQ(load_vocabulary(path).start, -1);
}

TEST(Families, AGgufFileWithoutAddBosTokenHasAStartTokenWhereItsVocabularyHas) {
  for (const auto& [pre, start] : {std::pair{"tekken", 1}, {"llama-bpe", 1}, {"qwen2", -1}, {"smollm", -1}}) {
    Tiny tiny;
    const std::string gguf = tiny.write_gguf([&](GgufWriter& w) {
      w.key("tokenizer.ggml.model", "gpt2").key("tokenizer.ggml.pre", pre).key("tokenizer.ggml.bos_token_id", 1u);
    });
    EXPECT_EQ(archived_family(gguf).spec.start_token, start) << pre;
  }
}

TEST(Families, ASequenceBeginsWithTheTokenThatThePostProcessorPutsInFront) {
  Tiny tiny;
  tiny.config = with(tiny.config.c_str(), "vocab_size", "258");
  const std::string path = tiny.write_safetensors_files();
  const char* const kTemplate =
      R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
          {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}})";
  const std::string in_sequence =
      R"({"type": "Sequence", "processors": [{"type": "ByteLevel"}, )" + std::string(kTemplate) + "]}";
  for (const auto& [processor, start] : {std::pair<const char*, int32_t>{"null", -1},
                                         {kTemplate, 256},
                                         {in_sequence.c_str(), 256},
                                         {R"({"type": "ByteLevel"})", -1}}) {
    write_file(tiny.dir / "tokenizer.json", tokenizer_json(processor));
    EXPECT_EQ(load_vocabulary(path).start, start) << processor;
  }
}

}  // namespace
}  // namespace ingot
