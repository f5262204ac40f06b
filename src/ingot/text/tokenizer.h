#pragma once
// Text to token ids and back. Every tokenizer implements this one interface, and load_tokenizer finds out which kind a
// file holds. encode and decode are inverse on valid UTF-8, except for the normalization that a tokenizer's file asks
// for.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ingot {

// All members may be called from several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // The ids of `text`, without a bos. The text of a special token is ordinary text here, so no input can forge one.
  // Text that is not UTF-8 is refused (bad_data) with the offset of its first wrong byte.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // The bytes of `ids`, joined. A cut inside a character leaves incomplete UTF-8: Utf8Stream holds it back. Special
  // tokens (bos, control) stand for no text. An id outside the vocabulary is refused.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
  // Bytes of text that `id` stands for after `previous` (any id, -1 for none): the denominator of bits per byte. 0 for
  // bos and control.
  virtual int64_t bytes(int32_t previous, int32_t id) const = 0;
  // The same after the tokens `before`, of which the last kContext count. Only where a character may be spelled by
  // several tokens that stand for another number of bytes together does it differ from bytes(); it may be negative
  // then.
  virtual int64_t bytes_after(std::span<const int32_t> before, int32_t id) const {
    return bytes(before.empty() ? -1 : before.back(), id);
  }
  static constexpr int64_t kContext = 3;
  // The token that starts a document, or -1 where the tokenizer has none.
  virtual int32_t bos() const = 0;
  virtual int vocab_size() const = 0;
  // A hash of the vocabulary and the rules: equal for tokenizers that give equal ids. Shards and checkpoints store the
  // hash. Never 0.
  virtual uint32_t hash() const = 0;
  // The bytes that `id` adds to decoded text; for a special token its name.
  virtual std::string token_bytes(int32_t id) const = 0;
  virtual std::string kind() const = 0;  // "byte_bpe", "sentencepiece", "char"
};

// Reads a Hugging Face tokenizer.json (byte-level BPE, or BPE with byte fallback), a SentencePiece .model (BPE),
// tiktoken's ranks of o200k_base, a model's GGUF file (the same two kinds) or a character vocabulary, told apart by
// content; of a directory its tokenizer.json, .tiktoken or GGUF file. Every refusal names the file, what was found and
// what was expected.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);
// A directory's tokenizer.json, else its one .tiktoken file; empty where it has neither.
std::string tokenizer_in(const std::string& directory);

// encode for many documents on all threads; the result does not depend on their number.
std::vector<std::vector<int32_t>> encode_documents(const Tokenizer& tokenizer,
                                                   std::span<const std::string_view> documents);

}  // namespace ingot
