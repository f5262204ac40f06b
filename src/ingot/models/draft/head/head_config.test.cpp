#include "ingot/models/draft/head/head_config.h"

#include <gtest/gtest.h>

#include "ingot/io/file.h"
#include "ingot/models/draft/head/head_weights.h"
#include "ingot/models/draft/head/random_head.test.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot::draft {
namespace {

using testing::error_of;
using testing::RandomHead;
using testing::TemporaryDirectory;

// GPT-OSS 120B, as far as a head looks at its target.
DecoderSpec target() {
  DecoderSpec s;
  s.vocab = 201088, s.hidden = 2880, s.layers = 36;
  return s;
}
HeadConfig read(const std::string& config, const HeadOptions& options = {}, int64_t layers = 36) {
  const TemporaryDirectory dir;
  write_file(dir / "config.json", config);
  return read_head_config(dir.path(), target(), layers, options);
}

const char* const kSizes =
    R"("hidden_size": 2880, "intermediate_size": 17280, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-05, "num_hidden_layers": 1, "vocab_size": 201088, "hidden_act": "silu", "max_position_embeddings": 4096, "attention_bias": false)";

// As ModelOpt writes a head, with norm_before_fc at both places.
std::string model_opt() {
  return detail::concat(
      R"({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "torch_dtype": "bfloat16",
    "bos_token_id": 199998, "eos_token_id": 200002, "tie_word_embeddings": false, "mlp_bias": false, "use_cache": true, )",
      kSizes, R"(, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, "norm_before_fc": true,
    "draft_vocab_size": 32000, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 30, 36],
    "norm_before_fc": true, "use_aux_hidden_state": true, "use_input_layernorm_in_first_layer": true,
    "use_last_layernorm": true, "use_mtp_layernorm": false, "next_layer_regular": true, "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1}})");
}
std::string spec_forge() {
  return detail::concat(R"({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", )", kSizes,
                        R"(, "rope_theta": 10000.0, "rope_scaling": null, "draft_vocab_size": 32000, "eagle_config":
    {"eagle_aux_hidden_state_layer_ids": [1, 17, 33], "use_aux_hidden_state": true}})");
}
std::string speculators(const std::string& more = "") {
  return detail::concat(R"({"architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 64000, "embed_requires_grad": false, "has_no_defaults_at_init": false, "norm_before_fc": true,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "openai/gpt-oss-120b"}},
    "speculators_model_type": "eagle3", "speculators_version": "0.3.0", "target_hidden_size": null,
    "transformers_version": "4.57.0", "transformer_layer_config": {"model_type": "llama", )",
                        kSizes, R"(, "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000, "factor": 32.0,
    "original_max_position_embeddings": 2048}})",
                        more, "}");
}

TEST(HeadConfig, ReadsTheSpellingsOfThePrograms) {
  const HeadConfig a = read(model_opt());
  EXPECT_EQ(a.hidden, 2880);
  EXPECT_EQ(a.intermediate, 17280);
  EXPECT_EQ(a.q_width(), 4096);
  EXPECT_EQ(a.kv_width(), 512);
  EXPECT_EQ(a.vocab, 201088);
  EXPECT_EQ(a.draft_vocab, 32000);
  EXPECT_EQ(a.boundaries, (std::vector<int64_t>{24, 30, 36}));
  EXPECT_TRUE(a.norm_before_fc);
  EXPECT_FALSE(a.fc_norm || a.norm_output || a.norm_before_residual);
  EXPECT_EQ(a.rope.scaling.kind, RopeScaling::llama3);
  EXPECT_EQ(a.rope.theta, 500000);
  EXPECT_EQ(a.rope.scaling.original_context, 8192);

  const HeadConfig b = read(spec_forge());
  EXPECT_EQ(b.boundaries, (std::vector<int64_t>{1, 17, 33}));
  EXPECT_FALSE(b.norm_before_fc || b.norm_before_residual);
  EXPECT_EQ(b.rope.scaling.kind, RopeScaling::none);

  const HeadConfig c = read(speculators());
  EXPECT_EQ(c.boundaries, (std::vector<int64_t>{2, 18, 33})) << "of vLLM, where the file names none";
  EXPECT_TRUE(c.norm_before_fc);
  EXPECT_TRUE(c.norm_before_residual) << "the default of speculators";
  EXPECT_FALSE(read(speculators(R"(, "norm_before_residual": false)")).norm_before_residual);
  EXPECT_EQ(c.rope.scaling.kind, RopeScaling::yarn);
  EXPECT_EQ(c.rope.scaling.factor, 32);
  EXPECT_EQ(c.draft_vocab, 64000);
}

TEST(HeadConfig, OptionsReplaceTheLayersAndGiveAWindow) {
  const HeadConfig c = read(spec_forge(), {.layers = {2, 18, 34}, .window = 2048});
  EXPECT_EQ(c.boundaries, (std::vector<int64_t>{2, 18, 34}));
  EXPECT_EQ(c.window, 2048);
  EXPECT_NE(error_of([] {
              read(spec_forge(), {.layers = {2, 18, 37}});
            }).find("--draft-layers: found 37"),
            std::string::npos);
  EXPECT_NE(error_of([] { read(model_opt(), {}, 30); }).find("eagle_aux_hidden_state_layer_ids: found 36"),
            std::string::npos)
      << "the model runs 30 layers only";
}

TEST(HeadConfig, RefusesEveryPropertyThatAHeadOfIngotDoesNotHave) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {R"("draft_vocab_size": 300000)", "draft_vocab_size: found 300000, expected 1 to 201088"},
      {R"("quantization_config": {"quant_method": "modelopt"})", "quantization_config: a property of heads"},
      {R"("use_mtp_layernorm": true)", "use_mtp_layernorm: found true, expected false"},
      {R"("use_aux_hidden_state": false)", "use_aux_hidden_state: found false and, in eagle_config"},
      {R"("norm_output": 1)", "norm_output: found number 1, expected true or false"},
      {R"("norm_before_fc": true, "fc_norm": true)", "fc_norm: found true with norm_before_fc"},
      {R"("target_hidden_size": 4096)", "target_hidden_size: found number 4096, expected 2880"},
      {R"("ptd_token_id": 201020)", "ptd_token_id: a property of heads"},
      {R"("tie_word_embeddings": true)", "tie_word_embeddings: found true"},
      {R"("speculators_model_type": "dflash")", "speculators_model_type: found string \"dflash\""},
      {R"("partial_rotary_factor": 0.5)", "partial_rotary_factor: found number 0.5"},
  };
  for (const auto& [keys, expected] : wrong) {
    std::string config = spec_forge();
    config.insert(config.rfind('}'), ", " + keys);
    if (keys.find("draft_vocab_size") != keys.npos) config.erase(config.find("\"draft_vocab_size\": 32000, "), 26);
    const std::string error = error_of([&] { read(config); });
    EXPECT_NE(error.find(expected), std::string::npos) << keys << ": " << error;
  }
  EXPECT_NE(error_of([] { read(R"({"architectures": ["LlamaForCausalLM"]})"); }).find("architectures: found"),
            std::string::npos);
  DecoderSpec scaled = target();
  scaled.embedding_scale = 2;
  const TemporaryDirectory dir;
  write_file(dir / "config.json", spec_forge());
  EXPECT_NE(error_of([&] { read_head_config(dir.path(), scaled, 36); }).find("scales its embedding"),
            std::string::npos);
}

TEST(HeadConfig, NamesAllProblemsInOneError) {
  std::string config = spec_forge();
  const auto replace = [&](const std::string& from, const std::string& to) {
    config.replace(config.find(from), from.size(), to);
  };
  replace("\"hidden_size\": 2880", "\"hidden_size\": 4096");
  replace("\"vocab_size\": 201088", "\"vocab_size\": 151936");
  replace("[1, 17, 33]", "[1, 1, 99]");
  replace("\"num_key_value_heads\": 8", "\"num_key_value_heads\": 7");
  replace("\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"");
  replace("\"intermediate_size\": 17280, ", "");
  config.insert(config.rfind('}'), ", \"some_norm\": true");
  const std::string error = error_of([&] { read(config); });
  for (const char* part :
       {"config.json: ", "hidden_size: found 4096, expected 2880, the model's", "vocab_size: found 151936",
        "eagle_aux_hidden_state_layer_ids: found 1,", "eagle_aux_hidden_state_layer_ids: found 99",
        "num_key_value_heads: found 7, expected a divisor of 64", "hidden_act: found string \"gelu\"",
        "found no intermediate_size", "some_norm: a property of heads"})
    EXPECT_NE(error.find(part), std::string::npos) << part << " is not in " << error;
}

// --- tensors

DecoderSpec small_target() {
  DecoderSpec s;
  s.vocab = 37, s.hidden = 32, s.layers = 2;
  return s;
}
std::string error_of_head(RandomHead random) {
  const TemporaryDirectory dir;
  return error_of([&] {
    random.write(dir / "head");
    load_draft_head(dir / "head", small_target(), 2);
  });
}

TEST(HeadWeights, TensorsAreFoundUnderEveryPrefix) {
  for (const char* prefix : {"midlayer.", "layers.0.", "model.layers.0."}) {
    const TemporaryDirectory dir;
    RandomHead random;
    random.own_embedding = true, random.prefix = prefix;
    random.write(dir / "head");
    const DraftHead head = load_draft_head(dir / "head", small_target(), 2);
    EXPECT_EQ(head.weights.qkv.rows(), 64);
    EXPECT_EQ(head.weights.qkv.cols(), 64);
    EXPECT_EQ(head.weights.fc.cols(), 96);
    EXPECT_EQ(head.weights.embed.rows(), 37);
    EXPECT_EQ(head.weights.head.rows(), 20);
    ASSERT_EQ(head.weights.ids.size(), 20u);
    EXPECT_EQ(head.weights.ids[0], 1);
    EXPECT_EQ(head.weights.ids[19], 29);
  }
  const TemporaryDirectory dir;
  RandomHead whole;
  whole.draft_vocab = 37;
  whole.write(dir / "head");
  const DraftHead head = load_draft_head(dir / "head", small_target(), 2);
  EXPECT_FALSE(head.weights.embed);
  EXPECT_FALSE(head.weights.head) << "the target's";
  EXPECT_TRUE(head.weights.ids.empty());
}

TEST(HeadWeights, MatricesAreConvertedButTheEmbeddingAndTheNorms) {
  const TemporaryDirectory dir;
  RandomHead random;
  random.own_embedding = true, random.intermediate = 64;
  random.write(dir / "head");
  const DraftHead stored = load_draft_head(dir / "head", small_target(), 2);
  for (const WeightFormat f : {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
    const DraftHead head = load_draft_head(dir / "head", small_target(), 2, {.format = f});
    const HeadWeights& w = head.weights;
    for (const WeightMatrix* m : {&w.fc, &w.qkv, &w.o, &w.gate_up, &w.down, &w.head}) EXPECT_EQ(m->format, f);
    EXPECT_EQ(w.embed.format, WeightFormat::bf16);
    // Rows of numbers near a common size: e4m3 keeps 3 bits behind the first, e2m1 one.
    const double steps = f == WeightFormat::bf16 ? 0 : f == WeightFormat::fp8 ? 0x1p-4 : 0x1p-1;
    std::vector<float> want(size_t(64 * 64)), found(want.size());
    dequantise(stored.weights.qkv, Tensor(want.data(), {64, 64}), {});
    dequantise(w.qkv, Tensor(found.data(), {64, 64}), {});
    double error = 0, size = 0;
    for (size_t i = 0; i < want.size(); ++i)
      error += (found[i] - want[i]) * (found[i] - want[i]), size += want[i] * want[i];
    EXPECT_LE(std::sqrt(error / size), steps / 2) << f;
    if (steps > 0) EXPECT_GT(error, 0) << f;
  }
}

TEST(HeadWeights, AFormatThatDoesNotDivideTheRowsOfAMatrixIsRefused) {
  const TemporaryDirectory dir;
  RandomHead random;  // an MLP of 48 channels
  random.write(dir / "head");
  const std::string error =
      error_of([&] { load_draft_head(dir / "head", small_target(), 2, {.format = WeightFormat::mxfp4}); });
  EXPECT_NE(error.find("head: down: found rows of 48 numbers, expected a multiple of 32 for mxfp4"), std::string::npos)
      << error;
}

TEST(HeadWeights, MissingUnusedAndMisshapenTensorsAreRefused) {
  RandomHead missing;
  missing.damage = [](auto& t) { t.erase("fc.weight"), t.erase("midlayer.mlp.up_proj.weight"), t.erase("d2t"); };
  EXPECT_NE(error_of_head(missing).find("3 tensors are missing, such as fc.weight"), std::string::npos);
  // A norm that config.json does not speak of must not be left out in silence.
  RandomHead silent;
  silent.damage = [](auto& t) { t["extra_norm.weight"] = {"extra_norm.weight", t["norm.weight"].tensor}; };
  EXPECT_NE(error_of_head(silent).find("found extra_norm.weight, which a head with this config.json does not have"),
            std::string::npos);
  RandomHead wide;
  wide.damage = [](auto& t) { t["fc.weight"].tensor = t["fc.weight"].tensor.slice(0, 0, 31); };
  EXPECT_NE(error_of_head(wide).find("fc.weight"), std::string::npos);
  RandomHead outside;
  outside.damage = [](auto& t) { t["d2t"].tensor.template ptr<int64_t>()[19] = 18; };
  EXPECT_NE(error_of_head(outside).find("found offset 18 of id 19, expected ids from 0 to 36"), std::string::npos);
  EXPECT_NE(error_of([] { load_draft_head("/nowhere", small_target(), 2); }).find("/nowhere"), std::string::npos);
}

}  // namespace
}  // namespace ingot::draft
