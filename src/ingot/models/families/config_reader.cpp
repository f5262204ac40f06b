#include "ingot/models/families/config_reader.h"

#include <algorithm>
#include <array>

namespace ingot {
namespace {

// Keys about training, generation, the writing program and the tokenizer.
constexpr std::array kWithoutEffect = {"_attn_implementation",
                                       "_attn_implementation_autoset",
                                       "_name_or_path",
                                       "add_cross_attention",
                                       "architectures",
                                       "attention_dropout",
                                       "attn_implementation",
                                       "auto_map",
                                       "bad_words_ids",
                                       "begin_suppress_tokens",
                                       "bos_token_id",
                                       "cache_implementation",
                                       "chunk_size_feed_forward",
                                       "cross_attention_hidden_size",
                                       "decoder_start_token_id",
                                       "diversity_penalty",
                                       "do_sample",
                                       "dtype",
                                       "early_stopping",
                                       "embd_pdrop",
                                       "encoder_no_repeat_ngram_size",
                                       "exponential_decay_length_penalty",
                                       "finetuning_task",
                                       "forced_bos_token_id",
                                       "forced_eos_token_id",
                                       "head_bias",
                                       "hidden_dropout",
                                       "id2label",
                                       "initializer_range",
                                       "is_decoder",
                                       "is_encoder_decoder",
                                       "is_llama_config",
                                       "label2id",
                                       "length_penalty",
                                       "max_length",
                                       "max_window_layers",
                                       "min_length",
                                       "no_repeat_ngram_size",
                                       "num_beam_groups",
                                       "num_beams",
                                       "num_return_sequences",
                                       "output_attentions",
                                       "output_hidden_states",
                                       "output_router_logits",
                                       "output_scores",
                                       "pad_token_id",
                                       "prefix",
                                       "pretraining_tp",
                                       "problem_type",
                                       "pruned_heads",
                                       "remove_invalid_values",
                                       "repetition_penalty",
                                       "resid_pdrop",
                                       "return_dict",
                                       "return_dict_in_generate",
                                       "router_aux_loss_coef",
                                       "router_jitter_noise",
                                       "sep_token_id",
                                       "suppress_tokens",
                                       "task_specific_params",
                                       "temperature",
                                       "tf_legacy_loss",
                                       "tie_encoder_decoder",
                                       "tokenizer_class",
                                       "top_k",
                                       "top_p",
                                       "torch_dtype",
                                       "torchscript",
                                       "transformers.js_config",
                                       "transformers_version",
                                       "typical_p",
                                       "unsloth_fixed",
                                       "unsloth_version",
                                       "use_bfloat16",
                                       "use_cache"};

bool says_nothing(const Json& value) {
  if (value.is_null() || value == Json(false) || value == Json(0)) return true;
  return (value.is_array() || value.is_object() || value.is_string()) && value.empty();
}

}  // namespace

ConfigReader::ConfigReader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
  if (!json.is_object()) fail(ErrorCode::bad_data, where_, ": found ", describe_json(json), ", expected an object");
}

void ConfigReader::wrong(const char* key, const Json& found, const std::string& expected) const {
  fail(ErrorCode::unsupported, where_, ": ", key, ": found ", describe_json(found), ", expected ", expected);
}

const Json* ConfigReader::find(const char* key) {
  used_.insert(key);
  const auto at = json_.find(key);
  return at == json_.end() || at->is_null() ? nullptr : &*at;
}
int64_t ConfigReader::integer(const char* key, int64_t otherwise) {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_number_integer()) wrong(key, *value, "an integer");
  return value->get<int64_t>();
}
int64_t ConfigReader::required_integer(const char* key, int64_t low, int64_t high) {
  const Json* value = find(key);
  if (value == nullptr) fail(ErrorCode::bad_data, where_, ": found no ", key, ", expected an integer");
  const int64_t n = integer(key, 0);
  if (n < low || n > high)
    fail(ErrorCode::bad_data, where_, ": ", key, ": found ", n, ", expected ", low, " to ", high);
  return n;
}
double ConfigReader::number(const char* key, double otherwise) {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_number()) wrong(key, *value, "a number");
  return value->get<double>();
}
bool ConfigReader::flag(const char* key, bool otherwise) {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) wrong(key, *value, "true or false");
  return value->get<bool>();
}
std::string ConfigReader::text(const char* key, const std::string& otherwise) {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_string()) wrong(key, *value, "a text");
  return value->get<std::string>();
}
std::vector<int64_t> ConfigReader::ids(const char* key) {
  const Json* value = find(key);
  if (value == nullptr) return {};
  std::vector<int64_t> out;
  for (const Json& id : value->is_array() ? *value : Json::array({*value})) {
    if (!id.is_number_integer() || id < 0 || id >= Json(int64_t(1) << 31)) wrong(key, *value, "an id or a list of ids");
    out.push_back(id.get<int64_t>());
  }
  return out;
}
void ConfigReader::must_be(const char* key, const Json& expected) {
  const Json* value = find(key);
  if (value != nullptr && *value != expected)
    wrong(key, *value, expected == Json::array() ? "an empty array" : describe_json(expected));
}

void ConfigReader::read_windows(DecoderSpec& spec, int64_t window, const std::function<bool(int64_t layer)>& slides) {
  const Json* types = find("layer_types");
  if (types != nullptr && (!types->is_array() || int64_t(types->size()) != spec.layers))
    wrong("layer_types", *types, "one type for each layer");
  for (int64_t l = 0; l < spec.layers; ++l) {
    bool sliding = slides(l);
    if (types != nullptr) {
      const Json& type = (*types)[size_t(l)];
      if (type != "full_attention" && type != "sliding_attention")
        wrong("layer_types", type, "full_attention or sliding_attention");
      sliding = type == "sliding_attention";
    }
    if (sliding && window < 1)
      fail(ErrorCode::bad_data, where_, ": sliding_window: found ", window,
           " with sliding layers, expected at least 1");
    spec.layer[size_t(l)].window = sliding ? window : 0;
  }
}

RopeTable ConfigReader::rope_table(const Json& object, const std::string& name, double theta) {
  ConfigReader keys(object, where_ + ": " + name);
  RopeTable table{.theta = keys.number("rope_theta", theta)};
  RopeScaling& s = table.scaling;
  if (const Json* part = keys.find("partial_rotary_factor"); part != nullptr && *part != Json(1.0) && *part != Json(1))
    keys.wrong("partial_rotary_factor", *part, "1");
  const std::string older = keys.text("type", "default"), type = keys.text("rope_type", older);
  if (type == "linear") {
    s.kind = RopeScaling::linear;
  } else if (type == "llama3") {
    s.kind = RopeScaling::llama3;
    for (const char* key : {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
      if (!keys.given(key))
        fail(ErrorCode::bad_data, keys.where(), ": found llama3 without ", key, ", expected a number");
    s.beta_slow = keys.number("low_freq_factor", 1), s.beta_fast = keys.number("high_freq_factor", 4);
    s.original_context = keys.number("original_max_position_embeddings", 8192);
  } else if (type == "yarn") {
    s.kind = RopeScaling::yarn;
    s.original_context = keys.number("original_max_position_embeddings", double(integer("max_position_embeddings", 0)));
    s.beta_fast = keys.number("beta_fast", 32), s.beta_slow = keys.number("beta_slow", 1);
    s.truncate = keys.flag("truncate", true);
    s.attention_factor = keys.number("attention_factor", 0);
  } else if (type != "default") {
    fail(ErrorCode::unsupported, keys.where(), ".rope_type: found \"", type.substr(0, 40),
         "\", expected default, linear, llama3 or yarn");
  }
  if (type != "default") {
    s.factor = keys.number("factor", 0);
    if (!(s.factor >= 1 && s.factor <= 1e6))
      fail(ErrorCode::bad_data, keys.where(), ".factor: found ", s.factor, ", expected 1 to 1e6");
  }
  keys.refuse_unknown();
  return table;
}

RopeTable ConfigReader::rope(double default_theta) {
  const double theta = number("rope_theta", default_theta);
  const Json *scaling = find("rope_scaling"), *parameters = find("rope_parameters");
  if (const Json* part = find("partial_rotary_factor"); part != nullptr && *part != Json(1.0) && *part != Json(1))
    wrong("partial_rotary_factor", *part, "1");
  if (scaling != nullptr && !scaling->empty()) return rope_table(*scaling, "rope_scaling", theta);
  if (parameters != nullptr) return rope_table(*parameters, "rope_parameters", theta);
  return {.theta = theta};
}

std::vector<std::string> ConfigReader::unknown_keys() const {
  std::vector<std::string> unknown;
  for (const auto& [key, value] : json_.items()) {
    if (used_.count(key) != 0 || says_nothing(value)) continue;
    if (std::find(kWithoutEffect.begin(), kWithoutEffect.end(), key) == kWithoutEffect.end()) unknown.push_back(key);
  }
  return unknown;
}

void ConfigReader::refuse_unknown() const {
  for (const std::string& key : unknown_keys())
    fail(ErrorCode::unsupported, where_, ": ", key.substr(0, 80), ": found ", describe_json(json_[key]),
         ", a property of models that Ingot does not know; expected none");
}

}  // namespace ingot
