// The families, a line each, and the functions for each family's own keys.
#include <cmath>

#include "ingot/core/dtype.h"
#include "ingot/models/families/family.h"

namespace ingot {
namespace {

// --- Llama, and models of its architecture such as SmolLM2
void read_llama(ConfigReader& c, DecoderSpec& s) {
  s.qkv_bias = s.output_bias = c.flag("attention_bias", false);
  s.mlp_bias = c.flag("mlp_bias", false);
}
void read_llama_gguf(GgufReader& f, DecoderSpec&) { f.must_be("expert_count", 0); }

// Returns 0 for null. A file without the key means the default of transformers' class.
int64_t read_window(ConfigReader& c) { return c.integer("sliding_window", c.has_key("sliding_window") ? 0 : 4096); }

// --- Mistral: a window in all layers if the file has a window
void read_mistral(ConfigReader& c, DecoderSpec& s) {
  const int64_t window = read_window(c);
  c.read_windows(s, window, [&](int64_t) { return window > 0; });
}

// --- Qwen: windows are present in most files and switched off
void read_qwen_windows(ConfigReader& c, DecoderSpec& s) {
  const int64_t window = read_window(c), first = c.integer("max_window_layers", 28);
  const bool on = c.flag("use_sliding_window", false) && window > 0;
  c.read_windows(s, on ? window : 0, [&](int64_t l) { return on && l >= first; });
}
void read_qwen2(ConfigReader& c, DecoderSpec& s) {
  s.qkv_bias = true;
  read_qwen_windows(c, s);
}
void read_qwen3(ConfigReader& c, DecoderSpec& s) {
  s.qk_norm = true;
  s.qkv_bias = s.output_bias = c.flag("attention_bias", false);
  read_qwen_windows(c, s);
}
void read_qwen3_moe(ConfigReader& c, DecoderSpec& s) {
  s.qk_norm = true;
  s.qkv_bias = s.output_bias = c.flag("attention_bias", false);
  // In transformers the windows of these models do not depend on max_window_layers.
  const int64_t window = read_window(c);
  const bool on = c.flag("use_sliding_window", false) && window > 0;
  c.read_windows(s, on ? window : 0, [&](int64_t) { return on; });
  s.experts = c.required_integer(c.given("num_experts") ? "num_experts" : "num_local_experts", 1, 1 << 16);
  s.experts_per_token = c.integer("num_experts_per_tok", 8);
  s.renormalise = c.flag("norm_topk_prob", false);
  s.intermediate = c.required_integer("moe_intermediate_size", 1, 1 << 20);
  c.must_be("decoder_sparse_step", 1);
  c.must_be("mlp_only_layers", Json::array());
  for (LayerSpec& l : s.layer) l.experts = true;
}
void read_qwen_gguf(GgufReader&, DecoderSpec&) {}
void read_qwen3_moe_gguf(GgufReader& f, DecoderSpec& s) {
  s.experts = f.integer("expert_count"), s.experts_per_token = f.integer("expert_used_count");
  s.intermediate = f.integer("expert_feed_forward_length");
  constexpr double kSoftmax = 1;
  f.must_be("expert_gating_func", kSoftmax);
  for (LayerSpec& l : s.layer) l.experts = true;
}

// --- Gemma 3: norms before and behind both halves of a layer, local layers with a rotation of their own
constexpr double kGemmaLocalTheta = 1e4, kGemmaGlobalTheta = 1e6;
constexpr int64_t kGemmaLocalLayers = 5;  // before each global layer

void describe_gemma3(DecoderSpec& s) {
  s.norm.post = true, s.norm.rounds_before_weight = false;
  s.qk_norm = true;
  s.gate = gelu_gate();
}
bool is_gemma_local(int64_t layer) { return layer % (kGemmaLocalLayers + 1) != kGemmaLocalLayers; }

void read_gemma3(ConfigReader& c, DecoderSpec& s) {
  describe_gemma3(s);
  s.norm.unit_offset = true;
  s.qkv_bias = s.output_bias = c.flag("attention_bias", false);
  s.attention_scale = 1 / std::sqrt(c.number("query_pre_attn_scalar", 256));
  s.attention_softcap = c.number("attn_logit_softcapping", 0);
  s.logit_softcap = c.number("final_logit_softcapping", 0);
  // The scale is rounded to the type of the embedding, bf16 in published files.
  const std::string type = c.text(c.given("dtype") ? "dtype" : "torch_dtype", "bfloat16");
  const double scale = std::sqrt(double(s.hidden));
  s.embedding_scale = type == "float32"   ? scale
                      : type == "float16" ? double(float(f16(float(scale))))
                                          : double(float(bf16(float(scale))));
  c.must_be("sliding_window_pattern", kGemmaLocalLayers + 1);
  c.must_be("_sliding_window_pattern", kGemmaLocalLayers + 1);
  c.must_be("use_bidirectional_attention", false);
  c.read_windows(s, c.integer("sliding_window", 4096), is_gemma_local);
  RopeTable local{.theta = c.number("rope_local_base_freq", kGemmaLocalTheta)}, global;
  const Json* parameters = c.find("rope_parameters");
  if (parameters != nullptr && parameters->contains("full_attention")) {
    ConfigReader tables(*parameters, c.where() + ": rope_parameters");
    if (const Json* t = tables.find("full_attention"))
      global = tables.rope_table(*t, "full_attention", kGemmaGlobalTheta);
    if (const Json* t = tables.find("sliding_attention"))
      local = tables.rope_table(*t, "sliding_attention", kGemmaLocalTheta);
    tables.refuse_unknown();
  } else {
    global = c.rope(kGemmaGlobalTheta);
  }
  s.rope = {global, local};
  for (LayerSpec& l : s.layer) l.rope = l.window > 0 ? 1 : 0;
}
// The norms' weights are 1 + w already.
void read_gemma3_gguf(GgufReader& f, DecoderSpec& s) {
  describe_gemma3(s);
  constexpr int64_t kLayersOf27b = 62;
  s.attention_scale = 1 / std::sqrt(double(s.layers == kLayersOf27b ? s.hidden / s.heads : s.head_dim));
  s.logit_softcap = f.find_number("final_logit_softcapping").value_or(0);
  s.embedding_scale = double(float(bf16(float(std::sqrt(double(s.hidden))))));
  s.rope.push_back({.theta = f.find_number("rope.freq_base_swa").value_or(kGemmaLocalTheta)});
  const int64_t window = f.integer("attention.sliding_window");
  f.must_be("attention.sliding_window_pattern", kGemmaLocalLayers + 1);
  for (int64_t l = 0; l < s.layers; ++l)
    if (is_gemma_local(l)) s.layer[size_t(l)] = {.window = window, .rope = 1, .experts = false};
}

constexpr Family kFamilies[] = {
    {.model_type = "llama",
     .architecture = "llama",
     .read_config = read_llama,
     .read_gguf = read_llama_gguf,
     .paired_rows = true},
    {.model_type = "mistral", .read_config = read_mistral},
    {.model_type = "qwen2", .architecture = "qwen2", .read_config = read_qwen2, .read_gguf = read_qwen_gguf},
    {.model_type = "qwen3",
     .architecture = "qwen3",
     .read_config = read_qwen3,
     .read_gguf = read_qwen_gguf,
     .default_head_dim = 128},
    {.model_type = "qwen3_moe",
     .architecture = "qwen3moe",
     .read_config = read_qwen3_moe,
     .read_gguf = read_qwen3_moe_gguf},
    {.model_type = "gemma3_text",
     .architecture = "gemma3",
     .activation = "gelu_pytorch_tanh",
     .read_config = read_gemma3,
     .read_gguf = read_gemma3_gguf,
     .default_head_dim = 256,
     .default_tied = true},
};

}  // namespace

const Family* family_of_model_type(const std::string& model_type) {
  for (const Family& f : kFamilies)
    if (model_type == f.model_type) return &f;
  return nullptr;
}
const Family* family_of_architecture(const std::string& architecture) {
  for (const Family& f : kFamilies)
    if (!architecture.empty() && architecture == f.architecture) return &f;
  return nullptr;
}
std::string known_families() {
  std::string names = "gpt_oss";
  for (const Family& f : kFamilies) names += std::string(", ") + f.model_type;
  return names;
}

}  // namespace ingot
