#include "ingot/models/gpt_oss/config.h"

#include <algorithm>

#include "ingot/io/file.h"
#include "ingot/io/formats/archive.h"
#include "ingot/io/formats/gguf.h"
#include "ingot/io/formats/iris.h"
#include "ingot/io/hugging_face_cache.h"
#include "ingot/io/json.h"
#include "ingot/models/checkpoint/stored_tensors.h"
#include "ingot/models/gpt_oss/config_parts.h"

namespace ingot {

using detail::in_range;
using detail::kDefaultScaling;
using detail::kOriginalContext;

namespace {

// Refuses every value except the architecture's: another value would mean another model.
void must_be(Fields& f, const char* key, const std::string& expected) {
  std::string found = expected;
  f.read(key, found);
  if (found != expected)
    fail(ErrorCode::unsupported, f.where(), ".", key, ": found \"", found, "\", expected \"", expected, "\"");
}
bool is_null(const Json& json, const char* key) { return json.contains(key) && json.at(key).is_null(); }
bool is_given(const Json& json, const char* key) { return json.contains(key) && !json.at(key).is_null(); }

void refuse_partial_rotation(Fields& f) {
  double part = 1;
  if (f.read("partial_rotary_factor", part) && part != 1)
    fail(ErrorCode::unsupported, f.where(), ".partial_rotary_factor: found ", part, ", expected 1");
}

// Reads one object rope_scaling or rope_parameters.
void read_rope(Fields f, GptOssConfig& c) {
  for (const char* key : {"full_attention", "sliding_attention"})
    if (f.has(key))
      fail(ErrorCode::unsupported, f.where(), ": found settings of their own for ", key,
           ", expected one for all layers");
  std::string type = "default";
  if (!f.read("rope_type", type)) f.read("type", type);
  c.rope_scaling = {};
  if (type == "yarn") {
    c.rope_scaling.kind = RopeScaling::yarn;
    f.require("factor", c.rope_scaling.factor);
    f.read("original_max_position_embeddings", c.rope_scaling.original_context);
    f.read("beta_fast", c.rope_scaling.beta_fast);
    f.read("beta_slow", c.rope_scaling.beta_slow);
    f.read("truncate", c.rope_scaling.truncate);
    f.read("attention_factor", c.rope_scaling.attention_factor);
    for (const char* key : {"mscale", "mscale_all_dim"})
      if (f.has(key)) fail(ErrorCode::unsupported, f.where(), ": found ", key, ", which this model does not use");
    if (c.rope_scaling.original_context == 0)
      fail(ErrorCode::bad_data, f.where(),
           ": found yarn without original_max_position_embeddings, expected the context the model was trained with");
  } else if (type != "default") {
    fail(ErrorCode::unsupported, f.where(), ".rope_type: found \"", type, "\", expected yarn or default");
  }
  f.read("rope_theta", c.rope_base);
  refuse_partial_rotation(f);
}

// rope_scaling takes precedence over rope_parameters, and without both the architecture's default applies, as in
// transformers.
void read_rope_keys(const Json& json, Fields& f, GptOssConfig& c) {
  f.read("rope_theta", c.rope_base);
  refuse_partial_rotation(f);
  for (const char* key : {"rope_scaling", "rope_parameters"})
    if (is_given(json, key) && !(key == std::string("rope_scaling") && json.at(key).empty()))
      return read_rope(f.object(key), c);
  c.rope_scaling = kDefaultScaling;
}

void read_own_rope_keys(Fields& f, GptOssConfig& c) {
  c.rope_scaling = kDefaultScaling;
  f.read("rope_theta", c.rope_base);
  f.read("rope_scaling_factor", c.rope_scaling.factor);
  f.read("initial_context_length", c.rope_scaling.original_context);
  f.read("rope_ntk_alpha", c.rope_scaling.beta_slow);
  f.read("rope_ntk_beta", c.rope_scaling.beta_fast);
}

void read_layer_types(Fields& f, GptOssConfig& c) {
  std::vector<std::string> types;
  if (!f.read("layer_types", types)) {
    for (int64_t l = 0; l < c.layers; ++l) c.sliding.push_back(l % 2 == 0);
    return;
  }
  if (int64_t(types.size()) != c.layers)
    fail(ErrorCode::bad_data, f.where(), ".layer_types: found ", types.size(), " entries, expected ", c.layers,
         ", one per layer");
  for (const std::string& type : types) {
    if (type != "sliding_attention" && type != "full_attention")
      fail(ErrorCode::unsupported, f.where(), ".layer_types: found \"", type,
           "\", expected sliding_attention or full_attention");
    c.sliding.push_back(type == "sliding_attention");
  }
}

// Reads a single id or a list of ids.
std::vector<int64_t> read_ids(const Json& json, const std::string& where) {
  std::vector<int64_t> ids;
  const Json list = json.is_array() ? json : Json::array({json});
  for (const Json& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0)
      fail(ErrorCode::bad_data, where, ".eos_token_id: found ", describe_json(id), ", expected an id or a list of ids");
    ids.push_back(id.get<int64_t>());
  }
  return ids;
}

template <class Visit> void visit_sizes(Visit&& visit, GptOssConfig& c, bool own) {
  visit("vocab_size", c.vocab);
  visit("hidden_size", c.hidden);
  visit("num_hidden_layers", c.layers);
  visit("num_attention_heads", c.heads);
  visit("num_key_value_heads", c.kv_heads);
  visit("intermediate_size", c.intermediate);
  visit(own ? "num_experts" : "num_local_experts", c.experts);
}

// The blocks and scales of MXFP4 are recognised by their tensors' names. Any other packing of the weights is refused.
void refuse_other_quantization(const Json& json, const std::string& where) {
  const auto q = json.find("quantization_config");
  if (q == json.end() || q->is_null()) return;
  const Json method = q->is_object() && q->contains("quant_method") ? q->at("quant_method") : Json();
  if (method != "mxfp4")
    fail(ErrorCode::unsupported, where, ": quantization_config.quant_method: found ", describe_json(method),
         ", expected \"mxfp4\" or no quantization");
}

}  // namespace

void check(const GptOssConfig& c, const std::string& where) {
  constexpr int64_t kMost = 1 << 20;
  in_range<int64_t>(where, "vocab_size", c.vocab, 1, 1 << 24);
  in_range<int64_t>(where, "hidden_size", c.hidden, 1, kMost);
  in_range<int64_t>(where, "num_hidden_layers", c.layers, 1, 4096);
  in_range<int64_t>(where, "num_attention_heads", c.heads, 1, 4096);
  in_range<int64_t>(where, "num_key_value_heads", c.kv_heads, 1, c.heads);
  if (c.heads % c.kv_heads != 0)
    fail(ErrorCode::bad_data, where, ": num_key_value_heads: found ", c.kv_heads,
         ", expected a divisor of num_attention_heads = ", c.heads);
  in_range<int64_t>(where, "head_dim", c.head_dim, 2, 4096);
  if (c.head_dim % 2 != 0)
    fail(ErrorCode::bad_data, where, ": head_dim: found ", c.head_dim, ", expected an even number");
  in_range<int64_t>(where, "intermediate_size", c.intermediate, 1, kMost);
  in_range<int64_t>(where, "num_local_experts", c.experts, 1, 1 << 16);
  in_range<int64_t>(where, "num_experts_per_tok", c.experts_per_token, 1, std::min<int64_t>(c.experts, 1024));
  in_range<int64_t>(where, "sliding_window", c.window, 1, 1 << 24);
  in_range<int64_t>(where, "max_position_embeddings", c.context, 1, 1 << 26);
  in_range<double>(where, "rms_norm_eps", c.norm_eps, 1e-20, 1);
  in_range<double>(where, "rope_theta", c.rope_base, 1, 1e15);
  in_range<double>(where, "swiglu_limit", c.swiglu_limit, 0, 1e9);
  in_range<double>(where, "swiglu_alpha", c.swiglu_alpha, 1e-6, 1e6);
  if (c.rope_scaling.kind == RopeScaling::none) return;
  in_range<double>(where, "rope factor", c.rope_scaling.factor, 1, 1e6);
  in_range<double>(where, "rope original context", c.rope_scaling.original_context, 1, 1e9);
  in_range<double>(where, "rope beta_slow", c.rope_scaling.beta_slow, 1e-9, 1e9);
  in_range<double>(where, "rope beta_fast", c.rope_scaling.beta_fast, 1e-9, 1e9);
  in_range<double>(where, "rope attention_factor", c.rope_scaling.attention_factor, 0, 1e6);
}

GptOssConfig gpt_oss_config_from_json(const std::string& text, const std::string& where) {
  const Json json = parse_json(text, where);
  Fields f(json, where);
  const bool own = json.is_object() && json.contains("num_experts") && !json.contains("num_local_experts");
  GptOssConfig c;
  if (!own || json.contains("model_type")) must_be(f, "model_type", "gpt_oss");
  visit_sizes([&](const char* key, int64_t& into) { f.require(key, into); }, c, own);
  if (!f.read("num_experts_per_tok", c.experts_per_token)) f.require("experts_per_token", c.experts_per_token);
  c.head_dim = 64;  // the architecture's width, which differs from hidden / heads; null selects hidden / heads
  if (is_null(json, "head_dim"))
    c.head_dim = c.heads > 0 ? c.hidden / c.heads : 0;
  else
    f.read("head_dim", c.head_dim);
  f.read("sliding_window", c.window);
  f.read("rms_norm_eps", c.norm_eps);
  f.read("swiglu_limit", c.swiglu_limit);
  f.read("swiglu_alpha", c.swiglu_alpha);
  f.read("attention_bias", c.attention_bias);
  f.read("tie_word_embeddings", c.tied_embeddings);
  must_be(f, "hidden_act", "silu");
  refuse_other_quantization(json, where);
  if (own && !is_given(json, "rope_scaling") && !is_given(json, "rope_parameters"))
    read_own_rope_keys(f, c);
  else
    read_rope_keys(json, f, c);
  if (!f.read("max_position_embeddings", c.context) && c.rope_scaling.kind == RopeScaling::yarn)
    // The clamp keeps a product beyond the bounds within the integer type; check() refuses such a context in any case.
    c.context = int64_t(std::clamp(c.rope_scaling.original_context * c.rope_scaling.factor, -1.0, 1e15));
  in_range<int64_t>(where, "num_hidden_layers", c.layers, 1, 4096);  // checked before a list of this length is made
  read_layer_types(f, c);
  if (json.contains("eos_token_id") && !is_null(json, "eos_token_id"))
    c.end_tokens = read_ids(json.at("eos_token_id"), where);
  check(c, where);
  return c;
}

namespace {

GptOssConfig config_of_archive(const std::string& path) {
  const ArchiveFile file(path);
  const Json about = parse_json(file.about(), path + ": about");
  if (!about.is_object() || !about.contains("model"))
    fail(ErrorCode::bad_data, path, ": found an archive of \"", file.kind().substr(0, 40),
         "\" that describes no model");
  return gpt_oss_config_from_json(write_json(about.at("model")), path + ": about.model");
}

GptOssConfig config_of_iris(const std::string& path) {
  const IrisFile file(path);
  const auto shape = [&](const std::string& name, size_t rank) {
    for (const SafetensorsEntry& e : file.entries())
      if (e.name == name && e.shape.size() == rank) return e.shape;
    fail(ErrorCode::bad_data, path, ": found no tensor \"", name, "\" of ", rank, " dimensions");
  };
  GptOssConfig c;
  const auto embed = shape("embed", 2), down = shape("L0.down_blocks", 4);
  c.vocab = embed[0], c.hidden = embed[1];
  for (const SafetensorsEntry& e : file.entries()) c.layers += e.name.ends_with(".sinks");
  c.heads = shape("L0.sinks", 1)[0];
  c.head_dim = shape("L0.w_q", 2)[0] / c.heads;
  in_range<int64_t>(path, "head_dim", c.head_dim, 2, 4096);
  c.kv_heads = shape("L0.w_k", 2)[0] / c.head_dim;
  c.experts = down[0];
  in_range<int64_t>(path, "blocks of a row", down[2], 1, 1 << 15);
  c.intermediate = down[2] * 32;
  c.experts_per_token = std::min<int64_t>(4, c.experts);
  c.rope_scaling = kDefaultScaling;
  c.end_tokens = {200002, 199999, 200012};
  in_range<int64_t>(path, "layers", c.layers, 1, 4096);
  for (int64_t l = 0; l < c.layers; ++l) c.sliding.push_back(l % 2 == 0);
  check(c, path);
  return c;
}

}  // namespace

GptOssConfig read_gpt_oss_config(const std::string& given) {
  const std::string directory = checkpoint_source(given);
  if (GgufFile::is_one(directory)) return detail::gpt_oss_config_from_gguf(directory);
  if (ArchiveFile::is_one(directory)) return config_of_archive(directory);
  if (IrisFile::is_one(directory)) return config_of_iris(directory);
  const std::string path = join_path(directory, "config.json");
  GptOssConfig c = gpt_oss_config_from_json(read_file(path, 16 << 20), path);
  const std::string generation = join_path(directory, "generation_config.json");
  if (exists(generation)) {
    const Json json = read_json_file(generation, {.bytes = 16 << 20});
    if (json.is_object() && json.contains("eos_token_id") && !is_null(json, "eos_token_id"))
      c.end_tokens = read_ids(json.at("eos_token_id"), generation);
  }
  return c;
}

bool is_gpt_oss(const std::string& given) {
  const std::string directory = snapshot_of(given);
  if (ArchiveFile::is_one(directory) || IrisFile::is_one(directory) || GgufFile::is_one(directory)) return true;
  const std::string path = join_path(directory, "config.json");
  if (!is_directory(directory)) return false;
  if (!exists(path)) return checkpoint_source(directory) != directory;
  const Json json = read_json_file(path, {.bytes = 16 << 20});
  if (!json.is_object()) return false;
  if (json.contains("model_type")) return json.at("model_type") == "gpt_oss";
  return json.contains("num_experts") && json.contains("rope_scaling_factor");
}

std::string to_json(const GptOssConfig& c) {
  OrderedJson out = {{"model_type", "gpt_oss"}};
  GptOssConfig sizes = c;
  visit_sizes([&](const char* key, int64_t& value) { out[key] = value; }, sizes, false);
  out["num_experts_per_tok"] = c.experts_per_token;
  out["head_dim"] = c.head_dim;
  out["sliding_window"] = c.window;
  std::vector<std::string> types;
  for (const bool s : c.sliding) types.push_back(s ? "sliding_attention" : "full_attention");
  out["layer_types"] = types;
  out["max_position_embeddings"] = c.context;
  out["rms_norm_eps"] = c.norm_eps;
  OrderedJson rope = {{"rope_type", c.rope_scaling.kind == RopeScaling::yarn ? "yarn" : "default"},
                      {"rope_theta", c.rope_base}};
  if (c.rope_scaling.kind == RopeScaling::yarn) {
    rope["factor"] = c.rope_scaling.factor;
    rope["original_max_position_embeddings"] = c.rope_scaling.original_context;
    rope["beta_fast"] = c.rope_scaling.beta_fast;
    rope["beta_slow"] = c.rope_scaling.beta_slow;
    rope["truncate"] = c.rope_scaling.truncate;
    if (c.rope_scaling.attention_factor > 0) rope["attention_factor"] = c.rope_scaling.attention_factor;
  }
  out["rope_parameters"] = rope;
  out["swiglu_limit"] = c.swiglu_limit;
  out["swiglu_alpha"] = c.swiglu_alpha;
  out["attention_bias"] = c.attention_bias;
  out["tie_word_embeddings"] = c.tied_embeddings;
  out["eos_token_id"] = c.end_tokens;
  return write_json(out, 2);
}

}  // namespace ingot
