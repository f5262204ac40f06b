#include "ingot/models/gpt/config/flops.h"

#include <algorithm>

#include "ingot/models/gpt/config/parameters.h"
#include "ingot/models/gpt/config/program.h"

namespace ingot {

GptFlops forward_flops(const GptConfig& config, bool looping) {
  const LayerProgram program = layer_program(config, looping);
  const auto layer_calls = [&](const Parameter& p) {
    const std::string block = "blocks.";
    if (!p.name.starts_with(block)) return int64_t(1);
    const int layer = std::stoi(p.name.substr(block.size()));
    return int64_t(std::count_if(program.layer_calls.begin(), program.layer_calls.end(),
                                 [&](const LayerCall& a) { return a.layer == layer; }));
  };
  const ParameterLayout layout(config);
  GptFlops f;
  for (const Parameter& p : layout.all())
    if (p.kind == ParameterKind::matrix) f.per_token += 2.0 * double(p.shape.numel() * layer_calls(p));
  f.per_token += 2.0 * double(config.vocab * (config.factorised() ? config.embed_dim : config.dim));
  f.per_pair = 4.0 * double(config.heads * config.head_dim) * double(program.layer_calls.size());
  return f;
}

double attended_pairs(const std::vector<int32_t>& cu_seqlens, int64_t window) {
  double pairs = 0;
  for (size_t i = 0; i + 1 < cu_seqlens.size(); ++i) {
    const double n = double(cu_seqlens[i + 1] - cu_seqlens[i]);
    const double w = window > 0 ? std::min(n, double(window)) : n;
    pairs += w * (w + 1) / 2 + (n - w) * w;
  }
  return pairs;
}

}  // namespace ingot
