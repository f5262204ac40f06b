// A SentencePiece vocabulary of type BPE inside a GGUF file ("llama") or in a tokenizer.json with byte fallback.
#include <algorithm>
#include <unordered_map>

#include "ingot/core/check.h"
#include "ingot/io/formats/gguf.h"
#include "ingot/io/json.h"
#include "ingot/io/utf8.h"
#include "ingot/text/sentencepiece.h"
#include "ingot/text/sentencepiece_model.h"

namespace ingot {
namespace {

using detail::Piece;
using detail::PieceType;
using detail::SentencePieceModel;

constexpr int kBpe = 2;
const std::string kSpace = "\xe2\x96\x81";  // U+2581 stands for a space

bool is_byte_piece(const std::string& text) {
  return text.size() == 6 && text.starts_with("<0x") && text.ends_with(">");
}

SentencePieceModel model_of_gguf(const GgufFile& file) {
  const auto* tokens = file.texts("tokenizer.ggml.tokens");
  const auto* types = file.integers("tokenizer.ggml.token_type");
  const auto found = file.metadata().find("tokenizer.ggml.scores");
  const auto* scores = found == file.metadata().end() ? nullptr : std::get_if<std::vector<double>>(&found->second);
  if (tokens == nullptr || types == nullptr || scores == nullptr || tokens->size() != types->size() ||
      tokens->size() != scores->size())
    fail(ErrorCode::bad_data, file.path(),
         ": found no tokenizer.ggml.tokens, scores and token_type of one length, expected a SentencePiece vocabulary");
  const auto flag = [&](const char* key, bool otherwise) {
    const auto at = file.metadata().find(key);
    const bool* value = at == file.metadata().end() ? nullptr : std::get_if<bool>(&at->second);
    return value == nullptr ? otherwise : *value;
  };
  SentencePieceModel m{.model_type = kBpe};
  for (size_t id = 0; id < tokens->size(); ++id) {
    const int64_t type = (*types)[id];
    if (type < 1 || type > 6)
      fail(ErrorCode::bad_data, file.path(), ": token ", id, ": found type ", type, ", expected 1 to 6");
    if (find_invalid_utf8((*tokens)[id]) >= 0)
      fail(ErrorCode::bad_data, file.path(), ": token ", id, ": found a text that is not UTF-8");
    m.pieces.push_back({(*tokens)[id], float((*scores)[id]), PieceType(type)});
    m.byte_fallback |= PieceType(type) == PieceType::byte;
  }
  m.add_dummy_prefix = flag("tokenizer.ggml.add_space_prefix", true);
  m.remove_extra_whitespaces = flag("tokenizer.ggml.remove_extra_whitespaces", false);
  if (const auto bos = file.integer("tokenizer.ggml.bos_token_id"); bos && *bos >= 0 && *bos < int64_t(tokens->size()))
    m.bos_piece = (*tokens)[size_t(*bos)];
  return m;
}

// Reads a tokenizer.json. Every error message begins with the file's name.
class JsonReader {
 public:
  JsonReader(const Json& json, const std::string& origin) : json_(json), origin_(origin) {}
  SentencePieceModel read() {
    read_spaces();
    read_vocab();
    read_added();
    read_ranks();
    return std::move(m_);
  }

 private:
  template <class... Note> [[noreturn]] void refuse(const Note&... note) const {
    fail(ErrorCode::bad_data, origin_, ": ", note...);
  }
  static const Json* find(const Json& object, const char* key) {
    if (!object.is_object()) return nullptr;
    const auto at = object.find(key);
    return at == object.end() || at->is_null() ? nullptr : &*at;
  }
  static std::string type_of(const Json& object) {
    const Json* type = find(object, "type");
    return type != nullptr && type->is_string() ? type->get<std::string>() : "";
  }
  const Json& model() const { return *find(json_, "model"); }

  // Spaces become U+2581. A text begins with U+2581 where a normalizer or a Metaspace adds it.
  void read_spaces() {
    m_.model_type = kBpe, m_.byte_fallback = true;
    m_.add_dummy_prefix = m_.remove_extra_whitespaces = false;
    bool replaces = false;
    const auto step = [&](const Json& s) {
      const Json* pattern = find(s, "pattern");
      if (type_of(s) == "Prepend" && s.value("prepend", "") == kSpace)
        m_.add_dummy_prefix = true;
      else if (type_of(s) == "Replace" && pattern != nullptr && *pattern == Json{{"String", " "}} &&
               s.value("content", "") == kSpace)
        replaces = true;
      else
        refuse("normalizer: found \"", type_of(s).substr(0, 40),
               "\", expected Prepend and Replace of spaces by U+2581");
    };
    if (const Json* normalizer = find(json_, "normalizer")) {
      const Json* steps = find(*normalizer, "normalizers");
      if (type_of(*normalizer) == "Sequence" && steps != nullptr && steps->is_array())
        for (const Json& s : *steps) step(s);
      else
        step(*normalizer);
    }
    if (const Json* pre = find(json_, "pre_tokenizer")) {
      const Json* pattern = find(*pre, "pattern");
      if (type_of(*pre) == "Metaspace" && !replaces) {
        replaces = true;
        const Json* scheme = find(*pre, "prepend_scheme");
        m_.add_dummy_prefix = scheme == nullptr ? pre->value("add_prefix_space", true) : *scheme != "never";
        m_.space_is_prefix = true, m_.splits_at_spaces = pre->value("split", true);
      } else if (type_of(*pre) != "Split" || !replaces || pattern == nullptr || *pattern != Json{{"String", " "}}) {
        refuse("pre_tokenizer: found \"", type_of(*pre).substr(0, 40),
               "\", expected none, Metaspace or a Split at spaces");
      }
    }
    if (!replaces) refuse("found no step that replaces spaces by U+2581, expected one beside byte_fallback");
  }

  int64_t id_of(const Json& id, const std::string& text) const {
    if (!id.is_number_integer() || id < 0 || id >= (1 << 24))
      refuse("token \"", text.substr(0, 80), "\": found id ", describe_json(id), ", expected 0 to 16777215");
    return id.get<int64_t>();
  }
  Piece& piece_at(int64_t id, const std::string& text, size_t most) {
    if (size_t(id) >= most) refuse("token \"", text.substr(0, 80), "\": found id ", id, ", expected no gaps");
    if (size_t(id) >= m_.pieces.size()) m_.pieces.resize(size_t(id) + 1);
    return m_.pieces[size_t(id)];
  }
  size_t most() const {
    const Json *vocab = find(model(), "vocab"), *added = find(json_, "added_tokens");
    return (vocab != nullptr ? vocab->size() : 0) + (added != nullptr ? added->size() : 0);
  }
  void read_vocab() {
    const Json* vocab = find(model(), "vocab");
    if (vocab == nullptr || !vocab->is_object()) refuse("found no model.vocab, expected an object");
    for (const auto& [text, id] : vocab->items())
      piece_at(id_of(id, text), text, most()) = {text, 0, is_byte_piece(text) ? PieceType::byte : PieceType::normal};
  }
  void read_added() {
    const Json *added = find(json_, "added_tokens"), *unknown = find(model(), "unk_token");
    if (added != nullptr && !added->is_array())
      refuse("added_tokens: found ", describe_json(*added), ", expected a list");
    for (const Json& token : added != nullptr ? *added : Json::array()) {
      const Json *content = find(token, "content"), *id = find(token, "id");
      if (content == nullptr || !content->is_string() || id == nullptr)
        refuse("added_tokens: found ", describe_json(token), ", expected objects with content and id");
      const std::string text = content->get<std::string>();
      piece_at(id_of(*id, text), text, most()) = {
          text, 0, token.value("special", true) ? PieceType::control : PieceType::user_defined};
      if (text == "<bos>") m_.bos_piece = text;
    }
    for (Piece& p : m_.pieces) {
      if (unknown != nullptr && *unknown == p.text) p.type = PieceType::unknown;
      if (p.text.empty()) refuse("found ids without tokens, expected no gaps below ", m_.pieces.size());
    }
  }
  // A piece's score is the rank of the first merge that gives the piece; a lower rank is merged first.
  void read_ranks() {
    const Json* merges = find(model(), "merges");
    if (merges == nullptr || !merges->is_array()) refuse("found no model.merges, expected a list");
    std::unordered_map<std::string, float> scores;
    for (size_t rank = 0; rank < merges->size(); ++rank) {
      const Json& merge = (*merges)[rank];
      std::string joined;
      if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        joined = merge[0].get<std::string>() + merge[1].get<std::string>();
      } else if (merge.is_string()) {
        joined = merge.get<std::string>();
        if (const size_t space = joined.find(' '); space != joined.npos) joined.erase(space, 1);
      }
      if (joined.empty())
        refuse("model.merges: merge ", rank, ": found ", describe_json(merge), ", expected two tokens");
      scores.emplace(joined, -float(rank) - 1);
    }
    for (Piece& p : m_.pieces) {
      const auto at = scores.find(p.text);
      p.score = at == scores.end() ? -float(merges->size()) - 2 : at->second;
    }
  }

  const Json& json_;
  const std::string& origin_;
  SentencePieceModel m_;
};

}  // namespace

bool SentencePiece::is_in(const GgufFile& file) { return file.text("tokenizer.ggml.model") == "llama"; }
SentencePiece SentencePiece::from_gguf(const GgufFile& file) { return of_model(model_of_gguf(file), file.path()); }

bool SentencePiece::is_in(const Json& json) {
  const auto model = json.is_object() ? json.find("model") : json.end();
  return json.is_object() && model != json.end() && model->is_object() && model->contains("byte_fallback") &&
         model->at("byte_fallback") == true;
}
SentencePiece SentencePiece::parse_json(const Json& json, const std::string& origin) {
  return of_model(JsonReader(json, origin).read(), origin);
}

}  // namespace ingot
