#pragma once
// SentencePiece vocabularies of type BPE, from .model files, from GGUF files and from a tokenizer.json with byte
// fallback: normalisation (the model's own table), merges by score, byte
// fallback. Encodes and decodes like the reference implementation.
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "ingot/text/tokenizer.h"

namespace ingot {

class GgufFile;
namespace detail {
struct SentencePieceModel;
}

class SentencePiece final : public Tokenizer {
 public:
  static SentencePiece load(const std::string& path);
  static SentencePiece parse(std::string_view model, const std::string& origin);
  // Reads the vocabulary in a model's GGUF file, where it is of this kind.
  static bool is_in(const GgufFile& file);
  static SentencePiece from_gguf(const GgufFile& file);
  // Reads a tokenizer.json whose BPE has byte fallback. Merges are ranked; where several merges give the same piece,
  // the first rank counts.
  static bool is_in(const nlohmann::json& json);
  static SentencePiece parse_json(const nlohmann::json& json, const std::string& origin);
  std::string to_model() const;  // as the content of a .model file
  ~SentencePiece() override;
  SentencePiece(SentencePiece&&) noexcept;
  SentencePiece& operator=(SentencePiece&&) noexcept;

  std::string normalize(std::string_view text) const;

  std::vector<int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  std::string added_bytes(int32_t id) const override;
  // Each U+2581 of a piece counts as one byte, the space that it represents, and as none if it is the dummy prefix at
  // the start of a document. A byte piece counts 1.
  int64_t bytes(int32_t previous, int32_t id) const override;
  // A vocabulary without a piece for U+2581 spells a space by the byte pieces E2 96 81. Together they count one byte,
  // so the share of the last piece is negative.
  int64_t bytes_after(std::span<const int32_t> before, int32_t id) const override;
  int32_t bos() const override;
  std::span<const SpecialToken> specials() const override;
  int32_t token_id(std::string_view text) const override;
  int vocab_size() const override;
  uint32_t hash() const override;
  std::string token_bytes(int32_t id) const override;
  std::string kind() const override { return "sentencepiece"; }

 private:
  struct Impl;
  static SentencePiece of_model(detail::SentencePieceModel model, const std::string& origin);
  explicit SentencePiece(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot
