#include "ingot/models/draft/head/head_weights.h"

#include <algorithm>

#include "ingot/core/memory/memory.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/file.h"
#include "ingot/io/hugging_face_cache.h"
#include "ingot/models/checkpoint/layout.h"
#include "ingot/models/checkpoint/matrix_format.h"

namespace ingot::draft {
namespace {

using ingot::detail::Change;
using ingot::detail::Checkpoint;
using ingot::detail::StoredTensor;

class HeadLayout : public ingot::detail::LayoutBuilder {
 public:
  HeadWeights head;
  Tensor offsets;  // (D) i64: target id - id of the head

  HeadLayout(const Checkpoint& set, const HeadConfig& c, Arena* arena) : LayoutBuilder(set, arena), c_(c) {
    read_inputs();
    read_layer(layer_prefix());
    head.norm = vector("norm", c.hidden);
    read_vocabulary();
    // The mask of the ids that the head knows follows from the offsets; the parameters of the rotation, from the
    // config.
    used_.insert("t2d");
    used_.insert(layer_prefix() + "self_attn.rotary_emb.inv_freq");
    report_missing();
    refuse_unused();
  }

 private:
  void refuse_unused() const {
    std::string list;
    for (const auto& [name, place] : set_.tensors())
      if (used_.count(name) == 0) list += (list.empty() ? "" : ", ") + name;
    if (!list.empty())
      fail(ErrorCode::bad_data, set_.path(), ": found ", list.substr(0, 400),
           ", which a head with this config.json does not have, expected none");
  }
  // The published spellings of a name.
  std::string spelled(const std::string& name) const {
    const std::string longer = "model." + name;
    return set_.find(name) == nullptr && set_.find(longer) != nullptr ? longer : name;
  }
  std::string layer_prefix() const {
    for (const char* prefix : {"midlayer.", "layers.0.", "model.layers.0.", "model.midlayer."})
      if (set_.find(prefix + std::string("hidden_norm.weight")) != nullptr) return prefix;
    return "midlayer.";
  }
  Tensor vector(const std::string& name, int64_t width) { return decoded_vector({spelled(name + ".weight")}, {width}); }
  WeightMatrix matrix(const std::string& name, int64_t rows, int64_t cols) {
    return decoded_rows({spelled(name + ".weight")}, {rows}, cols);
  }

  void read_inputs() {
    head.fc = matrix("fc", c_.hidden, c_.features());
    if (c_.norm_before_fc) head.fc_norm = vector("input_norm", c_.features());
    if (!c_.fc_norm) return;
    Names names;
    for (size_t i = 0; i < c_.boundaries.size(); ++i)
      names.push_back(spelled("fc_norm." + std::to_string(i) + ".weight"));
    head.fc_norm = decoded_vector(names, std::vector<int64_t>(names.size(), c_.hidden));
  }
  void read_layer(const std::string& n) {
    head.embed_norm = vector(n + "input_layernorm", c_.hidden), head.hidden_norm = vector(n + "hidden_norm", c_.hidden);
    head.mlp_norm = vector(n + "post_attention_layernorm", c_.hidden);
    head.qkv =
        decoded_rows({n + "self_attn.q_proj.weight", n + "self_attn.k_proj.weight", n + "self_attn.v_proj.weight"},
                     {c_.q_width(), c_.kv_width(), c_.kv_width()}, 2 * c_.hidden);
    head.o = matrix(n + "self_attn.o_proj", c_.hidden, c_.q_width());
    head.gate_up =
        alternating_rows({{n + "mlp.gate_proj.weight", n + "mlp.up_proj.weight"}}, c_.intermediate, c_.hidden, false);
    head.down = matrix(n + "mlp.down_proj", c_.hidden, c_.intermediate);
  }
  void read_vocabulary() {
    const auto stored = [&](const char* name) { return set_.find(spelled(name)) != nullptr; };
    if (stored("embed_tokens.weight")) head.embed = matrix("embed_tokens", c_.vocab, c_.hidden);
    const bool whole = c_.draft_vocab == c_.vocab;
    if (!whole || stored("lm_head.weight")) head.head = matrix("lm_head", c_.draft_vocab, c_.hidden);
    if (whole && !stored("d2t")) return;
    offsets = take(DType::i64, {c_.draft_vocab});
    add(find(spelled("d2t"), {c_.draft_vocab}, {"I64"}), offsets, 0, Change::none);
  }

  const HeadConfig& c_;
};

std::vector<int32_t> target_ids(const Tensor& offsets, int64_t vocab, const std::string& path) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; offsets && i < offsets.numel(); ++i) {
    const int64_t offset = offsets.ptr<int64_t>()[i];
    if (offset < -i || offset >= vocab - i)
      fail(ErrorCode::bad_data, path, ": tensor \"d2t\": found offset ", offset, " of id ", i,
           ", expected ids from 0 to ", vocab - 1);
    ids.push_back(int32_t(i + offset));
  }
  return ids;
}

// Converts the matrices of the products. The embedding is read a row at a time and stays as it is.
void convert(HeadWeights& w, WeightFormat to, const std::string& path) {
  const std::pair<const char*, WeightMatrix*> all[] = {{"fc", &w.fc},     {"qkv", &w.qkv},
                                                       {"o_proj", &w.o},  {"gate_up", &w.gate_up},
                                                       {"down", &w.down}, {"lm_head", &w.head}};
  int64_t bytes = 0;
  for (const auto& [name, m] : all) try {
      if (*m) bytes += bytes_in_format(*m, to);
    } catch (const Error& e) { fail(e.code, path, ": ", name, ": ", e.what()); }
  require_memory(bytes, path + " in another format");
  w.converted = Arena(bytes);
  for (const auto& [name, m] : all)
    if (*m) *m = in_format(*m, to, w.converted);
}

}  // namespace

DraftHead load_draft_head(const std::string& given, const DecoderSpec& target, int64_t target_layers,
                          const HeadOptions& options) {
  const std::string path = snapshot_of(given);
  if (!is_directory(path))
    fail(exists(path) ? ErrorCode::bad_data : ErrorCode::not_found, path, ": found ", found_instead(path),
         ", expected the directory of a draft head with config.json and safetensors");
  DraftHead head{.config = read_head_config(path, target, target_layers, options)};
  const Checkpoint checkpoint(path);
  const int64_t bytes = HeadLayout(checkpoint, head.config, nullptr).bytes;
  require_memory(bytes, path);
  Arena arena(bytes);
  HeadLayout layout(checkpoint, head.config, &arena);
  ingot::detail::read_range(layout.reads, layout.head.fc.data.data, arena.capacity());
  head.weights = std::move(layout.head);
  head.weights.ids = target_ids(layout.offsets, head.config.vocab, path);
  head.weights.arena = std::move(arena);
  if (options.format) convert(head.weights, *options.format, path);
  return head;
}

}  // namespace ingot::draft
