// Reads and writes tokenizer.json: the part of Hugging Face's format that describes a byte-level BPE. A setting that
// would change ids and is not implemented is refused by its name.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "ingot/core/check.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/text/byte_alphabet.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/utf8.h"

namespace ingot {
namespace {

constexpr int64_t kMaxFileBytes = int64_t(256) << 20;

struct PatternSpelling {
  WordPattern pattern;
  const char* regex;
};
// Files are written with the first spelling of a pattern. All spellings of one pattern match the same words.
constexpr PatternSpelling kSpellings[] = {
    {WordPattern::gpt2, R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {WordPattern::gpt2, R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {WordPattern::gpt2, R"('(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s)"},
    {WordPattern::cl100k,
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {WordPattern::o200k,
     R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
     R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
     R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {WordPattern::tekken, R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
                          R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
                          R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {WordPattern::qwen2,
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
};

std::string byte_spelling(std::string_view bytes) {
  std::string out;
  for (char c : bytes) utf8_append(out, detail::kByteToChar[uint8_t(c)]);
  return out;
}

// Parses one file. Every error message begins with the file's name.
class Reader {
 public:
  Reader(const Json& json, const std::string& origin) : json_(json), origin_(origin) {
    for (int b = 0; b < 256; ++b) bytes_.emplace(detail::kByteToChar[b], char(b));
  }
  ByteBpeRules read();

 private:
  template <class... Note> [[noreturn]] void refuse(const Note&... note) const {
    fail(ErrorCode::bad_data, origin_, ": ", note...);
  }
  const Json* find(const Json& object, const char* key) const {  // null counts as absent
    const auto at = object.find(key);
    return at == object.end() || at->is_null() ? nullptr : &*at;
  }
  const Json& need(const Json& object, const char* key, const char* where, Json::value_t type) const;
  std::string type_of(const Json& object, const char* where) const;
  void want_false(const Json& object, const char* key, const char* where) const;
  WordPattern read_pattern() const;
  WordPattern read_split(const Json& split) const;
  void check_byte_level(const Json& level) const;
  void check_own_pattern(const Json& level) const;
  void read_normalizer();
  void place_added();
  void check_model(const Json& model) const;
  void read_added();
  void read_vocab(const Json& vocab);
  void read_merges(const Json& merges);
  std::string token_of(std::string_view spelling) const;
  int32_t id_of(const Json& id, std::string_view token) const;

  const Json& json_;
  const std::string& origin_;
  std::unordered_map<char32_t, char> bytes_;
  std::unordered_map<std::string, int32_t> added_;  // the special tokens
  std::vector<std::string> ordinary_;               // the texts of rules_.added
  ByteBpeRules rules_;
};

const Json& Reader::need(const Json& object, const char* key, const char* where, Json::value_t type) const {
  const Json* value = find(object, key);
  const char* expected = Json(type).type_name();
  if (!value) refuse("found no ", where, key, ", expected ", expected);
  if (value->type() != type) refuse(where, key, ": found ", describe_json(*value), ", expected ", expected);
  return *value;
}

std::string Reader::type_of(const Json& object, const char* where) const {
  if (!object.is_object()) refuse(where, ": found ", describe_json(object), ", expected object");
  const Json* type = find(object, "type");
  if (!type || !type->is_string()) refuse("found no ", where, ".type, expected string");
  return type->get<std::string>();
}

void Reader::want_false(const Json& object, const char* key, const char* where) const {
  const Json* value = find(object, key);
  if (value && *value != Json(false)) refuse(where, ".", key, ": found ", describe_json(*value), ", expected false");
}

void Reader::check_byte_level(const Json& level) const {
  const std::string type = type_of(level, "pre_tokenizer");
  if (type != "ByteLevel") refuse("pre_tokenizer: found \"", type, "\", expected \"ByteLevel\"");
  want_false(level, "add_prefix_space", "pre_tokenizer");
}

WordPattern Reader::read_split(const Json& split) const {
  const std::string type = type_of(split, "pre_tokenizer");
  if (type != "Split") refuse("pre_tokenizer: found \"", type, "\", expected \"Split\"");
  want_false(split, "invert", "pre_tokenizer");
  const Json& behavior = need(split, "behavior", "pre_tokenizer.", Json::value_t::string);
  if (behavior != "Isolated")
    refuse("pre_tokenizer.behavior: found ", describe_json(behavior), ", expected \"Isolated\"");
  const Json& pattern = need(split, "pattern", "pre_tokenizer.", Json::value_t::object);
  const std::string regex = need(pattern, "Regex", "pre_tokenizer.pattern.", Json::value_t::string).get<std::string>();
  for (const PatternSpelling& s : kSpellings)
    if (regex == s.regex) return s.pattern;
  refuse("pre_tokenizer.pattern: found the unknown regular expression ", regex,
         ", expected that of gpt2, cl100k (llama3), o200k, qwen2 or tekken");
}

// A ByteLevel with its own pattern, or a sequence of two steps: a Split and a ByteLevel without a pattern, or Digits
// and a ByteLevel with its own pattern.
WordPattern Reader::read_pattern() const {
  const Json* pre = find(json_, "pre_tokenizer");
  if (!pre) refuse("found no pre_tokenizer, expected ByteLevel");
  if (type_of(*pre, "pre_tokenizer") == "Sequence") {
    const Json& steps = need(*pre, "pretokenizers", "pre_tokenizer.", Json::value_t::array);
    if (steps.size() == 2 && type_of(steps[0], "pre_tokenizer") == "Digits") {
      const Json* individual = find(steps[0], "individual_digits");
      if (!individual || *individual != Json(true))
        refuse("pre_tokenizer.individual_digits: found ", individual ? describe_json(*individual) : "none",
               ", expected true");
      check_own_pattern(steps[1]);
      return WordPattern::smollm;
    }
    if (steps.size() == 2) {
      const WordPattern pattern = read_split(steps[0]);
      check_byte_level(steps[1]);
      const Json* use_regex = find(steps[1], "use_regex");
      if (!use_regex || *use_regex != Json(false))
        refuse("pre_tokenizer: found a ByteLevel after a Split, expected \"use_regex\": false");
      return pattern;
    }
    if (steps.size() != 1) refuse("pre_tokenizer: found ", steps.size(), " steps, expected a Split and a ByteLevel");
    pre = &steps[0];
  }
  check_own_pattern(*pre);
  return WordPattern::gpt2;
}

void Reader::check_own_pattern(const Json& level) const {
  check_byte_level(level);
  const Json* use_regex = find(level, "use_regex");
  if (use_regex && *use_regex != Json(true))
    refuse("pre_tokenizer.use_regex: found ", describe_json(*use_regex), ", expected true");
}

void Reader::check_model(const Json& model) const {
  const Json* type = find(model, "type");
  if (type && *type != "BPE") refuse("model.type: found ", describe_json(*type), ", expected \"BPE\"");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json* value = find(model, key);
    if (value && *value != "") refuse("model.", key, ": found ", describe_json(*value), ", expected none");
  }
  const Json* dropout = find(model, "dropout");
  if (dropout && *dropout != 0) refuse("model.dropout: found ", describe_json(*dropout), ", expected none");
  want_false(model, "byte_fallback", "model");
}

int32_t Reader::id_of(const Json& id, std::string_view token) const {
  if (!id.is_number_unsigned() || id.get<uint64_t>() >= (uint64_t(1) << 24))
    refuse("token \"", token, "\": found id ", id.is_number() ? id.dump() : describe_json(id),
           ", expected an integer from 0 to 16777215");
  return int32_t(id.get<uint64_t>());
}

void Reader::read_added() {
  const Json* added = find(json_, "added_tokens");
  if (!added) return;
  if (!added->is_array()) refuse("added_tokens: found ", describe_json(*added), ", expected array");
  for (const Json& token : *added) {
    if (!token.is_object()) refuse("added_tokens: found ", describe_json(token), ", expected objects");
    const std::string text = need(token, "content", "added_tokens.", Json::value_t::string).get<std::string>();
    const Json* id = find(token, "id");
    if (!id) refuse("added_tokens: found no id for \"", text, "\"");
    const auto flag = [&](const char* key, bool otherwise) {
      const Json* value = find(token, key);
      if (value && !value->is_boolean())
        refuse("added_tokens: \"", text, "\": ", key, ": found ", describe_json(*value), ", expected true or false");
      return value ? value->get<bool>() : otherwise;
    };
    if (flag("special", true)) {
      rules_.specials.push_back({id_of(*id, text), text});
      added_.emplace(text, rules_.specials.back().id);
      continue;
    }
    if (text.empty()) refuse("added_tokens: found an empty text");
    for (const char* key : {"single_word", "lstrip", "rstrip"})
      if (flag(key, false)) refuse("added_tokens: \"", text, "\": ", key, ": found true, expected false");
    rules_.added.push_back({id_of(*id, text), flag("normalized", true)});
    ordinary_.emplace_back(text);
  }
}

// Enters the texts of added tokens that ordinary text may contain. The vocabulary may name such a token too.
void Reader::place_added() {
  for (size_t i = 0; i < rules_.added.size(); ++i) {
    const auto id = size_t(rules_.added[i].id);
    if (id >= rules_.tokens.size() + rules_.specials.size() + rules_.added.size())
      refuse("token \"", ordinary_[i], "\": found id ", id, ", expected no gaps");
    if (id >= rules_.tokens.size()) rules_.tokens.resize(id + 1);
    std::string& token = rules_.tokens[id];
    if (!token.empty() && token != ordinary_[i])
      refuse("found two tokens with id ", id, ": \"", byte_spelling(token), "\" and \"", ordinary_[i], "\"");
    token = ordinary_[i];
  }
}

void Reader::read_normalizer() {
  const Json* normalizer = find(json_, "normalizer");
  if (!normalizer) return;
  const std::string type = type_of(*normalizer, "normalizer");
  if (type != "NFC") refuse("normalizer: found \"", type, "\", expected none or \"NFC\"");
  rules_.nfc = true;
}

std::string Reader::token_of(std::string_view spelling) const {
  std::string out;
  for (size_t i = 0; i < spelling.size();) {
    const Utf8Char c = utf8_decode(spelling.data() + i);
    const auto byte = bytes_.find(c.code);
    if (byte == bytes_.end())
      refuse("found token \"", spelling, "\", expected only the 256 characters that spell bytes");
    out += byte->second;
    i += size_t(c.length);
  }
  return out;
}

void Reader::read_vocab(const Json& vocab) {
  // Ids have no gaps, so none may reach the number of entries; a large id in a small file therefore cannot request much
  // memory.
  const size_t most = vocab.size() + rules_.specials.size() + rules_.added.size();
  for (const auto& [spelling, value] : vocab.items()) {
    const int32_t id = id_of(value, spelling);
    const auto special = added_.find(spelling);
    if (special != added_.end()) {
      if (special->second != id)
        refuse("token \"", spelling, "\": found id ", id, " in model.vocab and ", special->second,
               " in added_tokens, expected one");
      continue;
    }
    if (spelling.empty()) refuse("model.vocab: found an empty token with id ", id);
    // An added token may be written as its text, not in the spelling of bytes.
    if (const auto at = std::find(ordinary_.begin(), ordinary_.end(), spelling);
        at != ordinary_.end() && rules_.added[size_t(at - ordinary_.begin())].id == id)
      continue;
    if (size_t(id) >= most)
      refuse("token \"", spelling, "\": found id ", id, " among ", most, " tokens, expected no gaps");
    if (size_t(id) >= rules_.tokens.size()) rules_.tokens.resize(size_t(id) + 1);
    if (!rules_.tokens[id].empty())
      refuse("found two tokens with id ", id, ": \"", byte_spelling(rules_.tokens[id]), "\" and \"", spelling, "\"");
    rules_.tokens[id] = token_of(spelling);
  }
}

void Reader::read_merges(const Json& merges) {
  std::unordered_map<std::string_view, int32_t> ids;
  for (size_t i = 0; i < rules_.tokens.size(); ++i)
    if (!rules_.tokens[i].empty()) ids.emplace(rules_.tokens[i], int32_t(i));
  const auto id = [&](std::string_view spelling, size_t rank) {
    const auto at = ids.find(token_of(spelling));
    if (at == ids.end()) refuse("model.merges: merge ", rank, ": found the unknown token \"", spelling, "\"");
    return at->second;
  };
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Json& merge = merges[rank];
    std::string_view left, right;
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get_ref<const std::string&>(), right = merge[1].get_ref<const std::string&>();
    } else if (merge.is_string()) {
      const std::string_view both = merge.get_ref<const std::string&>();
      const size_t space = both.find(' ');
      if (space != both.npos) left = both.substr(0, space), right = both.substr(space + 1);
    }
    if (left.empty() || right.empty())
      refuse("model.merges: merge ", rank, ": found ", describe_json(merge),
             ", expected two tokens, \"a b\" or [\"a\", \"b\"]");
    rules_.merges.emplace_back(id(left, rank), id(right, rank));
  }
}

ByteBpeRules Reader::read() {
  if (!json_.is_object()) refuse("found ", describe_json(json_), ", expected an object (tokenizer.json)");
  read_normalizer();
  rules_.pattern = read_pattern();
  const Json& model = need(json_, "model", "", Json::value_t::object);
  check_model(model);
  if (const Json* ignore = find(model, "ignore_merges")) {
    if (!ignore->is_boolean()) refuse("model.ignore_merges: found ", describe_json(*ignore), ", expected boolean");
    rules_.ignore_merges = ignore->get<bool>();
  }
  read_added();
  read_vocab(need(model, "vocab", "model.", Json::value_t::object));
  place_added();
  read_merges(need(model, "merges", "model.", Json::value_t::array));
  return std::move(rules_);
}

std::string json_string(std::string_view s) { return write_json(Json(std::string(s))); }

std::string pre_tokenizer_json(WordPattern pattern) {
  const std::string own_pattern =
      R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})";
  if (pattern == WordPattern::gpt2) return own_pattern;
  if (pattern == WordPattern::smollm)
    return R"({"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": true},
    )" + own_pattern +
           "]}";
  return R"({"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": )" +
         json_string(word_pattern_regex(pattern)) + R"(}, "behavior": "Isolated", "invert": false},
    {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]})";
}

}  // namespace

const char* word_pattern_name(WordPattern p) {
  switch (p) {
    case WordPattern::gpt2: return "gpt2";
    case WordPattern::cl100k: return "cl100k";
    case WordPattern::o200k: return "o200k";
    case WordPattern::qwen2: return "qwen2";
    case WordPattern::tekken: return "tekken";
    case WordPattern::smollm: return "smollm";
  }
  return "unknown";
}

const char* word_pattern_regex(WordPattern p) {
  if (p == WordPattern::smollm) p = WordPattern::gpt2;
  for (const PatternSpelling& s : kSpellings)
    if (s.pattern == p) return s.regex;
  return "";
}

ByteBpe ByteBpe::parse(std::string_view json, const std::string& origin) {
  const Json parsed = parse_json(json, origin, {.depth = 16, .bytes = kMaxFileBytes});
  return ByteBpe(Reader(parsed, origin).read(), origin);
}

ByteBpe ByteBpe::load(const std::string& path) { return parse(read_file(path, kMaxFileBytes), path); }

std::string ByteBpe::to_json() const {
  const ByteBpeRules& r = rules();
  std::string out = "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n  \"added_tokens\": [";
  const char* comma = "";
  const auto add = [&](int32_t id, const std::string& text, bool normalized, bool special) {
    const auto said = [](bool is) { return is ? "true" : "false"; };
    out += std::string(comma) + "\n    {\"id\": " + std::to_string(id) + ", \"content\": " + json_string(text) +
           ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": " + said(normalized) +
           ", \"special\": " + said(special) + "}";
    comma = ",";
  };
  for (const SpecialToken& s : r.specials) add(s.id, s.text, false, true);
  for (const AddedToken& a : r.added) add(a.id, r.tokens[size_t(a.id)], a.normalized, false);
  out += std::string("],\n  \"normalizer\": ") + (r.nfc ? R"({"type": "NFC"})" : "null") +
         ",\n  \"pre_tokenizer\": " + pre_tokenizer_json(r.pattern) +
         ",\n  \"post_processor\": null,\n  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, "
         "\"trim_offsets\": true, \"use_regex\": true},\n  \"model\": {\n    \"type\": \"BPE\", \"dropout\": null, "
         "\"unk_token\": null, \"continuing_subword_prefix\": null, \"end_of_word_suffix\": null, \"fuse_unk\": false, "
         "\"byte_fallback\": false, \"ignore_merges\": " +
         (r.ignore_merges ? "true" : "false") + ",\n    \"vocab\": {";
  comma = "";
  // An added token is written as its text, unless an ordinary token has the same spelling.
  std::vector<bool> is_added(r.tokens.size());
  for (const AddedToken& a : r.added) is_added[size_t(a.id)] = true;
  std::unordered_set<std::string> spellings;
  for (size_t i = 0; i < r.tokens.size() && !r.added.empty(); ++i)
    if (!is_added[i]) spellings.insert(byte_spelling(r.tokens[i]));
  for (size_t i = 0; i < r.tokens.size(); ++i) {
    if (is_added[i] && spellings.count(r.tokens[i]) != 0) continue;
    const bool as_it_is = r.tokens[i].empty() || is_added[i];
    const std::string spelling = as_it_is ? token_bytes(int32_t(i)) : byte_spelling(r.tokens[i]);
    out += std::string(comma) + "\n      " + json_string(spelling) + ": " + std::to_string(i);
    comma = ",";
  }
  out += "},\n    \"merges\": [";
  comma = "";
  for (const auto& [a, b] : r.merges) {
    out += std::string(comma) + "\n      " + json_string(byte_spelling(r.tokens[a]) + " " + byte_spelling(r.tokens[b]));
    comma = ",";
  }
  return out + "]}\n}\n";
}

void ByteBpe::save(const std::string& path) const { write_file(path, to_json()); }

}  // namespace ingot
