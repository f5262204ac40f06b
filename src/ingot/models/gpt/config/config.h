#pragma once
// The configuration of a small GPT. Every architectural feature is a field; presets are JSON files under presets/.
#include <cstdint>
#include <string>

#include "ingot/kernels/rope/rope.h"

namespace ingot {

struct GptConfig {
  // Sizes.
  int64_t vocab = 256, dim = 128, layers = 4, heads = 4, kv_heads = 4, head_dim = 32, mlp_hidden = 512;
  // 0 or dim: the embedding is vocab x dim. Otherwise it is factorised: vocab x embed_dim, then embed_dim x dim.
  int64_t embed_dim = 0;
  int64_t context = 256;  // longest segment; also the number of learned positions
  std::string activation = "gelu";
  bool tied_embeddings = true;
  bool learned_positions = false;
  bool embed_norm = false;  // rows of the embedding are normalised before the projection and the learned positions
  bool norm_weight = true;  // a learned factor per channel in every norm
  double norm_eps = 1e-5;
  bool layer_scale = false;  // norms multiplied by 1 / sqrt(layer + 1), by physical layer
  // Positions in attention.
  int64_t rotary_dim = 0;  // 0: no rotation; else the first rotary_dim dimensions of each head
  double rope_base = 10000;
  RopeScaling rope_scaling;
  bool rope_interleaved = false;
  int rope_sign = +1;
  // Attention.
  bool qk_norm = false, qk_gain = false;
  double qk_gain_init = 1;
  int64_t xsa_layers = 0;  // the last n physical layers subtract the projection on the token's own value
  int64_t window = 0;      // 0: the whole segment
  // Residual stream.
  bool resid_mix = false;     // each block reads a * x + b * x0
  bool branch_scale = false;  // attn_scale and mlp_scale per channel
  bool unet_skips = false, skip_gates = false;
  int64_t lane_start = -1;           // physical layers from here on keep two lanes; -1: none
  std::string lane_output = "mean";  // the output of the last layer: mean, attn (lane 0) or mlp (lane 1)
  // Depth recurrence: physical layers [loop_first, loop_last] run 1 + loop_extra times once switched on.
  int64_t loop_first = 0, loop_last = -1, loop_extra = 0;
  double loop_from = 0;  // fraction of training before the loop is on
  // Head.
  double softcap = 0, z_loss = 0;
  // Initialisation. "normal": N(0, init_std^2), branch outputs scaled by 1 / sqrt(2 layers).
  // "orthogonal": orthogonal matrices, branch outputs zero.
  std::string init = "normal";
  double init_std = 0.02, embed_std = 0.02;

  bool factorised() const { return embed_dim != 0 && embed_dim != dim; }
  bool has_loop() const { return loop_extra > 0 && loop_last >= loop_first; }
};
void check(const GptConfig& c);  // throws an error with the field, the value found and the values allowed
std::string to_json(const GptConfig& c);
GptConfig gpt_config_from_json(const std::string& text, const std::string& where);  // unknown keys are errors
GptConfig gpt_preset(const std::string& name);  // golf, nano, demo, ...; an unknown name is an error with the list of
                                                // presets

}  // namespace ingot
