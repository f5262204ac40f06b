// The vocabulary inside a GGUF file: tokens in tokenizer.json's spelling of bytes, their types, and merges "a b".
#include <unordered_map>

#include "ingot/core/check.h"
#include "ingot/io/formats/gguf.h"
#include "ingot/io/utf8.h"
#include "ingot/text/byte_alphabet.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/utf8.h"

namespace ingot {
namespace {

// llama.cpp's types of tokens. Unknown and unused tokens stand for no text, like control tokens.
enum TokenType : int64_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5 };

class Reader {
 public:
  explicit Reader(const GgufFile& file) : file_(file) {
    for (int b = 0; b < 256; ++b) bytes_.emplace(detail::kByteToChar[b], char(b));
  }
  ByteBpeRules read() {
    const std::string model = file_.text("tokenizer.ggml.model").value_or("");
    if (model != "gpt2")
      refuse("tokenizer.ggml.model: found \"", model.substr(0, 40), "\", expected \"gpt2\", a byte-level BPE");
    rules_.pattern = pattern();
    // The format has no field for these two properties, which the original tokenizers have.
    rules_.ignore_merges = rules_.pattern == WordPattern::o200k || rules_.pattern == WordPattern::cl100k ||
                           rules_.pattern == WordPattern::tekken;
    rules_.nfc = rules_.pattern == WordPattern::qwen2;
    read_tokens();
    read_merges();
    return std::move(rules_);
  }

 private:
  template <class... Note> [[noreturn]] void refuse(const Note&... note) const {
    fail(ErrorCode::bad_data, file_.path(), ": ", note...);
  }
  WordPattern pattern() const {
    const std::string name = file_.text("tokenizer.ggml.pre").value_or("");
    if (name == "gpt-4o") return WordPattern::o200k;
    if (name == "gpt-2") return WordPattern::gpt2;
    if (name == "qwen2") return WordPattern::qwen2;
    if (name == "llama-bpe") return WordPattern::cl100k;
    if (name == "tekken") return WordPattern::tekken;
    if (name == "smollm") return WordPattern::smollm;
    refuse("tokenizer.ggml.pre: found \"", name.substr(0, 40),
           "\", expected gpt-4o, gpt-2, qwen2, llama-bpe, tekken or smollm");
  }
  std::string bytes_of(std::string_view spelling) const {
    std::string out;
    if (find_invalid_utf8(spelling) >= 0) refuse("found a token that is not UTF-8");
    for (size_t i = 0; i < spelling.size();) {
      const Utf8Char c = utf8_decode(spelling.data() + i);
      const auto byte = bytes_.find(c.code);
      if (byte == bytes_.end())
        refuse("found token \"", spelling.substr(0, 80), "\", expected only the 256 characters that spell bytes");
      out += byte->second;
      i += size_t(c.length);
    }
    return out;
  }
  void read_tokens() {
    const auto* tokens = file_.texts("tokenizer.ggml.tokens");
    const auto* types = file_.integers("tokenizer.ggml.token_type");
    if (tokens == nullptr || types == nullptr)
      refuse("found no tokenizer.ggml.", tokens == nullptr ? "tokens" : "token_type", ", expected the vocabulary");
    if (tokens->size() != types->size())
      refuse("tokenizer.ggml.token_type: found ", types->size(), " types, expected ", tokens->size(),
             ", one per token");
    rules_.tokens.resize(tokens->size());
    for (size_t id = 0; id < tokens->size(); ++id) {
      const std::string& text = (*tokens)[id];
      switch ((*types)[id]) {
        case kNormal: rules_.tokens[id] = bytes_of(text); break;
        case kUnknown:
        case kControl:
        case kUnused:
          if (find_invalid_utf8(text) >= 0) refuse("token ", id, ": found a name that is not UTF-8");
          rules_.specials.push_back({int32_t(id), text});
          break;
        case kUserDefined:  // stored as its text, not in the spelling of bytes
          if (find_invalid_utf8(text) >= 0) refuse("token ", id, ": found a text that is not UTF-8");
          rules_.tokens[id] = text;
          rules_.added.push_back({int32_t(id)});
          break;
        default: refuse("token ", id, ": found type ", (*types)[id], ", expected 1 to 5");
      }
    }
  }
  void read_merges() {
    std::unordered_map<std::string_view, int32_t> ids;
    for (size_t i = 0; i < rules_.tokens.size(); ++i)
      if (!rules_.tokens[i].empty()) ids.emplace(rules_.tokens[i], int32_t(i));
    const auto* merges = file_.texts("tokenizer.ggml.merges");
    if (merges == nullptr) refuse("found no tokenizer.ggml.merges, expected the merges of a byte-level BPE");
    const auto id = [&](std::string_view spelling, size_t rank) {
      const auto at = ids.find(bytes_of(spelling));
      if (at == ids.end()) refuse("merge ", rank, ": found the unknown token \"", spelling.substr(0, 80), "\"");
      return at->second;
    };
    for (size_t rank = 0; rank < merges->size(); ++rank) {
      const std::string_view both = (*merges)[rank];
      const size_t space = both.find(' ');
      if (space == both.npos || space == 0 || space + 1 == both.size())
        refuse("merge ", rank, ": found \"", both.substr(0, 80), "\", expected two tokens, \"a b\"");
      rules_.merges.emplace_back(id(both.substr(0, space), rank), id(both.substr(space + 1), rank));
    }
  }

  const GgufFile& file_;
  std::unordered_map<char32_t, char> bytes_;
  ByteBpeRules rules_;
};

}  // namespace

ByteBpe ByteBpe::from_gguf(const GgufFile& file) { return ByteBpe(Reader(file).read(), file.path()); }

}  // namespace ingot
