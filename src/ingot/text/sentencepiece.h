#pragma once
// Reader of SentencePiece's .model files of type BPE: normalisation (the model's own table), merges by score, byte
// fallback. Encodes and decodes like the reference implementation.
#include <memory>
#include <string>
#include <string_view>

#include "ingot/text/tokenizer.h"

namespace ingot {

class SentencePiece final : public Tokenizer {
 public:
  static SentencePiece load(const std::string& path);
  static SentencePiece parse(std::string_view model, const std::string& origin);
  ~SentencePiece() override;
  SentencePiece(SentencePiece&&) noexcept;
  SentencePiece& operator=(SentencePiece&&) noexcept;

  std::string normalize(std::string_view text) const;

  std::vector<int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  // The PR's tables: a leading U+2581 counts one byte unless `previous` is control, unknown or unused; a byte piece
  // counts 1.
  int64_t bytes(int32_t previous, int32_t id) const override;
  int32_t bos() const override;
  int vocab_size() const override;
  uint32_t hash() const override;
  std::string token_bytes(int32_t id) const override;
  std::string kind() const override { return "sentencepiece"; }

 private:
  struct Impl;
  explicit SentencePiece(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot
