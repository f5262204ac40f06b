#include "ingot/models/gpt_oss/checkpoint.h"

namespace ingot::detail {
namespace {

// Visits every tensor of the model once.
class Layout : public LayoutBuilder {
 public:
  Layout(const Checkpoint& set, const GptOssConfig& config, int64_t layers, Arena* arena)
      : LayoutBuilder(set, arena), c_(config), naming_(set.naming()) {
    weights.embed = matrix({pick("model.embed_tokens.weight", "embedding.weight", "embed", "token_embd.weight")},
                           {c_.vocab}, c_.hidden);
    for (int64_t l = 0; l < layers; ++l) weights.layers.push_back(layer(l));
    weights.norm = vector({pick("model.norm.weight", "norm.scale", "final_norm", "output_norm.weight")}, {c_.hidden});
    weights.head =
        c_.tied_embeddings
            ? weights.embed
            : matrix({pick("lm_head.weight", "unembedding.weight", "lm_head", "output.weight")}, {c_.vocab}, c_.hidden);
    report_missing();
    refuse_others(layer_prefix(), layers, c_.layers);
  }

 private:
  bool own() const { return naming_ == Naming::openai; }
  bool gguf() const { return naming_ == Naming::gguf; }
  // Selects the tensor's name: Hugging Face's, OpenAI's own, that of .iris, or llama.cpp's.
  std::string pick(const char* hf, const char* own, const char* iris, const char* gguf) const {
    const char* const names[] = {hf, own, iris, gguf};
    return names[size_t(naming_)];
  }
  std::string layer_prefix() const { return pick("model.layers.", "block.", "L", "blk."); }

  GptOssLayer layer(int64_t l) {
    const std::string n = layer_prefix() + std::to_string(l) + ".";
    const auto of_layer = [&](auto... names) { return n + pick(names...); };
    const auto qkv_names = [&](const std::string& what) {
      if (own()) return Names{n + "attn.qkv." + what};
      Names names;
      for (const std::string part : {"q", "k", "v"})
        names.push_back(n + (naming_ == Naming::iris ? what[0] + ("_" + part)
                             : gguf()                ? "attn_" + part + "." + what
                                                     : "self_attn." + part + "_proj." + what));
      return names;
    };
    const std::vector<int64_t> widths =
        own() ? std::vector{c_.qkv_width()} : std::vector{c_.q_width(), c_.kv_width(), c_.kv_width()};
    GptOssLayer w;
    w.attn_norm =
        vector({of_layer("input_layernorm.weight", "attn.norm.scale", "norm_attn", "attn_norm.weight")}, {c_.hidden});
    w.qkv = matrix(qkv_names("weight"), widths, c_.hidden);
    w.o = matrix({of_layer("self_attn.o_proj.weight", "attn.out.weight", "w_o", "attn_output.weight")}, {c_.hidden},
                 c_.q_width());
    if (c_.attention_bias) {
      w.b_qkv = vector(qkv_names("bias"), widths);
      w.b_o = vector({of_layer("self_attn.o_proj.bias", "attn.out.bias", "b_o", "attn_output.bias")}, {c_.hidden});
    }
    w.sinks = vector({of_layer("self_attn.sinks", "attn.sinks", "sinks", "attn_sinks.weight")}, {c_.heads});
    w.mlp_norm = vector(
        {of_layer("post_attention_layernorm.weight", "mlp.norm.scale", "norm_moe", "post_attention_norm.weight")},
        {c_.hidden});
    w.router = matrix({of_layer("mlp.router.weight", "mlp.gate.weight", "router_w", "ffn_gate_inp.weight")},
                      {c_.experts}, c_.hidden);
    w.b_router = vector({of_layer("mlp.router.bias", "mlp.gate.bias", "router_b", "ffn_gate_inp.bias")}, {c_.experts});
    if (gguf()) {
      w.gate_up =
          decoded_bank({n + "ffn_gate_exps.weight", n + "ffn_up_exps.weight"}, c_.experts, c_.intermediate, c_.hidden);
      w.b_gate_up = taking_turns({n + "ffn_gate_exps.bias", n + "ffn_up_exps.bias"}, c_.intermediate);
      w.down = decoded_bank({n + "ffn_down_exps.weight"}, c_.experts, c_.hidden, c_.intermediate);
      w.b_down = taking_turns({n + "ffn_down_exps.bias"}, c_.hidden);
      return w;
    }
    const std::string gate_up = of_layer("mlp.experts.gate_up_proj", "mlp.mlp1_weight", "gate_up", "");
    const std::string down = of_layer("mlp.experts.down_proj", "mlp.mlp2_weight", "down", "");
    w.gate_up = bank(gate_up, 2 * c_.intermediate, c_.hidden);
    w.b_gate_up =
        table(of_layer("mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias", "gate_up_b", ""), 2 * c_.intermediate);
    w.down = bank(down, c_.hidden, c_.intermediate);
    w.b_down = table(of_layer("mlp.experts.down_proj_bias", "mlp.mlp2_bias", "down_b", ""), c_.hidden);
    return w;
  }

  // --- tensors of a GGUF file
  // The biases of gate and up as one tensor (E, N), or two tensors whose numbers alternate.
  Tensor taking_turns(const Names& names, int64_t width) {
    const auto turns = int64_t(names.size());
    const Tensor t = take(DType::f32, {c_.experts, turns * width});
    for (int64_t i = 0; i < turns; ++i)
      decode(find(names[size_t(i)], {c_.experts, width}, kNumbers), t, i * 4, Into::f32, c_.experts * width, 1,
             turns * 4);
    return t;
  }

  // --- tensors of the other formats

  // Concatenates several vectors.
  Tensor vector(const Names& names, const std::vector<int64_t>& widths) {
    if (gguf()) return decoded_vector(names, widths);
    int64_t all = 0;
    for (const int64_t n : widths) all += n;
    const Tensor t = take(DType::f32, {all});
    int64_t at = 0;
    for (size_t i = 0; i < names.size(); at += widths[i++])
      add(find(names[i], {widths[i]}, {"BF16", "F32"}), t, at * 4, Change::widen);
    return t;
  }
  // The biases of all experts.
  Tensor table(const std::string& name, int64_t width) {
    const Tensor t = take(DType::f32, {c_.experts, width});
    add(find(name, {c_.experts, width}, {"BF16", "F32"}), t, 0, Change::widen);
    return t;
  }
  // Concatenates the rows of several matrices with the same columns.
  WeightMatrix matrix(const Names& names, const std::vector<int64_t>& rows, int64_t cols) {
    if (gguf()) return decoded_rows(names, rows, cols);
    std::vector<const StoredTensor*> places;
    int64_t all = 0;
    for (size_t i = 0; i < names.size(); ++i) {
      places.push_back(find(names[i], {rows[i], cols}, {"BF16", "F32"}));
      all += rows[i];
      if (places[i] != nullptr && places[0] != nullptr && places[i]->dtype != places[0]->dtype)
        fail(ErrorCode::bad_data, places[i]->file->path(), ": tensor \"", names[i], "\": found dtype ",
             places[i]->dtype, ", expected ", places[0]->dtype, " as \"", names[0], "\" has");
    }
    const DType dtype = type_of(places[0]);
    const Tensor t = take(dtype, {all, cols});
    int64_t at = 0;
    for (size_t i = 0; i < names.size(); at += rows[i++]) add(places[i], t, at * cols * size_of(dtype), Change::none);
    return WeightMatrix(t);
  }
  // The experts' matrices (E, N, K).
  WeightMatrix bank(const std::string& name, int64_t n, int64_t k) {
    const std::string dot = own() ? "." : "_";
    if (set_.find(name) == nullptr) {  // the published form, whose name an error about a missing tensor then mentions
      if (k % kMxBlock != 0 && set_.find(name + dot + "blocks") != nullptr)
        fail(ErrorCode::unsupported, set_.path(), ": found mxfp4 rows of ", k, " numbers in \"", name,
             "\", expected a multiple of ", kMxBlock);
      const int64_t blocks = k / kMxBlock;
      const Tensor data = take(DType::u8, {c_.experts, n, blocks, kMxBlock / 2});
      const Tensor scales = take(DType::u8, {c_.experts, n, blocks});
      add(find(name + dot + "blocks", {c_.experts, n, blocks, kMxBlock / 2}, {"U8"}), data, 0, Change::none);
      add(find(name + dot + "scales", {c_.experts, n, blocks}, {"U8"}), scales, 0, Change::scales);
      return {WeightFormat::mxfp4, data, scales};
    }
    const std::vector<int64_t> shape = own() ? std::vector{c_.experts, n, k} : std::vector{c_.experts, k, n};
    const StoredTensor* place = find(name, shape, {"BF16", "F32"});
    const Tensor t = take(type_of(place), {c_.experts, n, k});
    add(place, t, 0, own() ? Change::none : Change::turn);
    return WeightMatrix(t);
  }

  const GptOssConfig& c_;
  Naming naming_;
};

}  // namespace

CheckpointLayout lay_out(const Checkpoint& checkpoint, const GptOssConfig& config, int64_t layers, Arena* arena) {
  return Layout(checkpoint, config, layers, arena);
}

int64_t layers_of(const GptOssConfig& config, const GptOssLoad& load) {
  if (load.layers < 0 || load.layers > config.layers)
    fail(ErrorCode::usage, "layers: found ", load.layers, ", expected 1 to ", config.layers, ", or 0 for all");
  return load.layers == 0 ? config.layers : load.layers;
}

}  // namespace ingot::detail
