#pragma once
// Small models covering every path of the configuration.
#include <string>
#include <vector>

#include "ingot/kernels/activation/activation.h"
#include "ingot/models/gpt/config/config.h"
#include "ingot/models/gpt/config/presets.h"

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
  std::string name;
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

// The configurations of tests/parity/parity.py, with every feature; heads have width 8, as a GPU requires.
inline std::vector<Variant> parity_variants() {
  GptConfig golf = small_golf();
  golf.vocab = 61, golf.dim = 32, golf.mlp_hidden = 48, golf.context = 40, golf.qk_gain_init = 2, golf.xsa_layers = 6;
  golf.loop_first = 2, golf.loop_last = 3, golf.loop_extra = 2;
  GptConfig nano;
  nano.vocab = 65, nano.dim = 32, nano.layers = 3, nano.heads = nano.kv_heads = 4, nano.head_dim = 8;
  nano.mlp_hidden = 64, nano.context = 40, nano.learned_positions = true;
  GptConfig llama;
  llama.vocab = 53, llama.dim = 24, llama.layers = 3, llama.heads = 6, llama.kv_heads = 2, llama.head_dim = 8;
  llama.mlp_hidden = 40, llama.context = 40, llama.activation = "silu", llama.tied_embeddings = false;
  llama.rotary_dim = 6;
  RopeScaling yarn{.kind = RopeScaling::yarn, .factor = 4, .original_context = 10, .beta_fast = 4, .beta_slow = 1};
  std::vector<Variant> all;
  const auto add = [&](const std::string& name, GptConfig c, bool looping, auto&& change) {
    change(c);
    all.push_back({name, c, looping});
  };
  const auto same = [](GptConfig&) {};
  add("golf", golf, false, same);
  add("golf, looping", golf, true, same);
  add("golf at its own ratios", golf, true, [](GptConfig& c) {
    c.layers = c.xsa_layers = 11, c.lane_start = 8, c.loop_first = 3, c.loop_last = 5;
    c.dim = 16, c.heads = 8, c.kv_heads = 4, c.rotary_dim = 2;
  });
  add("golf without gates, lane 0 leaves", golf, true,
      [](GptConfig& c) { c.skip_gates = false, c.lane_output = "attn"; });
  add("golf, lane 1 leaves, self excluded in 2 layers", golf, false,
      [](GptConfig& c) { c.lane_output = "mlp", c.xsa_layers = 2; });
  add("golf with weighted norms, factorised", golf, true, [](GptConfig& c) { c.norm_weight = true, c.embed_dim = 12; });
  add("golf without lanes", golf, true, [](GptConfig& c) { c.lane_start = -1; });
  add("lanes from layer 0 without skips", golf, false,
      [](GptConfig& c) { c.unet_skips = c.skip_gates = false, c.lane_start = 0, c.loop_extra = 0; });
  add("skips into an odd number of layers", nano, false,
      [](GptConfig& c) { c.layers = 5, c.unet_skips = c.skip_gates = true; });
  add("one layer", nano, false, [](GptConfig& c) { c.layers = 1; });
  add("loop of the whole depth", llama, true,
      [](GptConfig& c) { c.loop_first = 0, c.loop_last = 2, c.loop_extra = 1; });
  add("nano", nano, false, same);
  add("nano, odd sizes", nano, false,
      [](GptConfig& c) { c.vocab = 67, c.dim = 27, c.heads = 3, c.kv_heads = 1, c.mlp_hidden = 37; });
  add("llama", llama, false, same);
  add("window", llama, false, [](GptConfig& c) { c.window = 5; });
  add("window of one", llama, false, [](GptConfig& c) { c.window = 1, c.xsa_layers = 0; });
  add("ntk, interleaved", llama, false, [](GptConfig& c) {
    c.rope_scaling.kind = RopeScaling::ntk, c.rope_scaling.factor = 3, c.rope_interleaved = true;
  });
  add("yarn, untied, factorised", llama, false,
      [&](GptConfig& c) { c.rope_scaling = yarn, c.embed_dim = 10, c.rope_sign = -1; });
  add("yarn with its own factor, not truncated", llama, false, [&](GptConfig& c) {
    c.rope_scaling = yarn, c.rope_scaling.truncate = false, c.rope_scaling.attention_factor = 1.25;
    c.rope_interleaved = true, c.rope_sign = -1;
  });
  add("z-loss and softcap", llama, false, [](GptConfig& c) { c.softcap = 15, c.z_loss = 0.01; });
  add("qk norm without gain", llama, false, [](GptConfig& c) { c.qk_norm = true, c.norm_eps = 0.01; });
  add("gain without norm or rotation", nano, false, [](GptConfig& c) { c.qk_gain = true; });
  add("embedding norm, factorised, learned positions", nano, false,
      [](GptConfig& c) { c.embed_norm = true, c.embed_dim = 20; });
  add("residual mix and branch scales alone", nano, false, [](GptConfig& c) { c.resid_mix = c.branch_scale = true; });
  for_each_activation([&](auto f) {
    add("activation " + std::string(f.name), nano, false, [&](GptConfig& c) { c.layers = 1, c.activation = f.name; });
  });
  return all;
}

}  // namespace ingot::testing
