#pragma once
// Byte-level BPE, as in GPT-2 and its successors: a pre-tokenizer cuts the text into words, and each word's bytes are
// merged pair by pair, lowest rank first (leftmost on ties). Reads and writes Hugging Face's tokenizer.json, and reads
// tiktoken's files of ranks and the vocabulary in a GGUF file.
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
// smollm makes each digit a word and cuts the text between digits by gpt2's pattern.
enum class WordPattern { gpt2, cl100k, o200k, qwen2, tekken, smollm };
const char* word_pattern_name(WordPattern p);
const char* word_pattern_regex(WordPattern p);  // the spelling written to tokenizer.json; smollm has that of gpt2

// A token that ordinary text may contain: before the text is cut into words, it is cut at each occurrence of the token,
// the leftmost and longest first. ByteBpeRules::tokens holds the token's text, as for an ordinary token.
struct AddedToken {
  int32_t id;
  bool normalized = false;  // searched in the normalized text
};

// The token that starts a document: the special token with id 0, unless its name marks it as a token for unknown text,
// for padding or for an end; else the first of <|bos|>, <|begin_of_text|>, <|startoftext|>, <bos>, <s>, <|endoftext|>;
// else -1.
int32_t start_token(std::span<const SpecialToken> specials);

// The definition of a byte-level BPE. Token i stands for the bytes tokens[i]; special tokens may have ids among them
// (their entry in `tokens` is empty) or above.
struct ByteBpeRules {
  WordPattern pattern = WordPattern::gpt2;
  std::vector<std::string> tokens;
  // by rank; the merge of a and b gives the token of their joined bytes
  std::vector<std::pair<int32_t, int32_t>> merges;
  std::vector<SpecialToken> specials;  // by id
  bool ignore_merges = false;  // a word that is a token remains one token, even if merges would give other tokens
  // tiktoken's rule: any two tokens whose joined bytes are a token merge, the smallest such token first. The
  // constructor then fills `merges` in that order. This rule differs from given ranks only where overlapping pairs join
  // to the same token.
  bool merge_by_token = false;
  std::vector<AddedToken> added;  // by id
  bool nfc = false;               // text is converted to Unicode's normalization form C before it is cut into words
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
  // Reads lines of "base64 rank", tiktoken's form of a vocabulary: the tokens of o200k_base, to which the special
  // tokens of o200k_harmony are added, <|startoftext|> first.
  static ByteBpe parse_tiktoken(std::string_view text, const std::string& origin);
  // Reads the vocabulary in a model's GGUF file: tokens with their types, merges, and the name of a pre-tokenizer.
  static ByteBpe from_gguf(const GgufFile& file);
  void save(const std::string& path) const;  // as tokenizer.json
  std::string to_json() const;
  const ByteBpeRules& rules() const;

  std::vector<int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  int64_t bytes(int32_t previous, int32_t id) const override;
  int32_t bos() const override;
  std::span<const SpecialToken> specials() const override { return rules().specials; }
  int32_t token_id(std::string_view text) const override;
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
  int64_t min_count = 2;  // a pair that occurs less often is never merged
  // The special tokens get the first ids, and the first of them starts a document (start_token). A special token that
  // is spelled like a byte is refused, and no merge may be spelled like a special token.
  std::vector<std::string> special_tokens = {"<|bos|>"};
  void (*progress)(void* context, int64_t merges, int64_t of) = nullptr;
  void* context = nullptr;
};

// Trains a vocabulary of at most `vocab_size` tokens (special tokens + 256 bytes + merges): the most frequent pair is
// merged first, on ties the pair of smaller ids, so the result depends neither on threads nor on the order of the
// documents. Fewer tokens result when no pair occurs often enough any more.
ByteBpe train_bpe(std::span<const std::string_view> documents, int vocab_size, const BpeTrainOptions& options = {});

}  // namespace ingot
