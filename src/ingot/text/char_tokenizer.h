#pragma once
// One token per character (Unicode code point), with ids in the order of code points. There is no bos. encode() refuses
// a character that is not in the vocabulary.
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ingot/text/tokenizer.h"

namespace ingot {

class CharTokenizer final : public Tokenizer {
 public:
  // Makes a vocabulary of the distinct characters of `text`, which must be UTF-8.
  static CharTokenizer from_text(std::string_view text);
  static CharTokenizer parse(std::string_view json, const std::string& origin);
  // `characters` must be ascending and distinct; `origin` names their source in errors.
  CharTokenizer(std::vector<char32_t> characters, const std::string& origin);
  // Writes {"format": "ingot-char", "version": 1, "characters": "..."}.
  void save(const std::string& path) const;
  std::string to_json() const;

  std::vector<int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  int64_t bytes(int32_t previous, int32_t id) const override;
  int32_t bos() const override { return -1; }
  int vocab_size() const override { return int(characters_.size()); }
  uint32_t hash() const override;
  std::string token_bytes(int32_t id) const override;
  std::string kind() const override { return "char"; }

 private:
  std::vector<char32_t> characters_;
  std::unordered_map<char32_t, int32_t> ids_;
};

}  // namespace ingot
