#pragma once
// Converts text to token ids and back. All tokenizers implement this interface, and load_tokenizer() finds out which
// kind a file holds. encode and decode are inverse on valid UTF-8, except for the normalization that a tokenizer's file
// prescribes.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ingot {

struct SpecialToken {
  int32_t id;
  std::string text;
};

// All members may be called from several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // The ids of `text`, without a bos. The text of a special token is ordinary text here, so no input can forge a
  // special token. Text that is not UTF-8 is refused (bad_data) with the offset of its first invalid byte.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // The bytes of `ids`, joined. If the ids end inside a character, the result ends with incomplete UTF-8, which
  // Utf8Stream holds back. Special tokens (bos, control) stand for no text. An id outside the vocabulary is refused.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
  // The bytes that `id` adds to the text of earlier tokens, with a leading space that decode() leaves out at the
  // beginning of a text; nothing for a special token.
  virtual std::string added_bytes(int32_t id) const { return decode({&id, 1}); }
  // Bytes of text that `id` stands for after `previous` (any id, -1 for none): the denominator of bits per byte. 0 for
  // bos and control.
  virtual int64_t bytes(int32_t previous, int32_t id) const = 0;
  // The same after the tokens `before`, of which the last kContext matter. The result differs from bytes() only where a
  // character is spelled by several tokens that together stand for a different number of bytes; then it may be
  // negative.
  virtual int64_t bytes_after(std::span<const int32_t> before, int32_t id) const {
    return bytes(before.empty() ? -1 : before.back(), id);
  }
  static constexpr int64_t kContext = 3;
  // The token that starts a document, or -1 if the tokenizer has none.
  virtual int32_t bos() const = 0;
  // The control tokens by id, with their names. No text becomes a control token.
  virtual std::span<const SpecialToken> specials() const { return {}; }
  // The id of the control token, or of the added token that ordinary text may contain, with this text; -1: there is
  // none.
  virtual int32_t token_id(std::string_view text) const;
  virtual int vocab_size() const = 0;
  // A hash of the vocabulary and the rules: equal for tokenizers that give equal ids. Shards and checkpoints store the
  // hash. Never 0.
  virtual uint32_t hash() const = 0;
  // The bytes that `id` adds to decoded text; for a special token its name.
  virtual std::string token_bytes(int32_t id) const = 0;
  virtual std::string kind() const = 0;  // "byte_bpe", "sentencepiece", "char"
};

// Reads a Hugging Face tokenizer.json (byte-level BPE, or BPE with byte fallback), a SentencePiece .model (BPE),
// tiktoken's ranks of o200k_base, a model's GGUF file (the same two kinds of BPE) or a character vocabulary, which are
// distinguished by their content. For a directory, reads the file of tokenizer_in(), or its GGUF file. Every error
// names the file, the value found and the value expected.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);
// Parses the content of a tokenizer.json; errors begin with `origin`.
std::unique_ptr<Tokenizer> parse_tokenizer_json(const std::string& content, const std::string& origin);
// A directory's tokenizer.json, else its only .tiktoken file, else its tokenizer.model of SentencePiece; empty if it
// has none of these.
std::string tokenizer_in(const std::string& directory);

// Encodes many documents on all threads; the result does not depend on the number of threads.
std::vector<std::vector<int32_t>> encode_documents(const Tokenizer& tokenizer,
                                                   std::span<const std::string_view> documents);

}  // namespace ingot
