#include "ingot/text/char_tokenizer.h"

#include <algorithm>

#include "ingot/core/check.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/text/stable_hash.h"
#include "ingot/text/utf8.h"

namespace ingot {
namespace {

std::vector<char32_t> characters_of(std::string_view text) {
  std::vector<char32_t> out;
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = utf8_decode(text.data() + i);
    out.push_back(c.code);
    i += size_t(c.length);
  }
  return out;
}

int utf8_length(char32_t c) { return c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4; }

}  // namespace

CharTokenizer CharTokenizer::from_text(std::string_view text) {
  require_utf8(text, "text to take characters from");
  std::vector<uint8_t> seen(0x110000);
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = utf8_decode(text.data() + i);
    seen[c.code] = 1;
    i += size_t(c.length);
  }
  std::vector<char32_t> characters;
  for (char32_t c = 0; c < 0x110000; ++c)
    if (seen[c]) characters.push_back(c);
  return CharTokenizer(std::move(characters), "text to take characters from");
}

CharTokenizer CharTokenizer::parse(std::string_view json, const std::string& origin) {
  const Json parsed = parse_json(json, origin, {.depth = 4, .bytes = int64_t(16) << 20});
  Fields fields(parsed, origin);
  std::string format, characters;
  int32_t version = 0;
  fields.require("format", format);
  fields.require("version", version);
  fields.require("characters", characters);
  fields.finish();
  if (format != "ingot-char") fields.wrong("format", "\"ingot-char\"");
  if (version != 1) fields.wrong("version", "1");
  return CharTokenizer(characters_of(characters), origin);
}

CharTokenizer::CharTokenizer(std::vector<char32_t> characters, const std::string& origin)
    : characters_(std::move(characters)) {
  if (characters_.empty()) fail(ErrorCode::bad_data, origin, ": found no characters, expected at least one");
  for (size_t i = 0; i < characters_.size(); ++i) {
    if (i > 0 && characters_[i] <= characters_[i - 1])
      fail(ErrorCode::bad_data, origin, ": character ", i, ": found code point ", uint32_t(characters_[i]), " after ",
           uint32_t(characters_[i - 1]), ", expected ascending distinct ones");
    ids_.emplace(characters_[i], int32_t(i));
  }
}

std::string CharTokenizer::to_json() const {
  std::string all;
  for (char32_t c : characters_) utf8_append(all, c);
  const OrderedJson json = {{"format", "ingot-char"}, {"version", 1}, {"characters", all}};
  return write_json(json, 2) + "\n";
}

void CharTokenizer::save(const std::string& path) const { write_file(path, to_json()); }

std::vector<int32_t> CharTokenizer::encode(std::string_view text) const {
  require_utf8(text, "text to encode");
  std::vector<int32_t> out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = utf8_decode(text.data() + i);
    const auto id = ids_.find(c.code);
    if (id == ids_.end())
      fail(ErrorCode::bad_data, "text to encode: byte ", i, ": found the character \"",
           text.substr(i, size_t(c.length)), "\" (code point ", uint32_t(c.code), "), expected one of the ",
           characters_.size(), " characters of this vocabulary");
    out.push_back(id->second);
    i += size_t(c.length);
  }
  return out;
}

std::string CharTokenizer::decode(std::span<const int32_t> ids) const {
  std::string out;
  for (int32_t id : ids) {
    INGOT_CHECK(id >= 0 && id < vocab_size(), "decode: found id ", id, ", expected 0 to ", vocab_size() - 1);
    utf8_append(out, characters_[size_t(id)]);
  }
  return out;
}

int64_t CharTokenizer::bytes(int32_t, int32_t id) const {
  INGOT_CHECK(id >= 0 && id < vocab_size(), "bytes: found id ", id, ", expected 0 to ", vocab_size() - 1);
  return utf8_length(characters_[size_t(id)]);
}

std::string CharTokenizer::token_bytes(int32_t id) const { return decode({&id, 1}); }

uint32_t CharTokenizer::hash() const {
  detail::StableHash h;
  h.bytes("char");
  for (char32_t c : characters_) h.number(c);
  return h.value();
}

}  // namespace ingot
