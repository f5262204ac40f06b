#include "ingot/models/gpt_oss/spec.h"

namespace ingot {

DecoderSpec spec_of(const GptOssConfig& c) {
  DecoderSpec s{.vocab = c.vocab,
                .hidden = c.hidden,
                .layers = c.layers,
                .heads = c.heads,
                .kv_heads = c.kv_heads,
                .head_dim = c.head_dim,
                .intermediate = c.intermediate,
                .experts = c.experts,
                .experts_per_token = c.experts_per_token};
  for (const bool sliding : c.sliding) s.layer.push_back({.window = sliding ? c.window : 0});
  s.rope = {{.theta = c.rope_base, .scaling = c.rope_scaling}};
  s.norm.eps = c.norm_eps;
  s.qkv_bias = s.output_bias = c.attention_bias;
  s.mlp_bias = s.sinks = true;
  s.gate = clamped_gate(c.swiglu_limit, c.swiglu_alpha);
  s.tied_embeddings = c.tied_embeddings;
  s.context = c.context;
  s.end_tokens = c.end_tokens;
  s.e4m3_inputs = c.e4m3_inputs;
  return s;
}
GptOssConfig::operator DecoderSpec() const { return spec_of(*this); }

}  // namespace ingot
