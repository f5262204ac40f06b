#pragma once
// What a GPT-OSS model is made of, read from the config.json beside its weights.
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
  int64_t window = 128;                                          // keys a sliding layer sees, the query's own included
  std::vector<bool> sliding;                                     // by layer; published: even layers
  int64_t context = 131072;
  double norm_eps = 1e-5;
  double rope_base = 150000;
  RopeScaling rope_scaling;
  double swiglu_limit = 7, swiglu_alpha = 1.702;
  bool attention_bias = true, tied_embeddings = false;
  std::vector<int64_t> end_tokens;  // ids that end an answer
  // No file says this: what the experts' products take is rounded to e4m3 times a power of two per 32 numbers
  // (kernels/quant/e4m3_blocks.h), to see what that costs. On a GPU by launches a phase: the megakernel does not.
  bool e4m3_inputs = false;

  int64_t q_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
  operator DecoderSpec() const;  // spec_of(): wherever the decode engine asks for a spec
};
void check(const GptOssConfig& c, const std::string& where);  // every size in range, and what must divide does

// Three spellings: Hugging Face as published (rope_theta, rope_scaling), as transformers 5 writes it (rope_parameters),
// and OpenAI's own (num_experts, rope_scaling_factor). Keys that change nothing here are passed over; values that would
// change the model into one that this code is not are errors.
GptOssConfig gpt_oss_config_from_json(const std::string& text, const std::string& where);
// A directory's config.json, and the end tokens of generation_config.json where there is one; what an .ingot archive
// says of itself; a GGUF file's metadata; of an .iris file, which says nothing, what its shapes say and the published
// values for the rest.
GptOssConfig read_gpt_oss_config(const std::string& path);
bool is_gpt_oss(const std::string& path);  // a directory whose config.json says so or with a GGUF file alone, or a file
// In the keys of transformers 5, for `info` and for tests.
std::string to_json(const GptOssConfig& c);

}  // namespace ingot
