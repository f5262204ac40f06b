#include "ingot/models/gpt/parameter_roles.h"

#include <string>

#include "ingot/models/gpt/config/program.h"

namespace ingot::detail {

ParameterRoles::ParameterRoles(const GptConfig& config, const ParameterLayout& l) : layout(l) {
  const auto optional = [&](bool present, const std::string& name) { return present ? &layout.find(name) : nullptr; };
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string block = "blocks." + std::to_string(i) + ".";
    Layer p;
    p.attn_norm = optional(config.norm_weight, block + "attn_norm.weight");
    p.mlp_norm = optional(config.norm_weight, block + "mlp_norm.weight");
    p.q = &layout.find(block + "attn.q.weight");
    p.k = &layout.find(block + "attn.k.weight");
    p.v = &layout.find(block + "attn.v.weight");
    p.o = &layout.find(block + "attn.o.weight");
    p.up = &layout.find(block + "mlp.up.weight");
    p.down = &layout.find(block + "mlp.down.weight");
    p.q_gain = optional(config.qk_gain, block + "attn.q_gain");
    p.attn_scale = optional(config.branch_scale, block + "attn_scale");
    p.mlp_scale = optional(config.branch_scale, block + "mlp_scale");
    p.mix = optional(config.resid_mix, block + "resid_mix");
    layers.push_back(p);
  }
  const int slots = skip_slots(config);
  table = &layout.find("tok_emb.weight");
  positions = optional(config.learned_positions, "pos_emb.weight");
  embed_proj = optional(config.factorised(), "embed_proj.weight");
  head_proj = optional(config.factorised(), "head_proj.weight");
  head = optional(!config.tied_embeddings, "lm_head.weight");
  final_norm = optional(config.norm_weight, "final_norm.weight");
  skip_weights = optional(slots > 0, "skip_weights");
  skip_gates = optional(slots > 0 && config.skip_gates, "skip_gates");
  lane_post = optional(config.lane_start >= 0, "parallel_post_lambdas");
  lane_resid = optional(config.lane_start >= 0, "parallel_resid_lambdas");
}

Tensor ParameterRoles::get(const GptWeights& flat, const Parameter* p) const {
  if (!flat.master || p == nullptr) return {};
  return layout.view(flat.compute && p->kind != ParameterKind::scalar ? flat.compute : flat.master, *p);
}
Tensor ParameterRoles::get_joint(const GptWeights& flat, std::initializer_list<const Parameter*> all) const {
  const Tensor first = get(flat, *all.begin());
  const Parameter* last = nullptr;
  int64_t rows = 0;
  for (const Parameter* p : all) {
    if (!first ||
        (last != nullptr && (p->offset != last->offset + last->shape.numel() || p->shape[1] != last->shape[1])))
      return {};
    rows += p->shape[0], last = p;
  }
  return Tensor(first.data, first.dtype, {rows, last->shape[1]}, first.device);
}
Tensor ParameterRoles::get_row(const GptWeights& flat, const Parameter* p, int64_t i) const {
  const Tensor t = get(flat, p);
  return t ? t.row(i) : t;
}
LayerViews ParameterRoles::layer(const GptWeights& flat, int i) const {
  const Layer& p = layers[size_t(i)];
  return {.attn_norm = get(flat, p.attn_norm),
          .mlp_norm = get(flat, p.mlp_norm),
          .q = get(flat, p.q),
          .k = get(flat, p.k),
          .v = get(flat, p.v),
          .o = get(flat, p.o),
          .up = get(flat, p.up),
          .down = get(flat, p.down),
          .q_gain = get(flat, p.q_gain),
          .attn_scale = get(flat, p.attn_scale),
          .mlp_scale = get(flat, p.mlp_scale),
          .mix_a = get_row(flat, p.mix, 0),
          .mix_b = get_row(flat, p.mix, 1),
          .kv = get_joint(flat, {p.k, p.v}),
          .qkv = flat.qkv ? flat.qkv.row(i) : get_joint(flat, {p.q, p.k, p.v}),
          .lane_post = get_row(flat, lane_post, i),
          .lane_resid = get_row(flat, lane_resid, i)};
}
SkipViews ParameterRoles::skip(const GptWeights& flat, int slot) const {
  if (slot < 0) return {};
  return {.weight = get_row(flat, skip_weights, slot), .gate = get_row(flat, skip_gates, slot)};
}

}  // namespace ingot::detail
