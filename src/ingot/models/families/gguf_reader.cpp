#include "ingot/models/families/gguf_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "ingot/core/check.h"

namespace ingot {
namespace {

// Keys about training, the converter and uses of a model other than continuing a text.
constexpr std::array kGgufKeysWithoutEffect = {"pooling_type", "rope.scaling.finetuned", "tensor_data_layout",
                                               "vocab_size"};

bool gguf_says_nothing(const GgufValue& value) {
  return std::visit(
      [](const auto& v) {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(v)>>)
          return v == 0;
        else
          return v.empty();
      },
      value);
}
std::string gguf_value_text(const GgufValue& value) {
  if (const auto* b = std::get_if<bool>(&value)) return *b ? "true" : "false";
  if (const auto* i = std::get_if<int64_t>(&value)) return detail::concat("number ", *i);
  if (const auto* d = std::get_if<double>(&value)) return detail::concat("number ", *d);
  if (const auto* s = std::get_if<std::string>(&value)) return "\"" + s->substr(0, 40) + "\"";
  return "a list";
}

}  // namespace

GgufReader::GgufReader(const std::string& path)
    : set_(path), file_(set_.first()), architecture_(file_.text("general.architecture").value_or("")) {}

int64_t GgufReader::integer(const char* name) const {
  const auto n = file_.integer(key(name));
  if (!n) fail(ErrorCode::bad_data, file_.path(), ": found no ", key(name), ", expected an integer");
  return *n;
}
double GgufReader::number(const char* name) const {
  const auto n = file_.number(key(name));
  if (!n) fail(ErrorCode::bad_data, file_.path(), ": found no ", key(name), ", expected a number");
  return *n;
}
void GgufReader::must_be(const char* name, double expected) const {
  if (const auto n = file_.number(key(name)); n && *n != expected)
    fail(ErrorCode::unsupported, file_.path(), ": ", key(name), ": found ", *n, ", expected ", expected);
}
const SafetensorsEntry* GgufReader::tensor(const std::string& name) const {
  for (const auto& file : set_.files())
    for (const SafetensorsEntry& e : file->entries())
      if (e.name == name) return &e;
  return nullptr;
}

void GgufReader::refuse_unknown() const {
  const std::string prefix = architecture_ + ".";
  for (const auto& [name, value] : file_.metadata()) {
    if (!name.starts_with(prefix) || used_.count(name) != 0 || gguf_says_nothing(value)) continue;
    if (std::find(kGgufKeysWithoutEffect.begin(), kGgufKeysWithoutEffect.end(), name.substr(prefix.size())) !=
        kGgufKeysWithoutEffect.end())
      continue;
    fail(ErrorCode::unsupported, file_.path(), ": ", name.substr(0, 80), ": found ", gguf_value_text(value),
         ", a property of models that Ingot does not know; expected none");
  }
}

// Files state a scaling by its parameters. Only for the scaling llama3 a tensor of the file holds the divisors of the
// frequencies.
RopeTable GgufReader::read_rope(int64_t head_dim) const {
  RopeTable table{.theta = find_number("rope.freq_base").value_or(10000)};
  must_be("rope.dimension_count", double(head_dim));
  // A factor without a type means linear scaling.
  const auto factor = find_number("rope.scaling.factor");
  const std::string type = file_.text(key("rope.scaling.type")).value_or(factor && *factor != 0 ? "linear" : "none");
  const auto original_context = find_number("rope.scaling.original_context_length");
  for (const char* name : {"rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"})
    must_be(name, 1);
  RopeScaling& s = table.scaling;
  if (type == "linear") {
    s = {.kind = RopeScaling::linear, .factor = number("rope.scaling.factor")};
  } else if (type == "yarn") {
    s = {.kind = RopeScaling::yarn,
         .factor = number("rope.scaling.factor"),
         .original_context = original_context.value_or(double(integer("context_length"))),
         .beta_fast = find_number("rope.scaling.yarn_beta_fast").value_or(32),
         .beta_slow = find_number("rope.scaling.yarn_beta_slow").value_or(1)};
    must_be("rope.scaling.yarn_ext_factor", 1);
  } else if (type != "none") {
    fail(ErrorCode::unsupported, file_.path(), ": ", key("rope.scaling.type"), ": found \"", type.substr(0, 40),
         "\", expected none, linear or yarn");
  }
  const SafetensorsEntry* divisors = tensor("rope_freqs.weight");
  if (divisors == nullptr) return table;
  if (divisors->dtype != "F32" || divisors->shape != std::vector<int64_t>{head_dim / 2} || type != "none")
    fail(ErrorCode::unsupported, file_.path(), ": rope_freqs.weight: found ", divisors->dtype, " of shape ",
         shape_text(divisors->shape), " and rope.scaling.type ", type, ", expected F32 of shape [", head_dim / 2,
         "] and no other scaling");
  std::vector<float> numbers(size_t(head_dim / 2));
  for (const auto& file : set_.files())
    for (const SafetensorsEntry& e : file->entries())
      if (&e == divisors) file->file().read_at(e.begin, numbers.data(), e.bytes());
  for (const float d : numbers) {
    if (!(d >= 1 && d <= 1e6))
      fail(ErrorCode::bad_data, file_.path(), ": rope_freqs.weight: found ", d, ", expected divisors from 1 to 1e6");
    table.divisors.push_back(double(d));
  }
  return table;
}

// The stop ids of an answer: the ids named in the file, and the control tokens that end a turn in any of these
// families.
void GgufReader::read_tokens(DecoderSpec& spec) const {
  const auto add = [&](int64_t id) {
    if (id < 0 || id >= spec.vocab)
      fail(ErrorCode::bad_data, file_.path(), ": found end token ", id, ", expected 0 to ", spec.vocab - 1);
    if (std::find(spec.end_tokens.begin(), spec.end_tokens.end(), id) == spec.end_tokens.end())
      spec.end_tokens.push_back(id);
  };
  for (const char* name : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"})
    if (const auto id = file_.integer(name)) add(*id);
  constexpr int64_t kControl = 3;
  const auto* tokens = file_.texts("tokenizer.ggml.tokens");
  const auto* types = file_.integers("tokenizer.ggml.token_type");
  if (tokens == nullptr || types == nullptr || tokens->size() != types->size()) return;
  for (size_t id = 0; id < tokens->size(); ++id) {
    if ((*types)[id] != kControl) continue;
    for (const char* end :
         {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>"})
      if ((*tokens)[id] == end) add(int64_t(id));
  }
}

DecoderSpec GgufReader::read_common() const {
  const SafetensorsEntry* embed = tensor("token_embd.weight");
  if (embed == nullptr || embed->shape.size() != 2)
    fail(ErrorCode::bad_data, file_.path(), ": found no tensor \"token_embd.weight\" of 2 dimensions");
  const auto in_range = [&](const char* name, int64_t n, int64_t high) {
    if (n < 1 || n > high)
      fail(ErrorCode::bad_data, file_.path(), ": ", key(name), ": found ", n, ", expected 1 to ", high);
    return n;
  };
  DecoderSpec s{.vocab = embed->shape[0], .hidden = integer("embedding_length")};
  s.layers = in_range("block_count", integer("block_count"), 4096);
  s.heads = in_range("attention.head_count", integer("attention.head_count"), 4096);
  s.kv_heads = in_range("attention.head_count_kv", find_integer("attention.head_count_kv").value_or(s.heads), s.heads);
  s.head_dim =
      in_range("attention.key_length", find_integer("attention.key_length").value_or(s.hidden / s.heads), 4096);
  must_be("attention.value_length", double(s.head_dim));
  if (const auto at = file_.metadata().find(key("attention.causal"));
      at != file_.metadata().end() && at->second == GgufValue(false))
    fail(ErrorCode::unsupported, file_.path(), ": ", at->first, ": found false, expected true");
  s.intermediate = integer("feed_forward_length");
  s.context = integer("context_length");
  s.norm.eps = number("attention.layer_norm_rms_epsilon");
  s.layer.assign(size_t(s.layers), {.experts = false});
  s.rope = {read_rope(s.head_dim)};
  s.qkv_bias = tensor("blk.0.attn_q.bias") != nullptr;
  s.output_bias = tensor("blk.0.attn_output.bias") != nullptr;
  s.mlp_bias = tensor("blk.0.ffn_gate.bias") != nullptr;
  s.qk_norm = tensor("blk.0.attn_q_norm.weight") != nullptr;
  s.tied_embeddings = tensor("output.weight") == nullptr;
  read_tokens(s);
  return s;
}

}  // namespace ingot
