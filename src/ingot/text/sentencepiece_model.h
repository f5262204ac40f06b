#pragma once
// The fields of a SentencePiece .model (a protobuf message) that encoding and decoding depend on, and the rewriting
// table of its normaliser.
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ingot::detail {

enum class PieceType { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

struct Piece {
  std::string text;
  float score = 0;
  PieceType type = PieceType::normal;
};

struct SentencePieceModel {
  std::vector<Piece> pieces;
  int model_type = 1;  // 1 unigram (the format's default), 2 BPE, 3 word, 4 char
  bool byte_fallback = false;
  bool whitespace_as_suffix = false;
  std::string bos_piece = "<s>";
  std::string unk_surface = " \xe2\x81\x87 ";
  std::string charsmap;
  bool add_dummy_prefix = true, remove_extra_whitespaces = true, escape_whitespaces = true;
  bool has_denormalizer = false;
  // Of a tokenizer.json with a Metaspace, without a field in a .model file: a text that begins with a space gets no
  // dummy prefix; and each space begins a word, so that no piece contains a space after its first character.
  bool space_is_prefix = false, splits_at_spaces = false;
};

// Throws bad_data with `origin` and the byte offset.
SentencePieceModel parse_sentencepiece_model(std::string_view bytes, const std::string& origin);
// The same as a .model file.
std::string sentencepiece_model_bytes(const SentencePieceModel& model);

// The precompiled rewriting rules: a double array (Darts) over the left sides of the rules, whose values are offsets
// into the right sides, each of which ends with a NUL.
class Charsmap {
 public:
  Charsmap() = default;
  Charsmap(std::string_view blob, const std::string& origin);
  struct Match {
    std::string_view replacement;
    int64_t length = 0;  // bytes of text that the rule replaces; 0 when no rule applies
  };
  Match longest(std::string_view text) const;

 private:
  std::vector<uint32_t> units_;
  std::string replacements_;
};

}  // namespace ingot::detail
