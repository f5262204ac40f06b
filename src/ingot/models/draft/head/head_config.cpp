#include "ingot/models/draft/head/head_config.h"

#include <algorithm>
#include <set>

#include "ingot/io/file.h"
#include "ingot/models/families/config_reader.h"

namespace ingot::draft {
namespace {

// Collects the errors of several reads.
class Problems {
 public:
  explicit Problems(std::string where) : where_(std::move(where)) {}
  template <class Read> void collect(const Read& read) {
    try {
      read();
    } catch (const Error& e) {
      std::string text = e.what();
      if (text.starts_with(where_ + ": ")) text.erase(0, where_.size() + 2);
      texts_.push_back(std::move(text));
    }
  }
  template <class... Note> void add(const Note&... note) { texts_.push_back(detail::concat(note...)); }
  void report() const {
    if (texts_.empty()) return;
    std::string list;
    for (const std::string& t : texts_) list += (list.empty() ? "" : "; ") + t;
    fail(ErrorCode::bad_data, where_, ": ", list);
  }

 private:
  std::string where_;
  std::vector<std::string> texts_;
};

class HeadConfigReader {
 public:
  HeadConfigReader(const Json& json, const std::string& where, const DecoderSpec& target, int64_t target_layers)
      : target_(target), layers_(target_layers), problems_(where), top_(json, where) {
    const Json* eagle = top_.find("eagle_config");
    eagle_.emplace(eagle != nullptr ? *eagle : empty_, where + ": eagle_config");
    // Files of speculators state the sizes of the layer in a separate object.
    const Json* layer = top_.find("transformer_layer_config");
    speculators_ = layer != nullptr;
    if (speculators_) layer_.emplace(*layer, where + ": transformer_layer_config");
  }

  HeadConfig read(const HeadOptions& options) {
    read_kind();
    read_sizes();
    problems_.collect([&] { c_.rope = sizes().rope(10000); });
    read_vocabulary();
    read_flags();
    read_boundaries(options);
    c_.window = options.window;
    report_unknown();
    problems_.report();
    return c_;
  }

 private:
  ConfigReader& sizes() { return speculators_ ? *layer_ : top_; }

  // A key that stands at the top or in eagle_config, and at both places with the same value.
  const Json* setting(const char* key) {
    const Json *above = top_.find(key), *inside = eagle_->find(key);
    if (above != nullptr && inside != nullptr && *above != *inside)
      problems_.add(key, ": found ", describe_json(*above), " and, in eagle_config, ", describe_json(*inside),
                    ", expected the same");
    return above != nullptr ? above : inside;
  }
  bool flag(const char* key, bool otherwise) {
    const Json* value = setting(key);
    if (value == nullptr) return otherwise;
    if (value->is_boolean()) return value->get<bool>();
    problems_.add(key, ": found ", describe_json(*value), ", expected true or false");
    return otherwise;
  }
  void must_be(const char* key, const Json& expected) {
    if (const Json* value = setting(key); value != nullptr && *value != expected)
      problems_.add(key, ": found ", describe_json(*value), ", expected ", describe_json(expected));
  }

  void read_kind() {
    const Json* names = top_.find("architectures");
    const bool eagle3 = names != nullptr && names->is_array() && names->size() == 1 && (*names)[0].is_string() &&
                        ((*names)[0] == "Eagle3Speculator" || (*names)[0] == "LlamaForCausalLMEagle3");
    if (!eagle3)
      problems_.add("architectures: found ", names == nullptr ? "none" : write_json(*names).substr(0, 80),
                    ", expected LlamaForCausalLMEagle3 or Eagle3Speculator");
    problems_.collect([&] { top_.must_be("speculators_model_type", "eagle3"); });
    problems_.collect([&] { sizes().must_be("num_hidden_layers", 1); });
    problems_.collect([&] { sizes().must_be("hidden_act", "silu"); });
    for (const char* key : {"attention_bias", "mlp_bias", "tie_word_embeddings"})
      problems_.collect([&] { sizes().must_be(key, false); });
    for (const char* key : {"use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"})
      must_be(key, true);
    must_be("use_mtp_layernorm", false);
    must_be("parallel_draft_step", 1);
  }

  void read_sizes() {
    constexpr int64_t kMost = 1 << 20;
    const auto size = [&](const char* key, int64_t most, int64_t& into) {
      problems_.collect([&] { into = sizes().required_integer(key, 1, most); });
    };
    size("hidden_size", kMost, c_.hidden), size("intermediate_size", kMost, c_.intermediate);
    size("num_attention_heads", 1024, c_.heads), size("num_key_value_heads", 1024, c_.kv_heads);
    if (c_.hidden > 0 && c_.hidden != target_.hidden)
      problems_.add("hidden_size: found ", c_.hidden, ", expected ", target_.hidden, ", the model's");
    if (const Json* other = top_.find("target_hidden_size"); other != nullptr && *other != Json(target_.hidden))
      problems_.add("target_hidden_size: found ", describe_json(*other), ", expected ", target_.hidden,
                    ", the model's");
    c_.head_dim = c_.heads > 0 ? c_.hidden / c_.heads : 0;
    if (sizes().given("head_dim")) size("head_dim", 1024, c_.head_dim);
    if (c_.head_dim % 2 != 0) problems_.add("head_dim: found ", c_.head_dim, ", expected an even number");
    if (c_.kv_heads > 0 && c_.heads % c_.kv_heads != 0)
      problems_.add("num_key_value_heads: found ", c_.kv_heads, ", expected a divisor of ", c_.heads,
                    ", num_attention_heads");
    problems_.collect([&] { c_.norm_eps = sizes().number("rms_norm_eps", 1e-5); });
    if (!(c_.norm_eps > 0 && c_.norm_eps < 1))
      problems_.add("rms_norm_eps: found ", c_.norm_eps, ", expected a number between 0 and 1");
  }

  void read_vocabulary() {
    c_.vocab = target_.vocab;
    problems_.collect([&] {
      if (const int64_t found = sizes().integer("vocab_size", c_.vocab); found != c_.vocab)
        problems_.add("vocab_size: found ", found, ", expected ", c_.vocab, ", the model's");
    });
    c_.draft_vocab = c_.vocab;
    problems_.collect([&] {
      if (top_.given("draft_vocab_size")) c_.draft_vocab = top_.required_integer("draft_vocab_size", 1, c_.vocab);
    });
  }

  void read_flags() {
    c_.norm_before_fc = flag("norm_before_fc", false);
    c_.fc_norm = flag("fc_norm", false);
    c_.norm_output = flag("norm_output", false);
    c_.norm_before_residual = flag("norm_before_residual", speculators_);
    if (c_.norm_before_fc && c_.fc_norm) problems_.add("fc_norm: found true with norm_before_fc, expected one of them");
    if (target_.embedding_scale != 1)
      problems_.add("found a model that scales its embedding, expected none: no published head says whether to scale");
  }

  void read_boundaries(const HeadOptions& options) {
    constexpr const char* kKey = "eagle_aux_hidden_state_layer_ids";
    const char* name = options.layers.empty() ? kKey : "--draft-layers";
    c_.boundaries = options.layers;
    if (const Json* ids = setting(kKey); ids != nullptr && c_.boundaries.empty()) {
      const auto is_boundary = [](const Json& id) { return id.is_number_integer() && id >= 0 && id <= 1 << 20; };
      if (!ids->is_array() || !std::all_of(ids->begin(), ids->end(), is_boundary))
        problems_.add(kKey, ": found ", write_json(*ids).substr(0, 80), ", expected a list of layers");
      else
        c_.boundaries = ids->get<std::vector<int64_t>>();
    }
    // If the files name no boundaries, the head was trained on those that vLLM uses by default.
    if (c_.boundaries.empty()) c_.boundaries = {2, target_.layers / 2, target_.layers - 3};
    std::set<int64_t> seen;
    for (const int64_t b : c_.boundaries)
      if (b < 0 || b > layers_ || !seen.insert(b).second)
        problems_.add(name, ": found ", b, ", expected different numbers from 0 to ", layers_,
                      ", the layers of the model that run");
  }

  void report_unknown() {
    // Keys about the training, about the program that wrote the file, or about tokens.
    for (const char* key : {"speculators_config", "speculators_version", "has_no_defaults_at_init",
                            "embed_requires_grad", "model_type", "eos_token_id"})
      top_.find(key);
    for (const char* key : {"next_layer_regular", "parallel_draft_heads_num_layers"}) eagle_->find(key);
    if (layer_)
      for (const char* key : {"model_type", "eos_token_id"}) layer_->find(key);
    sizes().find("max_position_embeddings");
    const auto report = [&](const ConfigReader& reader, const std::string& prefix) {
      for (const std::string& key : reader.unknown_keys())
        problems_.add(prefix, key.substr(0, 80), ": a property of heads that Ingot does not know, expected none");
    };
    report(top_, ""), report(*eagle_, "eagle_config: ");
    if (layer_) report(*layer_, "transformer_layer_config: ");
  }

  const DecoderSpec& target_;
  const int64_t layers_;
  const Json empty_ = Json::object();
  Problems problems_;
  ConfigReader top_;
  std::optional<ConfigReader> eagle_, layer_;
  bool speculators_ = false;
  HeadConfig c_;
};

}  // namespace

HeadConfig read_head_config(const std::string& directory, const DecoderSpec& target, int64_t target_layers,
                            const HeadOptions& options) {
  const std::string path = join_path(directory, "config.json");
  const Json json = read_json_file(path);
  return HeadConfigReader(json, path, target, target_layers).read(options);
}

}  // namespace ingot::draft
