#pragma once
// A small random draft head for tests, written as the published heads are, and its definition in fp64.
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ingot/io/file.h"
#include "ingot/io/formats/safetensors.h"
#include "ingot/models/draft/head/head_weights.h"
#include "ingot/testing/testing.h"

namespace ingot::testing {

struct RandomHead {
  int64_t hidden = 32, vocab = 37, draft_vocab = 20, heads = 4, kv_heads = 2, head_dim = 8, intermediate = 48;
  std::vector<int64_t> boundaries = {0, 1, 2};
  bool norm_before_fc = false, fc_norm = false, norm_output = false, norm_before_residual = false;
  bool own_embedding = false;
  std::string rope = R"("rope_theta": 10000)";  // keys of config.json
  std::string prefix = "midlayer.";
  std::string more_keys;  // such as R"(, "key": 1)"
  std::function<void(std::map<std::string, NamedTensor>&)> damage;
  uint64_t seed = 5;

  void write(const std::string& directory);
  std::string config() const;

 private:
  Tensor keep(DType dtype, Shape shape) {
    memory_.push_back(std::make_shared<std::vector<char>>(size_t(shape.numel() * size_of(dtype))));
    return Tensor(memory_.back()->data(), dtype, shape);
  }
  void add(const std::string& name, const Tensor& t) { tensors_[name] = {name, t}; }
  void add_matrix(const std::string& name, int64_t rows, int64_t cols, double scale = 1.5) {
    const Tensor t = keep(DType::bf16, {rows, cols});
    fill_normal(t, seed * 1000 + next_++, scale / std::sqrt(double(cols)));
    add(name + ".weight", t);
  }
  void add_norm(const std::string& name, int64_t width) {
    const Tensor t = keep(DType::bf16, {width});
    fill_normal(t, seed * 1000 + next_++, 0.3, 1);
    add(name + ".weight", t);
  }
  uint64_t next_ = 0;
  std::vector<std::shared_ptr<std::vector<char>>> memory_;
  std::map<std::string, NamedTensor> tensors_;
};

inline std::string RandomHead::config() const {
  std::string layers;
  for (const int64_t b : boundaries) layers += (layers.empty() ? "" : ", ") + std::to_string(b);
  const auto flag = [](const char* name, bool value) {
    return std::string(", \"") + name + "\": " + (value ? "true" : "false");
  };
  return ingot::detail::concat(
      "{\"architectures\": [\"LlamaForCausalLMEagle3\"], \"model_type\": \"llama\", \"num_hidden_layers\": 1, ",
      "\"hidden_act\": \"silu\", \"hidden_size\": ", hidden, ", \"intermediate_size\": ", intermediate,
      ", \"num_attention_heads\": ", heads, ", \"num_key_value_heads\": ", kv_heads, ", \"head_dim\": ", head_dim,
      ", \"rms_norm_eps\": 1e-05, \"vocab_size\": ", vocab, ", \"draft_vocab_size\": ", draft_vocab, ", ", rope,
      ", \"eagle_config\": {\"eagle_aux_hidden_state_layer_ids\": [", layers, "], \"use_aux_hidden_state\": true}",
      flag("norm_before_fc", norm_before_fc), flag("fc_norm", fc_norm), flag("norm_output", norm_output),
      flag("norm_before_residual", norm_before_residual), more_keys, "}");
}

inline void RandomHead::write(const std::string& directory) {
  tensors_.clear();
  next_ = 0;
  create_directories(directory);
  const int64_t n = int64_t(boundaries.size()), C = hidden;
  add_matrix("fc", C, n * C);
  if (norm_before_fc) add_norm("input_norm", n * C);
  for (int64_t i = 0; fc_norm && i < n; ++i) add_norm("fc_norm." + std::to_string(i), C);
  for (const char* name : {"input_layernorm", "hidden_norm", "post_attention_layernorm"}) add_norm(prefix + name, C);
  add_matrix(prefix + "self_attn.q_proj", heads * head_dim, 2 * C);
  add_matrix(prefix + "self_attn.k_proj", kv_heads * head_dim, 2 * C);
  add_matrix(prefix + "self_attn.v_proj", kv_heads * head_dim, 2 * C);
  add_matrix(prefix + "self_attn.o_proj", C, heads * head_dim);
  add_matrix(prefix + "mlp.gate_proj", intermediate, C);
  add_matrix(prefix + "mlp.up_proj", intermediate, C);
  add_matrix(prefix + "mlp.down_proj", C, intermediate);
  add_norm("norm", C);
  if (own_embedding) add_matrix("embed_tokens", vocab, C, std::sqrt(double(C)));
  if (draft_vocab < vocab) {
    add_matrix("lm_head", draft_vocab, C, 3);
    const Tensor offsets = keep(DType::i64, {draft_vocab}), known = keep(DType::u8, {vocab});
    // Ids apart by 1 and 2 in turn, from 1 on.
    for (int64_t i = 0; i < vocab; ++i) known.ptr<uint8_t>()[i] = 0;
    for (int64_t i = 0; i < draft_vocab; ++i) {
      const int64_t id = 1 + i + i / 2;
      offsets.ptr<int64_t>()[i] = id - i;
      known.ptr<uint8_t>()[id] = 1;
    }
    add("d2t", offsets), add("t2d", known);
  }
  if (damage) damage(tensors_);
  std::vector<NamedTensor> all;
  for (const auto& [name, tensor] : tensors_) all.push_back(tensor);
  write_file(join_path(directory, "config.json"), config());
  save_safetensors(join_path(directory, "model.safetensors"), all);
}

// The head in fp64 over all rows of a sequence, without a cache (spec/eagle.py).
class DefinedHead {
 public:
  using Row = std::vector<double>;
  DefinedHead(const draft::DraftHead& head, const DecoderWeights& target) : c_(head.config), w_(head.weights) {
    embed_ = w_.embed ? w_.embed : target.embed;
    head_ = w_.head ? w_.head : target.head;
  }
  struct Guesses {
    std::vector<int32_t> ids;
    std::vector<Row> logits;
  };
  // `states`: of each token but the last of `tokens`, the hidden states at the boundaries.
  Guesses draft(const std::vector<Row>& states, std::vector<int32_t> tokens, int64_t count) const {
    std::vector<Row> g;
    for (const Row& s : states) g.push_back(features(s));
    Guesses out;
    for (int64_t i = 0; i < count; ++i) {
      const Row y = layer(g, tokens), u = norm(y, w_.norm);
      out.logits.push_back(multiply(head_, u));
      const Row& logits = out.logits.back();
      const size_t best = size_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
      out.ids.push_back(w_.ids.empty() ? int32_t(best) : w_.ids[best]);
      tokens.push_back(out.ids.back());
      g.push_back(c_.norm_output ? u : y);
    }
    return out;
  }

 private:
  static Row numbers(const WeightMatrix& w) {
    std::vector<float> wide(size_t(w.rows() * w.cols()));
    dequantise(w, Tensor(wide.data(), {w.rows(), w.cols()}), {});
    return Row(wide.begin(), wide.end());
  }
  static Row multiply(const WeightMatrix& w, const Row& x) {
    const Row m = numbers(w);
    Row y(size_t(w.rows()));
    for (size_t r = 0; r < y.size(); ++r)
      for (size_t k = 0; k < x.size(); ++k) y[r] += m[r * x.size() + k] * x[k];
    return y;
  }
  Row norm(const Row& x, const Tensor& weight, int64_t begin = 0) const {
    double square = 0;
    for (const double v : x) square += v * v;
    const double r = 1 / std::sqrt(square / double(x.size()) + c_.norm_eps);
    Row y(x);
    for (size_t i = 0; i < y.size(); ++i) y[i] *= r * double(weight.ptr<float>()[size_t(begin) + i]);
    return y;
  }
  Row features(Row states) const {
    if (c_.norm_before_fc) states = norm(states, w_.fc_norm);
    for (int64_t i = 0; c_.fc_norm && i < int64_t(c_.boundaries.size()); ++i) {
      const auto begin = states.begin() + i * c_.hidden;
      const Row part = norm(Row(begin, begin + c_.hidden), w_.fc_norm, i * c_.hidden);
      std::copy(part.begin(), part.end(), begin);
    }
    return multiply(w_.fc, states);
  }
  void rotate(Row& x, int64_t begin, int64_t heads, int64_t position) const {
    const RopeFrequencies f = rope_frequencies(c_.head_dim, c_.rope.theta, c_.rope.scaling);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t j = 0; j < c_.head_dim / 2; ++j) {
        double &a = x[size_t(begin + h * c_.head_dim + j)],
               &b = x[size_t(begin + h * c_.head_dim + j + c_.head_dim / 2)];
        const double angle = double(position) * f.theta[size_t(j)], c = f.amplitude * std::cos(angle),
                     s = f.amplitude * std::sin(angle), old = a;
        a = old * c - b * s, b = b * c + old * s;
      }
  }
  // The last row's output; row p joins token p + 1 and the features of token p.
  Row layer(const std::vector<Row>& g, const std::vector<int32_t>& tokens) const {
    const Row embeddings = numbers(embed_);
    std::vector<Row> qkv;
    Row residual;
    for (size_t p = 0; p < g.size(); ++p) {
      const auto e = embeddings.begin() + tokens[p + 1] * c_.hidden;
      Row z = norm(Row(e, e + c_.hidden), w_.embed_norm);
      const Row n = norm(g[p], w_.hidden_norm);
      z.insert(z.end(), n.begin(), n.end());
      qkv.push_back(multiply(w_.qkv, z));
      rotate(qkv.back(), 0, c_.heads, int64_t(p)), rotate(qkv.back(), c_.q_width(), c_.kv_heads, int64_t(p));
      residual = c_.norm_before_residual ? n : g[p];
    }
    Row x = plus(residual, multiply(w_.o, attend(qkv)));
    Row both = multiply(w_.gate_up, norm(x, w_.mlp_norm)), h(both.size() / 2);
    for (size_t i = 0; i < h.size(); ++i) h[i] = both[2 * i] / (1 + std::exp(-both[2 * i])) * both[2 * i + 1];
    return plus(x, multiply(w_.down, h));
  }
  Row attend(const std::vector<Row>& qkv) const {
    const int64_t last = int64_t(qkv.size()) - 1,
                  first = c_.window > 0 ? std::max<int64_t>(0, last + 1 - c_.window) : 0;
    const int64_t D = c_.head_dim, Q = c_.q_width(), KV = c_.kv_width();
    Row mixed(static_cast<size_t>(Q));
    for (int64_t h = 0; h < c_.heads; ++h) {
      const int64_t key = Q + h / (c_.heads / c_.kv_heads) * D;
      Row p;
      double sum = 0;
      for (int64_t t = first; t <= last; ++t) {
        double s = 0;
        for (int64_t d = 0; d < D; ++d) s += qkv[size_t(last)][size_t(h * D + d)] * qkv[size_t(t)][size_t(key + d)];
        p.push_back(std::exp(s / std::sqrt(double(D))));
        sum += p.back();
      }
      for (int64_t t = first; t <= last; ++t)
        for (int64_t d = 0; d < D; ++d)
          mixed[size_t(h * D + d)] += p[size_t(t - first)] / sum * qkv[size_t(t)][size_t(key + KV + d)];
    }
    return mixed;
  }
  static Row plus(Row a, const Row& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  }

  const draft::HeadConfig& c_;
  const draft::HeadWeights& w_;
  WeightMatrix embed_, head_;
};

inline const char* const kLlama3Rope =
    R"("rope_theta": 500000, "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16})";
inline const char* const kYarnRope =
    R"("rope_parameters": {"rope_type": "yarn", "rope_theta": 10000, "factor": 32, "original_max_position_embeddings": 8})";

// A case for each property of a head that changes the guesses.
struct HeadCase {
  const char* name;
  RandomHead head;
  draft::HeadOptions options;
};
inline std::vector<HeadCase> head_cases() {
  std::vector<HeadCase> all;
  const auto add = [&](const char* name, const std::function<void(HeadCase&)>& change) {
    all.push_back({.name = name, .head = {}, .options = {}});
    change(all.back());
  };
  add("plain", [](HeadCase&) {});
  add("norm_before_fc", [](HeadCase& c) { c.head.norm_before_fc = true; });
  add("fc_norm and norm_output", [](HeadCase& c) { c.head.fc_norm = c.head.norm_output = true; });
  add("norm_before_residual", [](HeadCase& c) { c.head.norm_before_residual = true; });
  add("llama3", [](HeadCase& c) { c.head.rope = kLlama3Rope; });
  add("yarn", [](HeadCase& c) { c.head.rope = kYarnRope; });
  add("a window", [](HeadCase& c) { c.options.window = 5; });
  add("the target's vocabulary and head", [](HeadCase& c) { c.head.draft_vocab = c.head.vocab; });
  add("an embedding of its own", [](HeadCase& c) { c.head.own_embedding = true; });
  add("two boundaries in the other order", [](HeadCase& c) { c.head.boundaries = {2, 1}; });
  add("matrices in fp8", [](HeadCase& c) { c.head.norm_before_fc = true, c.options.format = WeightFormat::fp8; });
  // The blocks of mxfp4 divide the rows.
  add("matrices in mxfp4",
      [](HeadCase& c) { c.head.intermediate = 64, c.head.fc_norm = true, c.options.format = WeightFormat::mxfp4; });
  add("as many key heads as query heads, and all flags", [](HeadCase& c) {
    c.head.kv_heads = 4, c.head.prefix = "layers.0.";
    c.head.norm_before_fc = c.head.norm_output = c.head.norm_before_residual = true;
  });
  return all;
}

}  // namespace ingot::testing
