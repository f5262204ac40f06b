#include "ingot/models/families/text.h"

#include "ingot/io/file.h"
#include "ingot/io/formats/archive.h"
#include "ingot/io/formats/gguf.h"
#include "ingot/io/json.h"
#include "ingot/models/checkpoint/archive.h"
#include "ingot/text/sentencepiece.h"
#include "ingot/text/tokenizer.h"

namespace ingot {
namespace {

constexpr int64_t kMaxText = 256 << 20;

// The file's content, or null for a missing file.
Json optional_json(const std::string& directory, const char* name) {
  const std::string path = join_path(directory, name);
  return is_directory(directory) && exists(path) ? read_json_file(path, {.bytes = kMaxText}) : Json();
}
const Json* member(const Json& json, const char* key) {
  if (!json.is_object()) return nullptr;
  const auto at = json.find(key);
  return at == json.end() ? nullptr : &*at;
}

// The first special token put by a post-processor in front of a text, by its name; empty where none.
std::string leading_token(const Json& processor) {
  if (const Json* steps = member(processor, "processors"); steps != nullptr && steps->is_array())
    for (const Json& step : *steps)
      if (const std::string found = leading_token(step); !found.empty()) return found;
  const Json* single = member(processor, "single");
  if (single == nullptr || !single->is_array() || single->empty()) return "";
  const Json* special = member((*single)[0], "SpecialToken");
  const Json* id = special == nullptr ? nullptr : member(*special, "id");
  return id != nullptr && id->is_string() ? id->get<std::string>() : "";
}

int32_t start_token_of_gguf(const GgufFile& file) {
  const auto id = file.integer("tokenizer.ggml.bos_token_id");
  const auto at = file.metadata().find("tokenizer.ggml.add_bos_token");
  const bool* adds = at == file.metadata().end() ? nullptr : std::get_if<bool>(&at->second);
  // Older files lack this key; the vocabularies of Llama 3, of tekken and of SentencePiece have a start token.
  const auto pre = file.text("tokenizer.ggml.pre");
  const bool by_default = pre == "llama-bpe" || pre == "tekken" || file.text("tokenizer.ggml.model") == "llama";
  return id && (adds == nullptr ? by_default : *adds) ? int32_t(*id) : -1;
}

// The tokenizers of transformers put the start token of a .model in front, unless tokenizer_config.json says otherwise.
int32_t start_token_of_sentencepiece(const std::string& file) {
  const Json config = optional_json(parent_path(file), "tokenizer_config.json");
  const Json* adds = member(config, "add_bos_token");
  if (adds != nullptr && *adds == Json(false)) return -1;
  return SentencePiece::load(file).bos();
}

}  // namespace

std::string chat_template_of(const std::string& path) {
  if (ArchiveFile::is_one(path)) return archived_file(path, "chat_template.jinja").value_or("");
  if (GgufFile::is_one(path)) return GgufFile(path).text("tokenizer.chat_template").value_or("");
  if (const std::string file = join_path(path, "chat_template.jinja"); is_directory(path) && exists(file))
    return read_file(file, 1 << 20);
  const Json config = optional_json(path, "tokenizer_config.json");
  const Json* text = member(config, "chat_template");
  if (text != nullptr && text->is_string()) return text->get<std::string>();
  if (text == nullptr || !text->is_array()) return "";
  for (const Json& named : *text) {
    const Json *name = member(named, "name"), *content = member(named, "template");
    if (name != nullptr && *name == "default" && content != nullptr && content->is_string())
      return content->get<std::string>();
  }
  return "";
}

int32_t start_token_of(const std::string& path) {
  if (GgufFile::is_one(path)) return start_token_of_gguf(GgufFile(path));
  const std::string file = is_directory(path) ? tokenizer_in(path) : path;
  if (file.ends_with(".model")) return start_token_of_sentencepiece(file);
  const Json tokenizer = file.ends_with(".json") ? read_json_file(file, {.bytes = kMaxText}) : Json();
  const Json *processor = member(tokenizer, "post_processor"), *added = member(tokenizer, "added_tokens");
  const std::string name = processor == nullptr ? "" : leading_token(*processor);
  if (name.empty() || added == nullptr || !added->is_array()) return -1;
  for (const Json& token : *added)
    if (const Json* content = member(token, "content"), *id = member(token, "id");
        content != nullptr && *content == name && id != nullptr && id->is_number_integer())
      return id->get<int32_t>();
  return -1;
}

}  // namespace ingot
