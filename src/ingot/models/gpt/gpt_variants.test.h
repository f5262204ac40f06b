#pragma once
// Small models that together take every path of the configuration.
#include <vector>

#include "ingot/models/gpt/config.h"
#include "ingot/models/gpt/presets.h"

namespace ingot::testing {

inline GptConfig small_golf() {
  GptConfig c = gpt_preset("golf");
  c.vocab = 37;
  c.dim = 24;
  c.layers = 6;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 8;
  c.mlp_hidden = 40;
  c.context = 32;
  c.rotary_dim = 4;
  c.xsa_layers = 4;
  c.lane_start = 4;
  c.loop_first = 1;
  c.loop_last = 2;
  c.loop_extra = 1;
  return c;
}
inline GptConfig small_nano() {
  GptConfig c = gpt_preset("nano");
  c.vocab = 37;
  c.dim = 24;
  c.layers = 2;
  c.heads = c.kv_heads = 3;
  c.head_dim = 8;
  c.mlp_hidden = 40;
  c.context = 32;
  return c;
}
inline GptConfig factorised() {
  GptConfig c = small_golf();
  c.embed_dim = 12;
  c.tied_embeddings = false;
  c.skip_gates = false;
  c.norm_weight = true;
  c.lane_output = "mlp";
  c.rope_interleaved = true;
  c.rope_sign = 1;
  c.rope_scaling = {.kind = RopeScaling::yarn, .factor = 4, .original_context = 16};
  c.z_loss = 1e-2;
  c.window = 5;
  c.activation = "silu";
  c.learned_positions = true;
  return c;
}

struct Variant {
  const char* name;
  GptConfig config;
  bool looping;
};
inline std::vector<Variant> variants() {
  GptConfig attn_lane = small_golf();
  attn_lane.lane_output = "attn";
  GptConfig no_mix = small_golf();
  no_mix.resid_mix = no_mix.branch_scale = no_mix.qk_gain = false;
  return {{"golf", small_golf(), false},      {"golf, looping", small_golf(), true}, {"nano", small_nano(), false},
          {"factorised", factorised(), true}, {"attn lane", attn_lane, false},       {"no mix", no_mix, true}};
}

}  // namespace ingot::testing
