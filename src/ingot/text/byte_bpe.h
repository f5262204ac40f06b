#pragma once
// Byte-level BPE, as GPT-2 and its successors use it: a pre-tokenizer cuts the text into words, and each word's bytes
// are merged pair by pair, lowest rank first (leftmost on ties). Reads and writes Hugging Face's tokenizer.json, and
// reads tiktoken's files of ranks and the vocabulary in a GGUF file.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ingot/text/tokenizer.h"

namespace ingot {
class GgufFile;

// How text is cut into words, named after the vocabularies that introduced the patterns. Llama 3 uses cl100k's pattern.
// smollm: every digit alone, and what lies between digits by gpt2's pattern.
enum class WordPattern { gpt2, cl100k, o200k, qwen2, tekken, smollm };
const char* word_pattern_name(WordPattern p);
const char* word_pattern_regex(WordPattern p);  // the spelling written to tokenizer.json; of smollm that of gpt2

struct SpecialToken {
  int32_t id;
  std::string text;
};

// A token that ordinary text may contain: the text is cut at each occurrence, the leftmost and longest first, before it
// is cut into words. Its text stands in ByteBpeRules::tokens, as an ordinary token's does.
struct AddedToken {
  int32_t id;
  bool normalized = false;  // looked for in the normalized text
};

// The token that starts a document: the special token with id 0, unless its name says that it is for unknown or padded
// places or an end; else the first of <|bos|>, <|begin_of_text|>, <|startoftext|>, <bos>, <s>, <|endoftext|>; else -1.
int32_t start_token(std::span<const SpecialToken> specials);

// What defines a byte-level BPE. Token i stands for the bytes tokens[i]; special tokens may lie among them (their entry
// in `tokens` is empty) or above.
struct ByteBpeRules {
  WordPattern pattern = WordPattern::gpt2;
  std::vector<std::string> tokens;
  std::vector<std::pair<int32_t, int32_t>> merges;  // by rank; the merge of a and b is the token of their joined bytes
  std::vector<SpecialToken> specials;               // by id
  bool ignore_merges = false;  // a word that is a token stands as it is, however merges would cut it
  // tiktoken's rule: any two tokens merge whose joined bytes are a token, the smallest such token first. The
  // constructor then makes `merges` in that order. This rule and ranks of the merges differ only where overlapping
  // pairs join to the same token.
  bool merge_by_token = false;
  std::vector<AddedToken> added;  // by id
  bool nfc = false;               // text is brought into Unicode's normalization form C before it is cut into words
};

class ByteBpe final : public Tokenizer {
 public:
  // `origin` names the source of the rules in errors.
  explicit ByteBpe(ByteBpeRules rules, const std::string& origin = "byte_bpe");
  ~ByteBpe() override;
  ByteBpe(ByteBpe&&) noexcept;
  ByteBpe& operator=(ByteBpe&&) noexcept;

  static ByteBpe load(const std::string& path);
  static ByteBpe parse(std::string_view json, const std::string& origin);
  // Lines of "base64 rank", as tiktoken keeps a vocabulary: o200k_base's tokens, followed by the special tokens of
  // o200k_harmony, <|startoftext|> first.
  static ByteBpe parse_tiktoken(std::string_view text, const std::string& origin);
  // The vocabulary in a model's GGUF file: tokens with their types, merges, and a pre-tokenizer by name.
  static ByteBpe from_gguf(const GgufFile& file);
  void save(const std::string& path) const;  // as tokenizer.json
  std::string to_json() const;
  const ByteBpeRules& rules() const;

  std::vector<int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  int64_t bytes(int32_t previous, int32_t id) const override;
  int32_t bos() const override;
  int vocab_size() const override;
  uint32_t hash() const override;
  std::string token_bytes(int32_t id) const override;
  std::string kind() const override { return "byte_bpe"; }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The special token of o200k_harmony whose id is `offset` ids after the last ordinary token; `id` is part of the names
// of reserved tokens.
std::string harmony_special_name(int offset, int id);

struct BpeTrainOptions {
  WordPattern pattern = WordPattern::gpt2;
  int64_t min_count = 2;  // a pair seen less often is never merged
  // The special tokens take the first ids, and the first one starts a document (start_token). One that is spelled like
  // a byte is refused; a merge that would be spelled like one is not made.
  std::vector<std::string> special_tokens = {"<|bos|>"};
  void (*progress)(void* context, int64_t merges, int64_t of) = nullptr;
  void* context = nullptr;
};

// Learns a vocabulary of at most `vocab_size` tokens (special tokens + 256 bytes + merges): the most frequent pair
// first, on ties the pair of smaller ids, so the result depends neither on threads nor on the order of the documents.
// Fewer tokens result when the text runs out of pairs.
ByteBpe train_bpe(std::span<const std::string_view> documents, int vocab_size, const BpeTrainOptions& options = {});

}  // namespace ingot
