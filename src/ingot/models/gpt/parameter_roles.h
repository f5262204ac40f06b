#pragma once
// The parameters of a model by their role, found once, and views of flat weights or gradients.
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "ingot/models/gpt/block/block.h"
#include "ingot/models/gpt/call.h"
#include "ingot/models/gpt/config/parameters.h"

namespace ingot::detail {

// A parameter that the configuration lacks is null, and its views are empty.
struct ParameterRoles {
  // The layout must outlive the roles.
  ParameterRoles(const GptConfig& config, const ParameterLayout& layout);

  struct Layer {
    const Parameter *attn_norm = nullptr, *mlp_norm = nullptr, *q = nullptr, *k = nullptr, *v = nullptr, *o = nullptr,
                    *up = nullptr, *down = nullptr, *q_gain = nullptr, *attn_scale = nullptr, *mlp_scale = nullptr,
                    *mix = nullptr;
  };
  const ParameterLayout& layout;
  std::vector<Layer> layers;
  const Parameter *table = nullptr, *positions = nullptr, *embed_proj = nullptr, *head_proj = nullptr, *head = nullptr,
                  *final_norm = nullptr, *skip_weights = nullptr, *skip_gates = nullptr, *lane_post = nullptr,
                  *lane_resid = nullptr;
  const Parameter* output() const { return head != nullptr ? head : table; }  // the matrix of the logits

  // Views of `flat` (weights or gradients); an empty flat gives empty views. Matrices are views of the copy for
  // products where there is one.
  Tensor get(const GptWeights& flat, const Parameter* p) const;
  Tensor get_row(const GptWeights& flat, const Parameter* p, int64_t i) const;
  // A joint view of several parameters of equal width; empty unless they are adjacent.
  Tensor get_joint(const GptWeights& flat, std::initializer_list<const Parameter*> all) const;
  LayerViews layer(const GptWeights& flat, int i) const;
  SkipViews skip(const GptWeights& flat, int slot) const;  // empty for a slot below 0
};

}  // namespace ingot::detail
