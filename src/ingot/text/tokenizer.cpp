#include "ingot/text/tokenizer.h"

#include <algorithm>

#include "ingot/core/check.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/io/file.h"
#include "ingot/io/formats/gguf.h"
#include "ingot/io/json.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/char_tokenizer.h"
#include "ingot/text/sentencepiece.h"

namespace ingot {

int32_t Tokenizer::token_id(std::string_view text) const {
  for (const SpecialToken& s : specials())
    if (s.text == text) return s.id;
  return -1;
}

namespace {
constexpr std::string_view kPiecesTag = "\n";  // the first byte of a SentencePiece model: the tag of its pieces
}  // namespace

std::string tokenizer_in(const std::string& directory) {
  const std::string json = join_path(directory, "tokenizer.json");
  if (exists(json)) return json;
  std::vector<std::string> ranks;
  for (const std::string& name : list_directory(directory))
    if (name.ends_with(".tiktoken")) ranks.push_back(join_path(directory, name));
  if (ranks.size() > 1)
    fail(ErrorCode::bad_data, directory, ": found ", ranks.size(), " .tiktoken files, expected one or tokenizer.json");
  if (!ranks.empty()) return ranks[0];
  // Llama 3's file of this name has tiktoken's ranks, without the pattern that divides words.
  const std::string model = join_path(directory, "tokenizer.model");
  return begins_with(model, kPiecesTag) ? model : "";
}

namespace {

std::string any_tokenizer_in(const std::string& directory) {
  const std::string path = tokenizer_in(directory), gguf = path.empty() ? gguf_in(directory) : "";
  if (path.empty() && gguf.empty())
    fail(ErrorCode::not_found, directory,
         ": found no tokenizer in this directory, expected a tokenizer.json, a tokenizer.model of SentencePiece, a "
         ".tiktoken or a GGUF file");
  return path.empty() ? gguf : path;
}

// Whether the content begins with a line such as "IQ== 0": base64, a space, a number.
bool is_tiktoken(std::string_view content) {
  const std::string_view line = content.substr(0, std::min(content.find('\n'), size_t(1024)));
  const size_t space = line.find(' ');
  if (space == line.npos || space == 0 || space % 4 != 0 || space + 1 == line.size()) return false;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    const bool digit = c >= '0' && c <= '9', letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool fits = i < space ? digit || letter || c == '+' || c == '/' || c == '='
                                : i == space || digit || (c == '\r' && i + 1 == line.size());
    if (!fits) return false;
  }
  return true;
}

// Whether the content is text. A SentencePiece model has control codes near its beginning: the tags and lengths of its
// fields.
bool is_text(std::string_view content) {
  const std::string_view head = content.substr(0, 256);
  return std::all_of(head.begin(), head.end(),
                     [](unsigned char c) { return (c >= ' ' && c != 127) || c == '\n' || c == '\r' || c == '\t'; });
}

// Whether the content has "byte_fallback": true anywhere.
bool names_byte_fallback(std::string_view content) {
  constexpr std::string_view kKey = "\"byte_fallback\"";
  const size_t at = content.find(kKey);
  if (at == content.npos) return false;
  const size_t value = content.find_first_not_of(" \t\r\n:", at + kKey.size());
  return value != content.npos && content.substr(value).starts_with("true");
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
  if (is_directory(path)) return load_tokenizer(any_tokenizer_in(path));
  if (GgufFile::is_one(path)) {
    const GgufFile file(path);
    if (SentencePiece::is_in(file)) return std::make_unique<SentencePiece>(SentencePiece::from_gguf(file));
    return std::make_unique<ByteBpe>(ByteBpe::from_gguf(file));
  }
  const std::string content = read_file(path, int64_t(256) << 20);
  const size_t first = content.find_first_not_of(" \t\r\n");
  if (first == content.npos)
    fail(ErrorCode::bad_data, path,
         ": found an empty file, expected a tokenizer (tokenizer.json, SentencePiece .model, .tiktoken or characters)");
  if (path.ends_with(".tiktoken") || is_tiktoken(content))
    return std::make_unique<ByteBpe>(ByteBpe::parse_tiktoken(content, path));
  const bool text = is_text(content), sentencepiece = content.starts_with(kPiecesTag) || path.ends_with(".model");
  if (content[first] != '{' && (text || !sentencepiece))
    fail(ErrorCode::bad_data, path, ": found ", text ? "text" : "a file of another format",
         ", expected a tokenizer (tokenizer.json, SentencePiece .model, .tiktoken or characters)");
  if (content[first] != '{') return std::make_unique<SentencePiece>(SentencePiece::parse(content, path));
  // Ingot's own character vocabulary begins with its format name, a key that no tokenizer.json has.
  if (content.substr(0, 256).find("\"ingot-char\"") != content.npos)
    return std::make_unique<CharTokenizer>(CharTokenizer::parse(content, path));
  return parse_tokenizer_json(content, path);
}

std::unique_ptr<Tokenizer> parse_tokenizer_json(const std::string& content, const std::string& origin) {
  if (names_byte_fallback(content)) {  // parsing takes most of the time, so other files are parsed only once
    const Json json = parse_json(content, origin, {.depth = 16});
    if (SentencePiece::is_in(json)) return std::make_unique<SentencePiece>(SentencePiece::parse_json(json, origin));
  }
  return std::make_unique<ByteBpe>(ByteBpe::parse(content, origin));
}

std::vector<std::vector<int32_t>> encode_documents(const Tokenizer& tokenizer,
                                                   std::span<const std::string_view> documents) {
  std::vector<std::vector<int32_t>> out(documents.size());
  parallel_tasks(int64_t(documents.size()),
                 [&](int64_t i) { out[size_t(i)] = tokenizer.encode(documents[size_t(i)]); });
  return out;
}

}  // namespace ingot
