#include "ingot/models/gpt_oss/gpt_oss.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "ingot/io/json.h"
#include "ingot/models/gpt_oss/random_checkpoint.test.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::GptOssCheckpoint;
using testing::TemporaryDirectory;

std::string refusal(const std::string& directory, const GptOssLoad& load = {}) {
  return error_of([&] { load_gpt_oss(directory, read_gpt_oss_config(directory), load); });
}
bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// --- config --------------------------------------------------------------------------------------------------------
const char* const kPublished =
    R"({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": true,
  "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
  "initial_context_length": 4096, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"],
  "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 2,
  "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0,
  "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
  "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false, "vocab_size": 201088})";
const char* const kWritten =
    R"({"model_type": "gpt_oss", "attention_bias": true, "eos_token_id": [200002], "head_dim": 64,
  "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880, "layer_types": ["sliding_attention",
  "full_attention"], "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
  "num_hidden_layers": 2, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_parameters":
  {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
  "rope_theta": 150000.0, "truncate": false}, "sliding_window": 128, "vocab_size": 201088, "dtype": "bfloat16"})";
const char* const kOwn = R"({"num_hidden_layers": 2, "num_experts": 32, "experts_per_token": 4, "vocab_size": 201088,
  "hidden_size": 2880, "intermediate_size": 2880, "swiglu_limit": 7.0, "head_dim": 64, "num_attention_heads": 64,
  "num_key_value_heads": 8, "sliding_window": 128, "initial_context_length": 4096, "rope_theta": 150000,
  "rope_scaling_factor": 32.0, "rope_ntk_alpha": 1, "rope_ntk_beta": 32})";

TEST(gpt_oss_config, the_three_spellings_give_the_same_configuration) {
  const std::string published = to_json(gpt_oss_config_from_json(kPublished, "config.json"));
  EXPECT_EQ(to_json(gpt_oss_config_from_json(kWritten, "config.json")), published);
  GptOssConfig own = gpt_oss_config_from_json(kOwn, "config.json");
  EXPECT_TRUE(own.end_tokens.empty());
  own.end_tokens = {200002};
  EXPECT_EQ(to_json(own), published);
  EXPECT_EQ(to_json(gpt_oss_config_from_json(published, "again")), published);
}

TEST(gpt_oss_config, rotations_with_other_values_are_read) {
  std::string own = kOwn;
  const auto put = [&](const std::string& from, const std::string& to) {
    own.replace(own.find(from), from.size(), to);
  };
  put(R"("rope_ntk_alpha": 1)", R"("rope_ntk_alpha": 2)");
  put(R"("rope_ntk_beta": 32)", R"("rope_ntk_beta": 24)");
  put(R"("rope_scaling_factor": 32.0)", R"("rope_scaling_factor": 8)");
  put(R"("initial_context_length": 4096)", R"("initial_context_length": 2048)");
  const RopeScaling scaling = gpt_oss_config_from_json(own, "config.json").rope_scaling;
  EXPECT_EQ(scaling.beta_slow, 2);
  EXPECT_EQ(scaling.beta_fast, 24);
  EXPECT_EQ(scaling.factor, 8);
  EXPECT_EQ(scaling.original_context, 2048);
}

TEST(gpt_oss_config, missing_keys_have_the_values_of_the_architecture) {
  // Only Hugging Face's sizes, among them a head_dim that differs from hidden / heads.
  const std::string sizes =
      R"({"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 2,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
    "num_experts_per_tok": 4)";
  GptOssConfig published = gpt_oss_config_from_json(kPublished, "config.json");
  published.end_tokens.clear();
  for (const char* more : {"", R"(, "rope_scaling": null, "rope_parameters": null)", R"(, "rope_scaling": {})"})
    EXPECT_EQ(to_json(gpt_oss_config_from_json(sizes + more + "}", "config.json")), to_json(published)) << more;
  std::string narrow = sizes + R"(, "rope_parameters": {}, "head_dim": null})";
  narrow.replace(narrow.find("2880"), 4, "2048");
  const GptOssConfig plain = gpt_oss_config_from_json(narrow, "config.json");
  EXPECT_EQ(plain.rope_scaling.kind, RopeScaling::none);
  EXPECT_EQ(plain.head_dim, 2048 / 64);
  const GptOssConfig own = gpt_oss_config_from_json(
      R"({"num_hidden_layers": 2, "num_experts": 32, "experts_per_token": 4, "vocab_size": 201088, "hidden_size": 2880,
          "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8})",
      "config.json");
  EXPECT_EQ(to_json(own), to_json(published));
}

TEST(gpt_oss_config, rotations_given_in_part_or_for_each_kind_of_layer_are_refused) {
  const std::vector<std::array<std::string, 2>> cases = {
      {R"("rope_parameters": {"rope_type": "yarn", "factor": 8})",
       "found yarn without original_max_position_embeddings"},
      {R"("rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 8})", "\"factor\" is missing"},
      {R"("rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}})",
       "found settings of their own for full_attention"},
      {R"("partial_rotary_factor": 0.5)", "partial_rotary_factor: found 0.5, expected 1"},
  };
  for (const auto& [rope, message] : cases) {
    std::string text = kPublished;
    const size_t at = text.find("\"rope_scaling\""), end = text.find('}', at) + 1;
    const std::string found =
        error_of([&] { gpt_oss_config_from_json(text.replace(at, end - at, rope), "config.json"); });
    EXPECT_TRUE(holds(found, message)) << rope << ": " << found;
  }
}

TEST(gpt_oss_config, published_frequencies_are_the_specified_ones) {
  const GptOssConfig c = gpt_oss_config_from_json(kPublished, "config.json");
  const RopeFrequencies f = rope_frequencies(c.head_dim, c.rope_base, c.rope_scaling);
  const std::map<size_t, double> want = {{0, 1.0},          {1, 0.6890443},    {8, 5.081327e-2},  {9, 3.170570e-2},
                                         {12, 6.794959e-3}, {13, 3.860359e-3}, {16, 4.564839e-4}, {17, 1.293187e-4},
                                         {18, 3.830881e-5}, {31, 3.023511e-7}};
  for (const auto& [i, theta] : want) EXPECT_NEAR(f.theta[i] / theta, 1, 2e-7) << i;
  EXPECT_NEAR(f.amplitude, 1.3465735902799727, 1e-15);
}

TEST(gpt_oss_config, values_of_another_model_are_refused_by_field) {
  const std::vector<std::array<std::string, 3>> cases = {
      {R"("model_type": "gpt_oss")", R"("model_type": "llama")", "model_type: found \"llama\", expected \"gpt_oss\""},
      {R"("hidden_act": "silu")", R"("hidden_act": "gelu")", "hidden_act: found \"gelu\""},
      {R"("hidden_act": "silu")", R"("hidden_act": "silu", "quantization_config": {"quant_method": "gptq", "bits": 4})",
       "quantization_config.quant_method: found string \"gptq\", expected \"mxfp4\""},
      {R"("hidden_act": "silu")", R"("hidden_act": "silu", "quantization_config": {"bits": 4})",
       "quantization_config.quant_method: found null, expected \"mxfp4\""},
      {R"("num_hidden_layers": 2)", R"("num_hidden_layers": 3)", "layer_types: found 2 entries, expected 3"},
      {R"("num_hidden_layers": 2)", R"("num_hidden_layers": 1000000000)", "num_hidden_layers: found 1000000000"},
      {R"("num_hidden_layers": 2)", R"("num_hidden_layers": -1)", "num_hidden_layers: found -1, expected 1 to 4096"},
      {R"("num_key_value_heads": 8)", R"("num_key_value_heads": 7)", "expected a divisor of num_attention_heads = 64"},
      {R"("num_experts_per_tok": 4)", R"("num_experts_per_tok": 33)",
       "num_experts_per_tok: found 33, expected 1 to 32"},
      {R"("head_dim": 64)", R"("head_dim": 63)", "head_dim: found 63, expected an even number"},
      {R"("head_dim": 64)", R"("head_dim": "x")", "\"head_dim\": found string \"x\", expected an integer"},
      {R"("sliding_window": 128)", R"("sliding_window": 0)", "sliding_window: found 0"},
      {R"("rms_norm_eps": 1e-05)", R"("rms_norm_eps": 0)", "rms_norm_eps: found 0"},
      {R"("rope_theta": 150000)", R"("rope_theta": 0.5)", "rope_theta: found 0.5"},
      {R"("rope_type": "yarn")", R"("rope_type": "llama3")", "rope_type: found \"llama3\", expected yarn or default"},
      {R"("factor": 32.0)", R"("factor": -1)", "rope factor: found -1"},
      {R"("full_attention")", R"("linear_attention")", "layer_types: found \"linear_attention\""},
      {R"("vocab_size": 201088)", R"("vocab": 201088)", "\"vocab_size\" is missing"},
      {R"("eos_token_id": 200002)", R"("eos_token_id": "x")", "eos_token_id: found string \"x\""},
  };
  for (const auto& [from, to, message] : cases) {
    std::string text = kPublished;
    text.replace(text.find(from), from.size(), to);
    const std::string found = error_of([&] { gpt_oss_config_from_json(text, "config.json"); });
    EXPECT_TRUE(holds(found, message)) << to << ": " << found;
  }
  std::string own = kOwn;  // the context is a product that no integer can hold
  own.replace(own.find("4096"), 4, "1e300");
  const std::string found = error_of([&] { gpt_oss_config_from_json(own, "config.json"); });
  EXPECT_TRUE(holds(found, "max_position_embeddings: found 1000000000000000, expected 1 to 67108864")) << found;
}

// --- loading -------------------------------------------------------------------------------------------------------
TEST(gpt_oss_load, every_naming_and_type_of_the_same_numbers_gives_the_same_weights) {
  const TemporaryDirectory dir;
  GptOssCheckpoint checkpoint;
  checkpoint.write(dir / "hf");
  checkpoint.write(dir / "shards", {.shards = 3});
  checkpoint.write(dir / "own", {.own_names = true});
  const GptOssConfig config = read_gpt_oss_config(dir / "hf");
  const GptOssWeights a = load_gpt_oss(dir / "hf", config);
  EXPECT_EQ(a.layers[0].gate_up.format, WeightFormat::mxfp4);
  EXPECT_EQ(a.layers[0].qkv.format, WeightFormat::bf16);
  EXPECT_EQ(gpt_oss_weight_bytes(dir / "hf", config), a.bytes());
  for (const char* other : {"shards", "own"}) {
    const GptOssWeights b = load_gpt_oss(dir / other, read_gpt_oss_config(dir / other));
    ASSERT_EQ(a.bytes(), b.bytes());
    EXPECT_EQ(std::memcmp(a.embed.data.data, b.embed.data.data, size_t(a.bytes())), 0) << other;
  }
}

TEST(gpt_oss_load, experts_in_the_order_of_transformers_are_transposed) {
  const TemporaryDirectory dir;
  GptOssCheckpoint checkpoint;
  checkpoint.write(dir / "plain", {.experts = WeightFormat::bf16});
  const GptOssWeights w = load_gpt_oss(dir / "plain", read_gpt_oss_config(dir / "plain"));
  const SafetensorsFile file(dir / "plain/model.safetensors");
  const SafetensorsEntry* e = file.find("model.layers.1.mlp.experts.down_proj");  // (E, I, C)
  std::vector<bf16> turned(static_cast<size_t>(e->bytes() / 2));
  file.read(*e, turned.data());
  const int64_t I = e->shape[1], C = e->shape[2];
  for (int64_t x = 0; x < e->shape[0]; ++x)
    for (int64_t c = 0; c < C; ++c)
      for (int64_t i = 0; i < I; ++i)
        ASSERT_EQ(float(w.layers[1].down.data.ptr<bf16>()[(x * C + c) * I + i]),
                  float(turned[size_t((x * I + i) * C + c)]));
}

TEST(gpt_oss_load, the_first_layers_alone_can_be_loaded) {
  const TemporaryDirectory dir;
  GptOssCheckpoint().write(dir / "m");
  const GptOssConfig config = read_gpt_oss_config(dir / "m");
  EXPECT_EQ(load_gpt_oss(dir / "m", config, {.layers = 1}).layers.size(), 1u);
  EXPECT_EQ(refusal(dir / "m", {.layers = 3}), "usage: layers: found 3, expected 1 to 2, or 0 for all");
}

TEST(gpt_oss_load, damaged_checkpoints_are_refused_with_one_line_each) {
  struct Damage {
    const char* expected;
    std::function<void(std::map<std::string, NamedTensor>&, std::string&)> apply;
  };
  static uint8_t bytes[1 << 16];
  const auto replace = [](auto& tensors, const char* name, const Tensor& t) { tensors.at(name).tensor = t; };
  const std::vector<Damage> cases = {
      {"1 tensors are missing, such as model.norm.weight", [](auto& t, auto&) { t.erase("model.norm.weight"); }},
      {"tensors are missing, such as model.layers.2.",
       [](auto&, auto& c) { c.replace(c.find("hidden_layers\": 2"), 17, "hidden_layers\": 3"); }},
      {"found tensor \"model.layers.1.",
       [](auto&, auto& c) { c.replace(c.find("hidden_layers\": 2"), 17, "hidden_layers\": 1"); }},
      {"found tensor \"extra\", which a model of 2 layers with this config does not have",
       [](auto& t, auto&) {
         t["extra"] = {"extra", Tensor(bytes, {3})};
       }},
      {"\"model.layers.0.self_attn.sinks\": found shape (5), expected (4)",
       [&](auto& t, auto&) {
         replace(t, "model.layers.0.self_attn.sinks", Tensor(reinterpret_cast<bf16*>(bytes), {5}));
       }},
      {"\"lm_head.weight\": found dtype U8, expected BF16 or F32",
       [&](auto& t, auto&) { replace(t, "lm_head.weight", Tensor(bytes, t.at("lm_head.weight").tensor.shape)); }},
      {"mlp.experts.down_proj_blocks\": found dtype BF16, expected U8",
       [&](auto& t, auto&) {
         const char* name = "model.layers.0.mlp.experts.down_proj_blocks";
         replace(t, name, Tensor(reinterpret_cast<bf16*>(bytes), t.at(name).tensor.shape));
       }},
      {"1 tensors are missing, such as model.layers.1.mlp.experts.gate_up_proj_scales",
       [](auto& t, auto&) { t.erase("model.layers.1.mlp.experts.gate_up_proj_scales"); }},
      {"k_proj.weight\": found dtype F32, expected BF16 as",
       [&](auto& t, auto&) {
         const char* name = "model.layers.0.self_attn.k_proj.weight";
         replace(t, name, Tensor(reinterpret_cast<float*>(bytes), t.at(name).tensor.shape));
       }},
      {"gate_up_proj_scales\": found scale 255 at byte 7, which stands for NaN",
       [](auto& t, auto&) {
         t.at("model.layers.0.mlp.experts.gate_up_proj_scales").tensor.template ptr<uint8_t>()[7] = 255;
       }},
  };
  for (const Damage& d : cases) {
    const TemporaryDirectory dir;
    GptOssCheckpoint checkpoint;
    checkpoint.write(dir / "m", {.damage = d.apply});
    const std::string found = refusal(dir / "m");
    EXPECT_TRUE(holds(found, d.expected)) << d.expected << "\n" << found;
    EXPECT_EQ(found.find('\n'), std::string::npos);
  }
}

TEST(gpt_oss_load, too_little_memory_is_reported_before_any_is_taken) {
  const TemporaryDirectory dir;
  GptOssCheckpoint().write(dir / "m");
  const std::string found = refusal(dir / "m", {.other_bytes = int64_t(1) << 50});
  EXPECT_TRUE(holds(found, "of memory, found ")) << found;
}

// --- the model -----------------------------------------------------------------------------------------------------
struct Loaded {
  TemporaryDirectory dir;
  GptOssConfig config;
  GptOssWeights weights;
  explicit Loaded(int64_t window = 5) {
    GptOssCheckpoint checkpoint;
    checkpoint.write(dir / "m");
    config = read_gpt_oss_config(dir / "m");
    config.window = window;
    weights = load_gpt_oss(dir / "m", config);
  }
};
std::vector<int32_t> random_ids(int64_t n, int64_t vocab) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  testing::fill_ids(Tensor(ids.data(), {n}), 7, vocab);
  return ids;
}
// The hidden rows of all tokens, given to the model in batches of these sizes, used in turn.
std::vector<double> run(GptOss& model, GptOssCache& cache, std::span<const int32_t> ids, std::vector<int64_t> batches) {
  std::vector<double> rows;
  size_t at = 0;
  for (size_t i = 0; at < ids.size(); ++i) {
    const size_t n = std::min(size_t(batches[i % batches.size()]), ids.size() - at);
    const auto v = testing::values(model.extend(ids.subspan(at, n), cache));
    rows.insert(rows.end(), v.begin(), v.end());
    at += n;
  }
  return rows;
}

TEST(gpt_oss, batches_of_any_size_give_the_same_hidden_rows) {
  const Loaded m;
  GptOss model(m.config, m.weights, {.batch = 16, .positions = 64});
  const std::vector<int32_t> ids = random_ids(61, m.config.vocab);
  GptOssCache one(m.config, 2, 61, 16);
  const auto want = run(model, one, ids, {1});
  for (const std::vector<int64_t>& batches : std::vector<std::vector<int64_t>>{{16}, {3, 1, 9}, {5}, {16, 2}}) {
    GptOssCache cache(m.config, 2, 61, 16);
    const auto got = run(model, cache, ids, batches);
    std::vector<float> copy(got.begin(), got.end());
    const auto result = testing::compare(Tensor(copy.data(), {int64_t(copy.size())}), want, 2e-5, 1e-5);
    EXPECT_TRUE(result.ok) << batches[0] << ": " << result.message;
  }
}

TEST(gpt_oss, a_cache_rewinds_as_far_as_its_rings_and_snapshots_allow) {
  const Loaded m;
  GptOss model(m.config, m.weights, {.batch = 8, .positions = 64});
  const std::vector<int32_t> ids = random_ids(60, m.config.vocab);
  GptOssCache cache(m.config, 2, 60, 8), fresh(m.config, 2, 60, 8);
  const auto want = run(model, fresh, ids, {1});
  const auto same = [&](int64_t from) {  // the numbers after token `from` are as if the cache had never been longer
    const auto got = run(model, cache, std::span(ids).subspan(size_t(from)), {1});
    const std::vector<double> rest(want.begin() + from * m.config.hidden, want.end());
    EXPECT_EQ(got, rest) << from;
  };
  run(model, cache, std::span(ids).first(20), {1});
  const GptOssCache::Snapshot at20 = cache.snapshot();
  run(model, cache, std::span(ids).subspan(20), {1});
  EXPECT_EQ(cache.length(), 60);
  // The circular cache holds a batch of 8 tokens and the window of 4 tokens before the batch.
  EXPECT_TRUE(cache.can_rewind(52));
  EXPECT_FALSE(cache.can_rewind(51));
  EXPECT_TRUE(cache.can_rewind(0));
  EXPECT_EQ(error_of([&] { cache.rewind(51); }),
            "invalid argument: decode: found a cache of 60 tokens that cannot go back to 51");
  cache.rewind(52);
  same(52);
  cache.restore(at20);
  EXPECT_EQ(cache.length(), 20);
  EXPECT_TRUE(cache.can_rewind(12));  // the cache holds eight tokens more than the window before token 20
  EXPECT_FALSE(cache.can_rewind(11));
  same(20);
  EXPECT_TRUE(cache.leads_to(at20, 12) && !cache.leads_to(at20, 11) && !cache.leads_to(at20, 21));
  cache.restore(at20);
  cache.rewind(12);
  same(12);
  cache.rewind(0);
  same(0);
}

TEST(gpt_oss, arguments_that_do_not_fit_are_refused_with_both_values) {
  const Loaded m;
  GptOss model(m.config, m.weights, {.batch = 8, .positions = 64});
  GptOssCache cache(m.config, 2, 10, 8);
  const std::vector<int32_t> ids = random_ids(9, m.config.vocab), bad = {0, 37};
  EXPECT_EQ(error_of([&] { model.extend(ids, cache); }),
            "invalid argument: decode: found a batch of 9 tokens, expected 1 to 8");
  EXPECT_EQ(error_of([&] { model.extend(bad, cache); }),
            "invalid argument: decode: found id 37 at position 1, expected 0 to 36");
  model.extend(std::span(ids).first(8), cache);
  EXPECT_EQ(error_of([&] { model.extend(std::span(ids).first(3), cache); }),
            "invalid argument: decode: found 11 tokens, expected at most 10, the context that was made room for");
  EXPECT_EQ(cache.length(), 8);
}

}  // namespace
}  // namespace ingot
