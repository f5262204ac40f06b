// A spec as JSON: stored in archives, and shown by `ingot info`.
#include "ingot/io/json.h"
#include "ingot/models/spec.h"

namespace ingot {
namespace {

constexpr std::pair<RopeScaling::Kind, const char*> kScalings[] = {{RopeScaling::none, "none"},
                                                                   {RopeScaling::ntk, "ntk"},
                                                                   {RopeScaling::yarn, "yarn"},
                                                                   {RopeScaling::linear, "linear"},
                                                                   {RopeScaling::llama3, "llama3"}};

// Every field with a single number or flag: visit(key, field).
template <class Spec, class Visit> void visit_numbers(Spec& s, Visit&& visit) {
  visit("vocab", s.vocab), visit("hidden", s.hidden), visit("layers", s.layers);
  visit("heads", s.heads), visit("kv_heads", s.kv_heads), visit("head_dim", s.head_dim);
  visit("intermediate", s.intermediate), visit("experts", s.experts);
  visit("experts_per_token", s.experts_per_token), visit("renormalise", s.renormalise);
  visit("norm_eps", s.norm.eps), visit("norm_unit_offset", s.norm.unit_offset);
  visit("norm_rounds_before_weight", s.norm.rounds_before_weight), visit("norm_post", s.norm.post);
  visit("qk_norm", s.qk_norm), visit("qkv_bias", s.qkv_bias), visit("output_bias", s.output_bias);
  visit("mlp_bias", s.mlp_bias), visit("sinks", s.sinks), visit("attention_scale", s.attention_scale);
  visit("attention_softcap", s.attention_softcap), visit("logit_softcap", s.logit_softcap);
  visit("gate_limit", s.gate.limit), visit("gate_alpha", s.gate.alpha), visit("gate_up_offset", s.gate.up_offset);
  visit("gate_cubic", s.gate.cubic), visit("embedding_scale", s.embedding_scale);
  visit("tied_embeddings", s.tied_embeddings), visit("context", s.context), visit("start_token", s.start_token);
}
template <class Table, class Visit> void visit_table(Table& t, Visit&& visit) {
  visit("theta", t.theta), visit("factor", t.scaling.factor), visit("original_context", t.scaling.original_context);
  visit("beta_fast", t.scaling.beta_fast), visit("beta_slow", t.scaling.beta_slow);
  visit("truncate", t.scaling.truncate), visit("attention_factor", t.scaling.attention_factor);
  visit("interleaved", t.interleaved), visit("dim", t.dim);
}

}  // namespace

std::string to_json(const DecoderSpec& s) {
  OrderedJson out;
  visit_numbers(s, [&](const char* key, const auto& value) { out[key] = value; });
  out["end_tokens"] = s.end_tokens;
  std::vector<int64_t> windows, tables, experts;
  for (const LayerSpec& l : s.layer)
    windows.push_back(l.window), tables.push_back(l.rope), experts.push_back(l.experts ? 1 : 0);
  out["layer_window"] = windows, out["layer_rope"] = tables, out["layer_experts"] = experts;
  out["rope"] = OrderedJson::array();
  for (const RopeTable& t : s.rope) {
    OrderedJson table;
    for (const auto& [kind, name] : kScalings)
      if (kind == t.scaling.kind) table["scaling"] = name;
    visit_table(t, [&](const char* key, const auto& value) { table[key] = value; });
    if (!t.divisors.empty()) table["divisors"] = t.divisors;
    out["rope"].push_back(table);
  }
  return write_json(out, 2);
}

DecoderSpec spec_from_json(const std::string& text, const std::string& where) {
  const Json json = parse_json(text, where);
  Fields f(json, where);
  DecoderSpec s;
  visit_numbers(s, [&](const char* key, auto& value) { f.require(key, value); });
  f.require("end_tokens", s.end_tokens);
  std::vector<int64_t> windows, tables, experts;
  f.require("layer_window", windows), f.require("layer_rope", tables), f.require("layer_experts", experts);
  if (windows.size() != tables.size() || windows.size() != experts.size())
    fail(ErrorCode::bad_data, where, ": found lists of layers of ", windows.size(), ", ", tables.size(), " and ",
         experts.size(), " entries, expected one length");
  for (size_t l = 0; l < windows.size(); ++l)
    s.layer.push_back({.window = windows[l],
                       .rope = tables[l] < -1 || tables[l] > 1 << 20 ? 1 << 20 : int(tables[l]),
                       .experts = experts[l] != 0});
  const Json* rope = f.take("rope");
  if (rope == nullptr || !rope->is_array()) f.wrong("rope", "a list of tables");
  for (const Json& object : *rope) {
    Fields t(object, where + ".rope");
    RopeTable& table = s.rope.emplace_back();
    std::string scaling;
    t.require("scaling", scaling);
    bool known = false;
    for (const auto& [kind, name] : kScalings)
      if (scaling == name) table.scaling.kind = kind, known = true;
    if (!known) t.wrong("scaling", "none, ntk, yarn, linear or llama3");
    visit_table(table, [&](const char* key, auto& value) { t.require(key, value); });
    t.read("divisors", table.divisors);
    t.finish();
  }
  f.finish();
  check(s, where);
  return s;
}

}  // namespace ingot
