#pragma once
// The configuration of a GPT-OSS model, read from the config.json beside its weights.
#include <cstdint>
#include <string>
#include <vector>

#include "ingot/kernels/rope/rope.h"

namespace ingot {

struct DecoderSpec;

struct GptOssConfig {
  int64_t vocab = 0, hidden = 0, layers = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t experts = 0, experts_per_token = 0, intermediate = 0;  // hidden width of one expert
  // number of keys that a sliding layer sees, including the query's own
  int64_t window = 128;
  std::vector<bool> sliding;  // by layer; even layers in the published models
  int64_t context = 131072;
  double norm_eps = 1e-5;
  double rope_base = 150000;
  RopeScaling rope_scaling;
  double swiglu_limit = 7, swiglu_alpha = 1.702;
  bool attention_bias = true, tied_embeddings = false;
  std::vector<int64_t> end_tokens;  // ids that end an answer
  // An experiment that no file asks for: rounds the inputs of the experts' products to e4m3 times a power of two per 32
  // numbers (kernels/quant/e4m3_blocks.h), to measure the loss of accuracy. On a GPU the phased path computes this; the
  // megakernel does not.
  bool e4m3_inputs = false;

  int64_t q_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
  operator DecoderSpec() const;  // spec_of(), for conversion where the decode engine takes a spec
};
// checks that every size is in range and that sizes divide each other where needed
void check(const GptOssConfig& c, const std::string& where);

// Reads any of three spellings: Hugging Face's (rope_theta, rope_scaling), transformers 5's (rope_parameters), and
// OpenAI's (num_experts, rope_scaling_factor). Keys without effect here are ignored; values that would make a different
// model are errors.
GptOssConfig gpt_oss_config_from_json(const std::string& text, const std::string& where);
// Reads the configuration of a model: from a directory's config.json, with the end tokens of generation_config.json
// where that file exists; from the description in an .ingot archive; from a GGUF file's metadata; or from the shapes in
// an .iris file, which has no metadata, with the published values for everything else.
GptOssConfig read_gpt_oss_config(const std::string& path);
// Whether the path is a directory with a config.json of this architecture, a directory with only a GGUF file, or an
// archive, an .iris file or a GGUF file. Of such files the architecture is not examined.
bool is_gpt_oss(const std::string& path);
// Writes the configuration in the keys of transformers 5, for `info` and for tests.
std::string to_json(const GptOssConfig& c);

}  // namespace ingot
