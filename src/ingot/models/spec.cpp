#include "ingot/models/spec.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/check.h"

namespace ingot {

int64_t DecoderSpec::longest_window() const {
  int64_t longest = 0;
  for (const LayerSpec& l : layer) longest = std::max(longest, l.window);
  return longest;
}
double DecoderSpec::scale_of_attention() const {
  return attention_scale > 0 ? attention_scale : 1 / std::sqrt(double(head_dim));
}

RopeFrequencies frequencies_of(const DecoderSpec& spec, const RopeTable& table) {
  RopeFrequencies f = rope_frequencies(table.dim > 0 ? table.dim : spec.head_dim, table.theta, table.scaling);
  for (size_t i = 0; i < std::min(f.theta.size(), table.divisors.size()); ++i) f.theta[i] /= table.divisors[i];
  return f;
}

void check(const DecoderSpec& s, const std::string& where) {
  const auto require = [&](bool holds, const char* name, auto found, const char* expected) {
    if (!holds) fail(ErrorCode::bad_data, where, ": found ", name, " ", found, ", expected ", expected);
  };
  const auto positive = [&](const char* name, int64_t n) { require(n > 0, name, n, "at least 1"); };
  positive("vocab", s.vocab), positive("hidden", s.hidden), positive("layers", s.layers);
  positive("heads", s.heads), positive("kv_heads", s.kv_heads), positive("head_dim", s.head_dim);
  positive("intermediate", s.intermediate), positive("context", s.context);
  require(s.heads % s.kv_heads == 0, "heads", s.heads, "a multiple of kv_heads");
  require(int64_t(s.layer.size()) == s.layers, "properties of layers", s.layer.size(), "one for each layer");
  require(s.norm.eps >= 0, "norm eps", s.norm.eps, "at least 0");
  require(s.attention_scale >= 0, "attention_scale", s.attention_scale, "at least 0");
  require(s.attention_softcap >= 0 && s.logit_softcap >= 0, "softcap", std::min(s.attention_softcap, s.logit_softcap),
          "at least 0");
  for (const LayerSpec& l : s.layer) {
    require(l.window >= 0, "window", l.window, "at least 0");
    require(l.rope >= -1 && l.rope < int(s.rope.size()), "rope", l.rope, "-1 or the number of a table");
    if (!l.experts) continue;
    positive("experts", s.experts);
    require(s.experts_per_token >= 1 && s.experts_per_token <= s.experts, "experts_per_token", s.experts_per_token,
            "1 to the number of experts");
  }
  for (const RopeTable& t : s.rope) {
    require(t.theta > 1, "theta", t.theta, "more than 1");
    require(t.dim >= 0 && t.dim <= s.head_dim && t.dim % 2 == 0 && (t.dim > 0 || s.head_dim % 2 == 0),
            "rotated dimensions", t.dim == 0 ? s.head_dim : t.dim, "an even number, at most head_dim");
    require(t.divisors.empty() || int64_t(t.divisors.size()) == (t.dim == 0 ? s.head_dim : t.dim) / 2,
            "divisors of angles", t.divisors.size(), "one for each pair, or none");
  }
}

const char* name_of(DecodePath path) {
  switch (path) {
    case DecodePath::cpu: return "the CPU path";
    case DecodePath::phased: return "the phased path";
    case DecodePath::small_batch: return "the small-batch path";
    case DecodePath::prompt: return "the prompt path";
    case DecodePath::megakernel: return "the megakernel";
    case DecodePath::prefilter: return "the int8 prefilter";
    case DecodePath::family_megakernel: return "the megakernel of the families";
  }
  return "?";
}

namespace {

// A property of a model that some paths do not support.
struct Property {
  const char* name;
  bool present;
  unsigned paths;  // paths that support the property, one bit for each
};
constexpr unsigned bit(DecodePath path) { return 1u << unsigned(path); }

}  // namespace

std::string unsupported_reason(const DecoderSpec& s, DecodePath path) {
  const auto any = [&](auto&& has) { return std::any_of(s.layer.begin(), s.layer.end(), has); };
  const auto any_table = [&](auto&& has) { return std::any_of(s.rope.begin(), s.rope.end(), has); };
  const bool dense = any([](const LayerSpec& l) { return !l.experts; });
  const bool experts = any([](const LayerSpec& l) { return l.experts; });
  constexpr unsigned kAll = ~0u, kCpu = bit(DecodePath::cpu), kHead = bit(DecodePath::prefilter);
  constexpr unsigned kLaunches =
      kCpu | bit(DecodePath::phased) | bit(DecodePath::small_batch) | bit(DecodePath::prompt);  // all but megakernels
  constexpr unsigned kFamily = bit(DecodePath::family_megakernel), kAllButMegakernel = kLaunches | kFamily | kHead;
  // The int8 prefilter reads the last norm's output and the head: properties of layers do not matter to the prefilter,
  // but the megakernel computes the layers before the head.
  const Property properties[] = {
      {"a dense MLP", dense, kAllButMegakernel},
      {"a dense MLP beside experts", dense && experts, kLaunches | kHead},
      {"expert weights that are not renormalised", experts && !s.renormalise, kCpu},
      {"a layer whose queries and keys are not rotated", any([](const LayerSpec& l) { return l.rope < 0; }),
       kAllButMegakernel},
      {"several RoPE tables", any([](const LayerSpec& l) { return l.rope > 0; }), kAllButMegakernel},
      {"windows of several lengths",
       any([&](const LayerSpec& l) { return l.window > 0 && l.window != s.longest_window(); }),
       kAll & ~bit(DecodePath::prompt)},
      {"interleaved RoPE", any_table([](const RopeTable& t) { return t.interleaved; }), kCpu},
      {"partial RoPE", any_table([&](const RopeTable& t) { return t.dim > 0 && t.dim < s.head_dim; }), kCpu},
      {"norms that multiply by 1 + w", s.norm.unit_offset, kAllButMegakernel},
      {"norms that round before the weight", s.norm.rounds_before_weight, kAllButMegakernel},
      {"norms after attention and MLP", s.norm.post, kLaunches},
      {"norms of queries and keys", s.qk_norm, kAllButMegakernel},
      {"an MLP without biases", !s.mlp_bias, kAllButMegakernel},
      {"attention without sinks", !s.sinks, kAllButMegakernel},
      {"a scale of attention other than 1 / sqrt(head_dim)",
       s.attention_scale > 0 && std::abs(s.attention_scale * std::sqrt(double(s.head_dim)) - 1) > 1e-12,
       kAllButMegakernel},
      {"a softcap in attention", s.attention_softcap > 0, kLaunches},
      {"a softcap of logits", s.logit_softcap > 0, kLaunches},
      {"a gate other than GPT-OSS's", s.gate.limit <= 0 || s.gate.up_offset != 1 || s.gate.cubic != 0,
       kAllButMegakernel},
      {"a gate other than SwiGLU", s.gate.limit > 0 || s.gate.up_offset != 0 || s.gate.cubic != 0 || s.gate.alpha != 1,
       kAll & ~kFamily},
      {"a scale of embeddings", s.embedding_scale != 1, kLaunches},
      {"inputs in e4m3 without experts", s.e4m3_inputs && !experts, 0},
      {"inputs in e4m3 of experts beside dense MLPs", s.e4m3_inputs && experts && dense, kCpu},
      {"experts' inputs in e4m3", s.e4m3_inputs && experts, kLaunches | kHead},
  };
  for (const Property& p : properties)
    if (p.present && (p.paths & bit(path)) == 0)
      return ingot::detail::concat("found ", p.name, ", which ", name_of(path), " does not compute");
  return {};
}

DecodePath megakernel_path(const DecoderSpec& s) {
  const bool gpt_oss = s.layer.empty() || (s.layer[0].experts && s.gate.up_offset == 1);
  return gpt_oss ? DecodePath::megakernel : DecodePath::family_megakernel;
}

}  // namespace ingot
