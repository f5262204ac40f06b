#pragma once
// A small random GPT-OSS checkpoint for tests of loading and generation, in any spelling of its names.
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ingot/io/formats/safetensors.h"
#include "ingot/kernels/quant/quant.h"
#include "ingot/testing/testing.h"

namespace ingot::testing {

class GptOssCheckpoint {
 public:
  static constexpr int64_t kVocab = 37, kHidden = 32, kIntermediate = 64, kLayers = 2, kHeads = 4, kKvHeads = 2,
                           kHeadDim = 8, kExperts = 3, kPerToken = 2;
  explicit GptOssCheckpoint(uint64_t seed = 1) : seed_(seed) {}

  struct Options {
    bool own_names = false;
    int shards = 1;
    WeightFormat experts = WeightFormat::mxfp4;  // or bf16, the form that transformers writes
    // Changes the tensors, by name, or the text of config.json, before the files are written.
    std::function<void(std::map<std::string, NamedTensor>&, std::string&)> damage;
  };
  // Makes the directory and fills it.
  void write(const std::string& directory, const Options& options);
  void write(const std::string& directory) { write(directory, Options()); }

 private:
  Tensor random(Shape shape, double scale, double mean = 0);
  Tensor keep(DType dtype, Shape shape);
  void add(const std::string& name, const Tensor& t) { tensors_[name] = {name, t}; }
  void add_experts(const std::string& name, int64_t rows, int64_t cols, const Options& o);
  void add_layer(int64_t layer, const Options& o);
  uint64_t seed_, next_ = 0;
  std::vector<std::unique_ptr<std::vector<char>>> memory_;
  std::map<std::string, NamedTensor> tensors_;
};

inline Tensor GptOssCheckpoint::keep(DType dtype, Shape shape) {
  memory_.push_back(std::make_unique<std::vector<char>>(size_t(shape.numel() * size_of(dtype))));
  return Tensor(memory_.back()->data(), dtype, shape);
}
inline Tensor GptOssCheckpoint::random(Shape shape, double scale, double mean) {
  const Tensor t = keep(DType::bf16, shape);
  fill_normal(t, seed_ * 1000 + next_++, scale, mean);
  return t;
}

// Random numbers of shape (E, rows, cols).
inline void GptOssCheckpoint::add_experts(const std::string& name, int64_t rows, int64_t cols, const Options& o) {
  if (o.experts == WeightFormat::bf16) {
    add(name, random({kExperts, cols, rows}, 1.5 / std::sqrt(double(cols))));
    return;
  }
  const std::string dot = o.own_names ? "." : "_";
  const Tensor blocks = keep(DType::u8, {kExperts, rows, cols / kMxBlock, kMxBlock / 2});
  const Tensor scales = keep(DType::u8, {kExperts, rows, cols / kMxBlock});
  for (int64_t e = 0; e < kExperts; ++e) {
    std::vector<float> numbers(size_t(rows * cols));
    const Tensor x(numbers.data(), {rows, cols});
    fill_normal(x, seed_ * 1000 + next_++, 1.5 / std::sqrt(double(cols)));
    quantise(x, WeightMatrix(WeightFormat::mxfp4, blocks.select(0, e), scales.select(0, e)), {});
  }
  add(name + dot + "blocks", blocks);
  add(name + dot + "scales", scales);
}

inline void GptOssCheckpoint::add_layer(int64_t layer, const Options& o) {
  const bool own = o.own_names;
  const std::string n = own ? "block." + std::to_string(layer) + "." : "model.layers." + std::to_string(layer) + ".";
  const auto pick = [&](const char* hf, const char* theirs) { return n + (own ? theirs : hf); };
  const int64_t q = kHeads * kHeadDim, kv = kKvHeads * kHeadDim;
  const double scale = 1.5 / std::sqrt(double(kHidden));
  add(pick("input_layernorm.weight", "attn.norm.scale"), random({kHidden}, 0.2, 1));
  const Tensor qkv = random({q + 2 * kv, kHidden}, scale), bias = random({q + 2 * kv}, 0.3);
  if (own) {
    add(n + "attn.qkv.weight", qkv);
    add(n + "attn.qkv.bias", bias);
  } else {
    int64_t at = 0;
    for (const auto& [name, width] : {std::pair{"q", q}, {"k", kv}, {"v", kv}}) {
      add(n + "self_attn." + name + "_proj.weight", qkv.slice(0, at, at + width));
      add(n + "self_attn." + name + "_proj.bias", bias.slice(0, at, at + width));
      at += width;
    }
  }
  add(pick("self_attn.o_proj.weight", "attn.out.weight"), random({kHidden, q}, scale));
  add(pick("self_attn.o_proj.bias", "attn.out.bias"), random({kHidden}, 0.3));
  add(pick("self_attn.sinks", "attn.sinks"), random({kHeads}, 1));
  add(pick("post_attention_layernorm.weight", "mlp.norm.scale"), random({kHidden}, 0.2, 1));
  add(pick("mlp.router.weight", "mlp.gate.weight"), random({kExperts, kHidden}, scale));
  add(pick("mlp.router.bias", "mlp.gate.bias"), random({kExperts}, 0.3));
  add_experts(pick("mlp.experts.gate_up_proj", "mlp.mlp1_weight"), 2 * kIntermediate, kHidden, o);
  add(pick("mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias"), random({kExperts, 2 * kIntermediate}, 0.3));
  add_experts(pick("mlp.experts.down_proj", "mlp.mlp2_weight"), kHidden, kIntermediate, o);
  add(pick("mlp.experts.down_proj_bias", "mlp.mlp2_bias"), random({kExperts, kHidden}, 0.3));
}

namespace {

std::string config_text(bool own) {
  using C = GptOssCheckpoint;
  const std::string sizes = detail::concat(
      "\"vocab_size\": ", C::kVocab, ", \"hidden_size\": ", C::kHidden, ", \"intermediate_size\": ", C::kIntermediate,
      ", \"num_hidden_layers\": ", C::kLayers, ", \"num_attention_heads\": ", C::kHeads,
      ", \"num_key_value_heads\": ", C::kKvHeads, ", \"head_dim\": ", C::kHeadDim,
      ", \"sliding_window\": 128, \"initial_context_length\": 4096, \"rope_theta\": 150000");
  if (own)
    return detail::concat("{", sizes, ", \"num_experts\": ", C::kExperts, ", \"experts_per_token\": ", C::kPerToken,
                          ", \"rope_scaling_factor\": 32.0, \"rope_ntk_alpha\": 1, \"rope_ntk_beta\": 32}");
  return detail::concat("{\"model_type\": \"gpt_oss\", ", sizes, ", \"num_local_experts\": ", C::kExperts,
                        ", \"num_experts_per_tok\": ", C::kPerToken,
                        ", \"eos_token_id\": 2, \"max_position_embeddings\": 131072, \"rope_scaling\": {\"rope_type\": "
                        "\"yarn\", \"factor\": 32.0, \"beta_fast\": 32.0, \"beta_slow\": 1.0, \"truncate\": false, "
                        "\"original_max_position_embeddings\": 4096}}");
}

}  // namespace

inline void GptOssCheckpoint::write(const std::string& directory, const Options& o) {
  tensors_.clear();
  next_ = 0;
  create_directories(directory);
  add(o.own_names ? "embedding.weight" : "model.embed_tokens.weight", random({kVocab, kHidden}, 1));
  for (int64_t l = 0; l < kLayers; ++l) add_layer(l, o);
  add(o.own_names ? "norm.scale" : "model.norm.weight", random({kHidden}, 0.2, 1));
  add(o.own_names ? "unembedding.weight" : "lm_head.weight", random({kVocab, kHidden}, 0.4));
  std::string config = config_text(o.own_names);
  if (o.damage) o.damage(tensors_, config);
  write_file(join_path(directory, "config.json"), config);
  std::vector<std::vector<NamedTensor>> parts(static_cast<size_t>(o.shards));
  std::string map;
  int64_t total = 0, i = 0;
  const auto file_of = [&](size_t shard) {
    return o.shards == 1 ? std::string("model.safetensors") : detail::concat("model-", shard, ".safetensors");
  };
  for (const auto& [name, tensor] : tensors_) {
    const size_t shard = size_t(i++ % o.shards);
    parts[shard].push_back(tensor);
    map += detail::concat(map.empty() ? "" : ", ", "\"", name, "\": \"", file_of(shard), "\"");
    total += tensor.tensor.bytes();
  }
  for (size_t s = 0; s < parts.size(); ++s) save_safetensors(join_path(directory, file_of(s)), parts[s]);
  if (o.shards > 1)
    write_file(join_path(directory, "model.safetensors.index.json"),
               detail::concat("{\"metadata\": {\"total_size\": ", total, "}, \"weight_map\": {", map, "}}"));
}

}  // namespace ingot::testing
