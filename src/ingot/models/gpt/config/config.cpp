#include "ingot/models/gpt/config/config.h"

#include <cmath>

#include "ingot/io/json.h"
#include "ingot/kernels/activation/activation.h"
#include "ingot/models/gpt/config/presets.h"
#include "ingot/models/gpt/config/program.h"

namespace ingot {
namespace {

// The config's fields in the order of writing. Reading and writing both walk this list.
template <class Config, class Visit> void visit_fields(Config& c, Visit&& visit) {
  visit("vocab", c.vocab);
  visit("dim", c.dim);
  visit("layers", c.layers);
  visit("heads", c.heads);
  visit("kv_heads", c.kv_heads);
  visit("head_dim", c.head_dim);
  visit("mlp_hidden", c.mlp_hidden);
  visit("embed_dim", c.embed_dim);
  visit("context", c.context);
  visit("activation", c.activation);
  visit("tied_embeddings", c.tied_embeddings);
  visit("learned_positions", c.learned_positions);
  visit("embed_norm", c.embed_norm);
  visit("norm_weight", c.norm_weight);
  visit("norm_eps", c.norm_eps);
  visit("layer_scale", c.layer_scale);
  visit("rotary_dim", c.rotary_dim);
  visit("rope_base", c.rope_base);
  visit("rope_interleaved", c.rope_interleaved);
  visit("rope_sign", c.rope_sign);
  visit("qk_norm", c.qk_norm);
  visit("qk_gain", c.qk_gain);
  visit("qk_gain_init", c.qk_gain_init);
  visit("xsa_layers", c.xsa_layers);
  visit("window", c.window);
  visit("resid_mix", c.resid_mix);
  visit("branch_scale", c.branch_scale);
  visit("unet_skips", c.unet_skips);
  visit("skip_gates", c.skip_gates);
  visit("lane_start", c.lane_start);
  visit("lane_output", c.lane_output);
  visit("loop_first", c.loop_first);
  visit("loop_last", c.loop_last);
  visit("loop_extra", c.loop_extra);
  visit("loop_from", c.loop_from);
  visit("softcap", c.softcap);
  visit("z_loss", c.z_loss);
  visit("init", c.init);
  visit("init_std", c.init_std);
  visit("embed_std", c.embed_std);
}

template <class Scaling, class Visit> void visit_scaling(Scaling& s, Visit&& visit) {
  visit("factor", s.factor);
  visit("original_context", s.original_context);
  visit("beta_fast", s.beta_fast);
  visit("beta_slow", s.beta_slow);
  visit("truncate", s.truncate);
  visit("attention_factor", s.attention_factor);
}

const char* const kScalingNames[] = {"none", "ntk", "yarn"};

void read_scaling(Fields fields, RopeScaling& s) {
  std::string name = "none";
  fields.read("kind", name);
  int kind = 0;
  while (kind < 3 && name != kScalingNames[kind]) ++kind;
  if (kind == 3) fields.wrong("kind", "none, ntk or yarn");
  s.kind = RopeScaling::Kind(kind);
  visit_scaling(s, [&](const char* key, auto& value) { fields.read(key, value); });
  fields.finish();
}

template <class T> void in_range(const char* field, T value, T low, T high) {
  if (!(value >= low && value <= high))
    fail(ErrorCode::usage, "model.", field, ": found ", value, ", expected ", low, " to ", high);
}
void one_of(const char* field, const std::string& value, std::initializer_list<const char*> allowed) {
  std::string list;
  for (const char* a : allowed) {
    if (value == a) return;
    list += (list.empty() ? "" : ", ") + std::string(a);
  }
  fail(ErrorCode::usage, "model.", field, ": found '", value, "', expected one of ", list);
}

}  // namespace

void check(const GptConfig& c) {
  constexpr int64_t kMost = 1 << 20;
  in_range<int64_t>("vocab", c.vocab, 1, 1 << 24);
  in_range<int64_t>("dim", c.dim, 1, kMost);
  in_range<int64_t>("layers", c.layers, 1, 1024);
  in_range<int64_t>("heads", c.heads, 1, 4096);
  in_range<int64_t>("kv_heads", c.kv_heads, 1, c.heads);
  if (c.heads % c.kv_heads != 0)
    fail(ErrorCode::usage, "model.kv_heads: found ", c.kv_heads, ", expected a divisor of heads = ", c.heads);
  in_range<int64_t>("head_dim", c.head_dim, 1, 4096);
  in_range<int64_t>("mlp_hidden", c.mlp_hidden, 1, 1 << 22);
  in_range<int64_t>("embed_dim", c.embed_dim, 0, kMost);
  in_range<int64_t>("context", c.context, 1, 1 << 24);
  in_range<int64_t>("rotary_dim", c.rotary_dim, 0, c.head_dim);
  if (c.rotary_dim % 2 != 0)
    fail(ErrorCode::usage, "model.rotary_dim: found ", c.rotary_dim, ", expected an even number");
  in_range<double>("rope_base", c.rope_base, 1, 1e12);
  if (c.rope_sign != 1 && c.rope_sign != -1)
    fail(ErrorCode::usage, "model.rope_sign: found ", c.rope_sign, ", expected 1 or -1");
  in_range<double>("norm_eps", c.norm_eps, 0, 1);
  in_range<int64_t>("xsa_layers", c.xsa_layers, 0, c.layers);
  in_range<int64_t>("window", c.window, 0, 1 << 24);
  in_range<int64_t>("lane_start", c.lane_start, -1, c.layers - 1);
  one_of("lane_output", c.lane_output, {"mean", "attn", "mlp"});
  one_of("init", c.init, {"normal", "orthogonal"});
  in_range<int64_t>("loop_extra", c.loop_extra, 0, 64);
  if (c.has_loop()) {
    in_range<int64_t>("loop_first", c.loop_first, 0, c.layers - 1);
    in_range<int64_t>("loop_last", c.loop_last, c.loop_first, c.layers - 1);
  }
  in_range<double>("loop_from", c.loop_from, 0, 1);
  in_range<double>("softcap", c.softcap, 0, 1e6);
  in_range<double>("z_loss", c.z_loss, 0, 1);
  in_range<double>("init_std", c.init_std, 0, 1e3);
  in_range<double>("embed_std", c.embed_std, 0, 1e3);
  in_range<double>("rope_scaling.factor", c.rope_scaling.factor, 1e-6, 1e6);
  try {
    activation_named(c.activation);
  } catch (const Error& e) { fail(ErrorCode::usage, "model.", e.what()); }
  layer_program(c, false);
  layer_program(c, true);
}

std::string to_json(const GptConfig& c) {
  OrderedJson out;
  visit_fields(c, [&](const char* key, const auto& value) { out[key] = value; });
  OrderedJson scaling;
  scaling["kind"] = kScalingNames[c.rope_scaling.kind];
  visit_scaling(c.rope_scaling, [&](const char* key, const auto& value) { scaling[key] = value; });
  out["rope_scaling"] = scaling;
  return write_json(out, 2);
}

GptConfig gpt_config_from_json(const std::string& text, const std::string& where) {
  const Json json = parse_json(text, where);
  Fields fields(json, where, ErrorCode::usage);
  GptConfig c;
  visit_fields(c, [&](const char* key, auto& value) { fields.read(key, value); });
  if (fields.has("rope_scaling")) read_scaling(fields.object("rope_scaling"), c.rope_scaling);
  fields.finish();
  check(c);
  return c;
}

GptConfig gpt_preset(const std::string& name) {
  const Json preset = parse_json(preset_text(name), "preset " + name);
  return gpt_config_from_json(preset.at("model").dump(), "preset " + name + ": model");
}

}  // namespace ingot
