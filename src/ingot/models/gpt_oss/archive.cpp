#include "ingot/models/gpt_oss/archive.h"

#include "ingot/io/formats/archive.h"
#include "ingot/models/gpt_oss/checkpoint.h"
#include "ingot/models/gpt_oss/spec.h"

namespace ingot {

ArchivedModel archived_gpt_oss(const GptOssConfig& config) {
  return {.kind = "gpt_oss", .description = to_json(config), .spec = spec_of(config)};
}

int64_t convert_gpt_oss(const std::string& from, const std::string& to, const ConvertOptions& options) {
  const GptOssConfig config = read_gpt_oss_config(from);
  const auto lay_out = [&](const detail::Checkpoint& checkpoint, Arena* arena) {
    return detail::lay_out(checkpoint, config, config.layers, arena);
  };
  return write_model_archive(from, to, archived_gpt_oss(config), lay_out, tokenizer_files(from), options);
}

GptOssConfig synthetic_gpt_oss(const std::string& name) {
  GptOssConfig c;
  c.rope_scaling = {.kind = RopeScaling::yarn, .factor = 32, .original_context = 4096, .truncate = false};
  if (name == "20b" || name == "120b") {
    c.vocab = 201088, c.hidden = 2880, c.heads = 64, c.kv_heads = 8, c.head_dim = 64, c.intermediate = 2880;
    c.experts_per_token = 4;
    c.layers = name == "20b" ? 24 : 36;
    c.experts = name == "20b" ? 32 : 128;
    c.end_tokens = {200002, 199999, 200012};
  } else if (name == "small") {  // for tests: small sizes with every kind of layer
    c.vocab = 1000, c.hidden = 192, c.heads = 8, c.kv_heads = 2, c.head_dim = 32, c.intermediate = 128;
    c.layers = 4, c.experts = 8, c.experts_per_token = 4;
  } else {
    fail(ErrorCode::usage, "synthetic: found '", name, "', expected 20b, 120b or small");
  }
  for (int64_t l = 0; l < c.layers; ++l) c.sliding.push_back(l % 2 == 0);
  check(c, "synthetic " + name);
  return c;
}

int64_t write_synthetic_gpt_oss(const GptOssConfig& config, const std::string& to, uint64_t seed,
                                const ConvertOptions& options) {
  return write_random_archive(archived_gpt_oss(config), to, seed, options);
}

GptOssForms gpt_oss_archive_forms(const std::string& path) {
  return archive_forms(path, archived_gpt_oss(read_gpt_oss_config(path)));
}

}  // namespace ingot
