#include "ingot/models/families/family.h"

#include "ingot/io/file.h"
#include "ingot/io/formats/archive.h"
#include "ingot/io/hugging_face_cache.h"
#include "ingot/models/checkpoint/stored_tensors.h"
#include "ingot/models/families/text.h"
#include "ingot/models/families/weights.h"

namespace ingot {
namespace {

constexpr int64_t kMaxConfig = 16 << 20;

std::string model_type_of(const std::string& directory) {
  const std::string path = join_path(directory, "config.json");
  if (!is_directory(directory) || !exists(path)) return "";
  const Json json = read_json_file(path, {.bytes = kMaxConfig});
  const auto type = json.is_object() ? json.find("model_type") : json.end();
  return json.is_object() && type != json.end() && type->is_string() ? type->get<std::string>() : "";
}

// Refuses weights stored in a form other than rows of numbers.
void refuse_quantization(ConfigReader& c) {
  for (const char* key : {"quantization_config", "compression_config"})
    if (const Json* q = c.find(key); q != nullptr && !q->empty())
      c.wrong(key, q->contains("quant_method") ? q->at("quant_method") : *q,
              "weights in bf16, f16 or f32, or a GGUF file");
}

constexpr const char* kArchiveKind = "decoder";
bool is_family_archive(const std::string& path) {
  try {
    return ArchiveFile(path).kind() == kArchiveKind;
  } catch (const Error&) { return false; }
}

DecoderSpec spec_of_config(ConfigReader& c, const Family& family) {
  constexpr int64_t kMost = 1 << 20;
  DecoderSpec s{.vocab = c.required_integer("vocab_size", 1, 1 << 24),
                .hidden = c.required_integer("hidden_size", 1, kMost),
                .layers = c.required_integer("num_hidden_layers", 1, 4096),
                .heads = c.required_integer("num_attention_heads", 1, 4096)};
  s.kv_heads = c.integer("num_key_value_heads", s.heads);
  s.head_dim = c.integer("head_dim", family.default_head_dim > 0 ? family.default_head_dim : s.hidden / s.heads);
  if (s.head_dim < 1 || s.head_dim > 4096)
    fail(ErrorCode::bad_data, c.where(), ": head_dim: found ", s.head_dim, ", expected 1 to 4096");
  s.intermediate = c.integer("intermediate_size", 0);  // a mixture of experts does not use this key
  s.context = c.required_integer("max_position_embeddings", 1, 1 << 26);
  s.norm.eps = c.number("rms_norm_eps", 1e-6);
  s.norm.rounds_before_weight = true;
  s.layer.assign(size_t(s.layers), {.experts = false});
  s.tied_embeddings = c.flag("tie_word_embeddings", family.default_tied);
  s.end_tokens = c.ids("eos_token_id");
  for (const char* key : {"hidden_act", "hidden_activation"}) c.must_be(key, family.activation);
  refuse_quantization(c);
  family.read_config(c, s);
  if (s.rope.empty()) s.rope = {c.rope(10000)};
  c.refuse_unknown();
  check(s, c.where());
  return s;
}

DecoderSpec spec_of_gguf(const std::string& path) {
  GgufReader file(path);
  const Family* family = family_of_architecture(file.architecture());
  if (family == nullptr)
    fail(ErrorCode::unsupported, path, ": general.architecture: found \"", file.architecture().substr(0, 40),
         "\", expected one of these models: ", known_families());
  DecoderSpec s = file.read_common();
  s.norm.rounds_before_weight = true;
  family->read_gguf(file, s);
  file.refuse_unknown();
  check(s, path);
  return s;
}

}  // namespace

DecoderSpec family_spec_from_json(const std::string& text, const std::string& where) {
  const Json json = parse_json(text, where);
  ConfigReader config(json, where);
  const std::string type = config.text("model_type", "");
  const Family* family = family_of_model_type(type);
  if (family == nullptr)
    fail(ErrorCode::unsupported, where, ": model_type: found \"", type.substr(0, 40), "\", expected one of ",
         known_families());
  return spec_of_config(config, *family);
}

DecoderSpec read_family_spec(const std::string& given) {
  const std::string path = checkpoint_source(given);
  if (GgufFile::is_one(path)) return spec_of_gguf(path);
  if (ArchiveFile::is_one(path)) {
    const Json about = parse_json(ArchiveFile(path).about(), path + ": about");
    if (!about.is_object() || !about.contains("model"))
      fail(ErrorCode::bad_data, path, ": found an archive that describes no model");
    return spec_from_json(write_json(about.at("model")), path + ": about.model");
  }
  const std::string config = join_path(path, "config.json"), generation = join_path(path, "generation_config.json");
  DecoderSpec s = family_spec_from_json(read_file(config, kMaxConfig), config);
  if (exists(generation)) {
    const Json json = read_json_file(generation, {.bytes = kMaxConfig});
    ConfigReader c(json, generation);
    if (const std::vector<int64_t> ends = c.ids("eos_token_id"); !ends.empty()) s.end_tokens = ends;
  }
  return s;
}

ArchivedModel archived_family(const std::string& path) {
  DecoderSpec spec = read_family_spec(path);
  if (!ArchiveFile::is_one(path)) spec.start_token = start_token_of(checkpoint_source(path));
  return {.kind = kArchiveKind, .description = to_json(spec), .spec = spec};
}

DecoderWeights family_shapes(const std::string& path, const DecoderSpec& spec) {
  if (ArchiveFile::is_one(path)) return map_model_archive(path, archived_family(path), spec.layers);
  return lay_out_family(detail::Checkpoint(path), spec, spec.layers, nullptr).weights;
}
int64_t family_weight_bytes(const std::string& path, const DecoderSpec& spec) {
  if (ArchiveFile::is_one(path)) return family_shapes(path, spec).mapped_bytes;
  return lay_out_family(detail::Checkpoint(path), spec, spec.layers, nullptr).bytes;
}

int64_t convert_family(const std::string& from, const std::string& to, const ConvertOptions& options) {
  const ArchivedModel model = archived_family(from);
  const auto lay_out = [&](const detail::Checkpoint& checkpoint, Arena* arena) {
    return lay_out_family(checkpoint, model.spec, model.spec.layers, arena);
  };
  std::vector<AttachedFile> files;
  if (!ArchiveFile::is_one(from)) {
    files = tokenizer_files(from);
    if (const std::string text = chat_template_of(checkpoint_source(from)); !text.empty())
      files.push_back({"chat_template.jinja", text});
  }
  return write_model_archive(from, to, model, lay_out, files, options);
}

bool is_family(const std::string& given) {
  const std::string path = checkpoint_source(given);
  if (ArchiveFile::is_one(path)) return is_family_archive(path);
  if (GgufFile::is_one(path)) {
    const std::string architecture = GgufFile::architecture_of(path);
    return !architecture.empty() && architecture != "gpt-oss";
  }
  const std::string type = model_type_of(path);
  return !type.empty() && type != "gpt_oss";
}

}  // namespace ingot
