#include "ingot/models/families/weights.h"

#include <algorithm>

#include "ingot/models/families/family.h"

namespace ingot {
namespace detail {
namespace {

// A layer's norms have different names in models with norms behind attention and MLP.
struct NormNames {
  const char *attention, *attention_post, *mlp, *mlp_post;
};

class FamilyLayout : public LayoutBuilder {
 public:
  FamilyLayout(const Checkpoint& set, const DecoderSpec& spec, int64_t layers, Arena* arena)
      : LayoutBuilder(set, arena), c_(spec), gguf_(set.naming() == Naming::gguf) {
    if (gguf_)
      if (const Family* family = family_of_architecture(GgufFile::architecture_of(set.path())))
        paired_ = family->paired_rows;
    weights.embed = decoded_rows({gguf_ ? "token_embd.weight" : "model.embed_tokens.weight"}, {c_.vocab}, c_.hidden);
    for (int64_t l = 0; l < layers; ++l) weights.layers.push_back(layer(l));
    weights.norm = decoded_vector({gguf_ ? "output_norm.weight" : "model.norm.weight"}, {c_.hidden});
    const std::string head = gguf_ ? "output.weight" : "lm_head.weight";
    weights.head = c_.tied_embeddings ? weights.embed : decoded_rows({head}, {c_.vocab}, c_.hidden);
    // These tensors are not read. They repeat part of the spec, the embedding, or the parameters of the rotation.
    used_.insert("rope_freqs.weight");
    if (c_.tied_embeddings) used_.insert(head), refuse_another_head(head);
    for (int64_t l = 0; l < c_.layers; ++l)
      used_.insert("model.layers." + std::to_string(l) + ".self_attn.rotary_emb.inv_freq");
    report_missing();
    refuse_others(gguf_ ? "blk." : "model.layers.", layers, c_.layers);
  }

 private:
  // A file whose config.json says that the head is the embedding may have a head with numbers of its own.
  void refuse_another_head(const std::string& name) const {
    const StoredTensor *head = set_.find(name), *embed = set_.find("model.embed_tokens.weight");
    if (arena_ == nullptr || head == nullptr || embed == nullptr) return;
    bool same = head->dtype == embed->dtype && head->shape == embed->shape && head->bytes == embed->bytes;
    constexpr int64_t kPiece = 8 << 20;
    std::string a, b;
    for (int64_t at = 0; same && at < head->bytes; at += kPiece) {
      const int64_t n = std::min(kPiece, head->bytes - at);
      a.resize(size_t(n)), b.resize(size_t(n));
      head->file->read_at(head->begin + at, a.data(), n);
      embed->file->read_at(embed->begin + at, b.data(), n);
      same = a == b;
    }
    if (!same)
      fail(ErrorCode::bad_data, set_.path(), ": found tie_word_embeddings and a ", name, " that is not ", embed->name,
           ", expected equal numbers; with \"tie_word_embeddings\": false in config.json the model has its own head");
  }
  NormNames norm_names() const {
    if (gguf_) return {"attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"};
    if (!c_.norm.post) return {"input_layernorm", "", "post_attention_layernorm", ""};
    return {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"};
  }
  std::string prefix(int64_t l) const { return (gguf_ ? "blk." : "model.layers.") + std::to_string(l) + "."; }

  DecoderLayer layer(int64_t l) {
    const std::string n = prefix(l);
    const NormNames norms = norm_names();
    const auto norm = [&](const char* name) { return decoded_vector({n + name + ".weight"}, {c_.hidden}); };
    DecoderLayer w;
    w.attn_norm = norm(norms.attention), w.mlp_norm = norm(norms.mlp);
    if (c_.norm.post) w.attn_post_norm = norm(norms.attention_post), w.mlp_post_norm = norm(norms.mlp_post);
    read_attention(n + (gguf_ ? "attn_" : "self_attn."), w);
    if (c_.layer[size_t(l)].experts)
      read_experts(n, w);
    else
      read_mlp(n + (gguf_ ? "ffn_" : "mlp."), w);
    return w;
  }

  void read_attention(const std::string& n, DecoderLayer& w) {
    const std::string proj = gguf_ ? "" : "_proj";
    const auto names = [&](const std::string& what) {
      return Names{n + "q" + proj + what, n + "k" + proj + what, n + "v" + proj + what};
    };
    const std::vector<int64_t> widths = {c_.q_width(), c_.kv_width(), c_.kv_width()};
    const int64_t head = paired_ ? c_.head_dim : 0;
    const std::string o = n + (gguf_ ? "output" : "o_proj");
    w.qkv = decoded_rows(names(".weight"), widths, c_.hidden, {head, head, 0});
    w.o = decoded_rows({o + ".weight"}, {c_.hidden}, c_.q_width());
    if (c_.qkv_bias) w.b_qkv = decoded_vector(names(".bias"), widths, {head, head, 0});
    if (c_.output_bias) w.b_o = decoded_vector({o + ".bias"}, {c_.hidden});
    if (!c_.qk_norm) return;
    w.q_norm = decoded_vector({n + "q_norm.weight"}, {c_.head_dim});
    w.k_norm = decoded_vector({n + "k_norm.weight"}, {c_.head_dim});
  }

  // Gate and up as a single matrix with alternating rows.
  void read_mlp(const std::string& n, DecoderLayer& w) {
    const std::string proj = gguf_ ? "" : "_proj";
    const auto name = [&](const char* part, const char* what) { return n + part + proj + what; };
    w.gate_up = alternating_rows({{name("gate", ".weight"), name("up", ".weight")}}, c_.intermediate, c_.hidden, false);
    w.down = decoded_rows({name("down", ".weight")}, {c_.hidden}, c_.intermediate);
    if (!c_.mlp_bias) return;
    w.b_gate_up = take(DType::f32, {2 * c_.intermediate});
    for (const int64_t i : {0, 1})
      decode(find(name(i == 0 ? "gate" : "up", ".bias"), {c_.intermediate}, kNumbers), w.b_gate_up, i * 4, Into::f32,
             c_.intermediate, 1, 8);
    w.b_down = decoded_vector({name("down", ".bias")}, {c_.hidden});
  }

  void read_experts(const std::string& n, DecoderLayer& w) {
    w.router = decoded_rows({n + (gguf_ ? "ffn_gate_inp.weight" : "mlp.gate.weight")}, {c_.experts}, c_.hidden);
    if (gguf_) {
      w.gate_up =
          decoded_bank({n + "ffn_gate_exps.weight", n + "ffn_up_exps.weight"}, c_.experts, c_.intermediate, c_.hidden);
      w.down = decoded_bank({n + "ffn_down_exps.weight"}, c_.experts, c_.hidden, c_.intermediate);
      return;
    }
    std::vector<Names> gate_up, down;
    for (int64_t e = 0; e < c_.experts; ++e) {
      const std::string expert = n + "mlp.experts." + std::to_string(e) + ".";
      gate_up.push_back({expert + "gate_proj.weight", expert + "up_proj.weight"});
      down.push_back({expert + "down_proj.weight"});
    }
    w.gate_up = alternating_rows(gate_up, c_.intermediate, c_.hidden, true);
    w.down = alternating_rows(down, c_.hidden, c_.intermediate, true);
  }

  const DecoderSpec& c_;
  const bool gguf_;
  bool paired_ = false;
};

}  // namespace
}  // namespace detail

detail::CheckpointLayout lay_out_family(const detail::Checkpoint& checkpoint, const DecoderSpec& spec, int64_t layers,
                                        Arena* arena) {
  return detail::FamilyLayout(checkpoint, spec, layers, arena);
}

}  // namespace ingot
