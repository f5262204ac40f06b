#pragma once
// A long row of token ids: tokenized documents in memory, or shards on disk.
//
// A shard is a header of 256 little-endian int32 and then its tokens:
//   [0] 20240520              [1] version: 1 = uint16 tokens, 2 = uint32
//   [2] number of tokens      [3] the tokenizer's hash, 0 = unknown
// Its size is exactly 1,024 + tokens * width. A document begins with the tokenizer's bos and may straddle shards.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ingot/core/check.h"
#include "ingot/data/documents.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual int64_t size() const = 0;
  // Tokens [begin, begin + into.size()). May be called from several threads. Ids outside the vocabulary are bad_data.
  virtual void read(int64_t begin, std::span<int32_t> into) const = 0;
  // Where each document begins, ascending, the first at 0. Shards are scanned for bos.
  virtual std::vector<int64_t> document_begins() const = 0;
  // Where each part (shard) begins, and size() at the end.
  virtual std::vector<int64_t> part_bounds() const = 0;
  // A hash of the tokens (of shards: their names, sizes and headers). A run resumes only on data with the same hash.
  virtual std::string fingerprint() const = 0;
  // The name of the source in messages.
  virtual std::string name() const = 0;
  int32_t bos() const { return bos_; }
  int64_t vocab_size() const { return vocab_; }

 protected:
  TokenSource(int32_t bos, int64_t vocab) : bos_(bos), vocab_(vocab) {}

 private:
  int32_t bos_;  // -1: none
  int64_t vocab_;
};

// The tokens of each document, after bos if the tokenizer has a bos.
std::shared_ptr<const TokenSource> tokenize_documents(const Tokenizer& tokenizer,
                                                      const std::vector<Document>& documents);
std::shared_ptr<const TokenSource> tokens_in_memory(std::vector<int32_t> tokens, std::vector<int64_t> document_begins,
                                                    int32_t bos, int64_t vocab, std::string name = "tokens");

// --- shards
struct ShardHeader {
  int version = 1;  // 1: uint16, 2: uint32
  int64_t tokens = 0;
  uint32_t tokenizer_hash = 0;
  int64_t token_bytes() const { return version == 1 ? 2 : 4; }
};
constexpr int64_t kShardHeaderBytes = 1024;
// Checks the header against the size of its file.
ShardHeader parse_shard_header(std::string_view bytes, int64_t file_bytes, const std::string& where);
ShardHeader read_shard_header(const std::string& path);

// A file with the beginning of a shard or the name *.bin, or a directory with *.bin files.
bool holds_shards(const std::string& path);
bool begins_like_shard(const std::string& path);  // of a file
struct ShardPaths {
  std::vector<std::string> train, held_out;  // names with "_val_" or "val_" in front are held out
};
ShardPaths find_shards(const std::string& path);

// Every header is checked here, and the tokenizer's hash if the shard has a hash. Token ids are checked on reading.
std::shared_ptr<const TokenSource> open_shards(const std::vector<std::string>& paths, const Tokenizer& tokenizer);
std::shared_ptr<const TokenSource> open_shards(const std::vector<std::string>& paths, int32_t bos, int64_t vocab,
                                               uint32_t tokenizer_hash = 0);

// Writes "<prefix>_000000.bin", ... of at most `tokens_per_shard` tokens, uint16 where the vocabulary fits. Each file
// appears complete or not at all. Returns the paths.
std::vector<std::string> write_shards(const std::string& prefix, const TokenSource& source, uint32_t tokenizer_hash,
                                      int64_t tokens_per_shard = 100'000'000);

}  // namespace ingot
