#include "ingot/models/families/synthetic.h"

#include "ingot/core/check.h"

namespace ingot {
namespace {

struct PublishedShape {
  const char* name;
  int64_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab;
  double theta, eps;
  double llama3_factor;  // of the scaling of angles; 0: none
  bool qk_norm, tied;
  int64_t context;
  int64_t experts = 0, choices = 0;  // `intermediate` is the width of an expert
};
constexpr int64_t kLlamaVocab = 128256, kQwenVocab = 151936;
constexpr PublishedShape kShapes[] = {
    {"smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, 1e5, 1e-5, 0, false, true, 8192},
    {"llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, kLlamaVocab, 5e5, 1e-5, 32, false, true, 131072},
    {"llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, kLlamaVocab, 5e5, 1e-5, 8, false, false, 131072},
    {"qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, kQwenVocab, 1e6, 1e-6, 0, true, true, 40960},
    {"qwen3-4b", 36, 2560, 32, 8, 128, 9728, kQwenVocab, 1e6, 1e-6, 0, true, true, 40960},
    {"qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, kQwenVocab, 1e6, 1e-6, 0, true, false, 40960, 128, 8},
};

}  // namespace

const std::vector<std::string>& synthetic_family_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const PublishedShape& s : kShapes) all.push_back(s.name);
    return all;
  }();
  return names;
}

DecoderSpec synthetic_family(const std::string& name) {
  for (const PublishedShape& n : kShapes) {
    if (name != n.name) continue;
    DecoderSpec s{.vocab = n.vocab,
                  .hidden = n.hidden,
                  .layers = n.layers,
                  .heads = n.heads,
                  .kv_heads = n.kv_heads,
                  .head_dim = n.head_dim,
                  .intermediate = n.intermediate,
                  .experts = n.experts,
                  .experts_per_token = n.choices};
    s.layer.assign(size_t(n.layers), {.experts = n.experts > 0});
    s.rope = {{.theta = n.theta}};
    if (n.llama3_factor > 0)
      s.rope[0].scaling = {
          .kind = RopeScaling::llama3, .factor = n.llama3_factor, .original_context = 8192, .beta_fast = 4};
    s.norm = {.eps = n.eps, .rounds_before_weight = true};
    s.qk_norm = n.qk_norm, s.tied_embeddings = n.tied, s.context = n.context;
    check(s, name);
    return s;
  }
  std::string names;
  for (const std::string& known : synthetic_family_names()) names += (names.empty() ? "" : ", ") + known;
  fail(ErrorCode::usage, "synthetic: found '", name, "', expected one of ", names);
}

}  // namespace ingot
