// GPT-OSS's configuration of GGUF files: metadata under the architecture's name, and sizes of the tensors.
#include <algorithm>
#include <variant>
#include <vector>

#include "ingot/io/formats/gguf.h"
#include "ingot/models/gpt_oss/config_parts.h"

namespace ingot::detail {
namespace {

class GgufReader {
 public:
  explicit GgufReader(const std::string& path) : set_(path), file_(set_.first()) {}
  GptOssConfig read() {
    const std::string architecture = file_.text("general.architecture").value_or("");
    if (architecture != "gpt-oss")
      fail(ErrorCode::unsupported, file_.path(), ": general.architecture: found \"", architecture.substr(0, 40),
           "\", expected \"gpt-oss\"");
    read_sizes();
    read_rotation();
    read_windows();
    read_end_tokens();
    check(c_, file_.path());
    return c_;
  }

 private:
  static std::string key(const std::string& name) { return "gpt-oss." + name; }
  [[noreturn]] void missing(const std::string& name) const {
    fail(ErrorCode::bad_data, file_.path(), ": ", key(name), " is missing");
  }
  int64_t integer(const std::string& name) const {
    const auto n = file_.integer(key(name));
    if (!n) missing(name);
    return *n;
  }
  double number(const std::string& name) const {
    const auto n = file_.number(key(name));
    if (!n) missing(name);
    return *n;
  }
  const SafetensorsEntry* tensor(const std::string& name) const {
    for (const auto& file : set_.files())
      for (const SafetensorsEntry& e : file->entries())
        if (e.name == name) return &e;
    return nullptr;
  }

  void read_sizes() {
    const SafetensorsEntry* embed = tensor("token_embd.weight");
    if (embed == nullptr || embed->shape.size() != 2)
      fail(ErrorCode::bad_data, file_.path(), ": found no tensor \"token_embd.weight\" of 2 dimensions");
    c_.vocab = embed->shape[0];
    c_.hidden = integer("embedding_length");
    c_.layers = integer("block_count");
    in_range<int64_t>(file_.path(), "block_count", c_.layers, 1, 4096);  // checked before a list of this length is made
    c_.heads = integer("attention.head_count");
    c_.kv_heads = integer("attention.head_count_kv");
    in_range<int64_t>(file_.path(), "attention.head_count", c_.heads, 1, 4096);
    c_.head_dim = file_.integer(key("attention.key_length")).value_or(c_.hidden / c_.heads);
    if (const auto n = file_.integer(key("attention.value_length")); n && *n != c_.head_dim)
      fail(ErrorCode::unsupported, file_.path(), ": ", key("attention.value_length"), ": found ", *n, ", expected ",
           c_.head_dim, " as key_length");
    c_.experts = integer("expert_count");
    c_.experts_per_token = integer("expert_used_count");
    const auto width = file_.integer(key("expert_feed_forward_length"));
    c_.intermediate = width ? *width : integer("feed_forward_length");
    c_.context = integer("context_length");
    c_.norm_eps = number("attention.layer_norm_rms_epsilon");
    c_.attention_bias = tensor("blk.0.attn_q.bias") != nullptr;
    c_.tied_embeddings = tensor("output.weight") == nullptr;
  }
  void read_rotation() {
    c_.rope_base = number("rope.freq_base");
    const auto type = file_.text(key("rope.scaling.type"));
    if (!type) missing("rope.scaling.type");
    if (const auto n = file_.integer(key("rope.dimension_count")); n && *n != c_.head_dim)
      fail(ErrorCode::unsupported, file_.path(), ": ", key("rope.dimension_count"), ": found ", *n, ", expected ",
           c_.head_dim, ", the whole head");
    if (*type == "none") return;
    if (*type != "yarn")
      fail(ErrorCode::unsupported, file_.path(), ": ", key("rope.scaling.type"), ": found \"", type->substr(0, 40),
           "\", expected yarn or none");
    // The format does not state whether the ends of the ramp are rounded; the architecture does not round the ends.
    c_.rope_scaling = kDefaultScaling;
    c_.rope_scaling.factor = number("rope.scaling.factor");
    c_.rope_scaling.original_context = double(integer("rope.scaling.original_context_length"));
    const auto given = [&](const char* name, double& into) {
      if (const auto n = file_.number(key(name))) into = *n;
    };
    given("rope.scaling.yarn_beta_fast", c_.rope_scaling.beta_fast);
    given("rope.scaling.yarn_beta_slow", c_.rope_scaling.beta_slow);
    for (const char* name :
         {"rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"})
      if (const auto n = file_.number(key(name)); n && *n != 1)
        fail(ErrorCode::unsupported, file_.path(), ": ", key(name), ": found ", *n, ", expected 1");
  }
  void read_windows() {
    c_.window = integer("attention.sliding_window");
    const std::string name = key("attention.sliding_window_pattern");
    const auto found = file_.metadata().find(name);
    const auto* list = found == file_.metadata().end() ? nullptr : std::get_if<std::vector<bool>>(&found->second);
    if (list != nullptr) {
      if (int64_t(list->size()) != c_.layers)
        fail(ErrorCode::bad_data, file_.path(), ": ", name, ": found ", list->size(), " entries, expected ", c_.layers);
      c_.sliding = *list;
      return;
    }
    if (const int64_t every = file_.integer(name).value_or(2); every != 2)
      fail(ErrorCode::unsupported, file_.path(), ": ", name, ": found ", every, ", expected 2");
    for (int64_t l = 0; l < c_.layers; ++l) c_.sliding.push_back(l % 2 == 0);
  }
  // Reads the end token that the file names, and adds the control tokens that end a turn of this architecture.
  void read_end_tokens() {
    const auto add = [&](int64_t id) {
      if (std::find(c_.end_tokens.begin(), c_.end_tokens.end(), id) == c_.end_tokens.end()) c_.end_tokens.push_back(id);
    };
    if (const auto id = file_.integer("tokenizer.ggml.eos_token_id")) {
      in_range<int64_t>(file_.path(), "tokenizer.ggml.eos_token_id", *id, 0, c_.vocab - 1);
      add(*id);
    }
    const auto* tokens = file_.texts("tokenizer.ggml.tokens");
    if (tokens == nullptr) return;
    for (const char* end : {"<|return|>", "<|endoftext|>", "<|call|>"})
      if (const auto at = std::find(tokens->begin(), tokens->end(), end); at != tokens->end())
        add(at - tokens->begin());
  }

  const GgufSet set_;
  const GgufFile& file_;
  GptOssConfig c_;
};

}  // namespace

GptOssConfig gpt_oss_config_from_gguf(const std::string& path) { return GgufReader(path).read(); }

}  // namespace ingot::detail
