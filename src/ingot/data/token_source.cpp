#include "ingot/data/token_source.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/io/codecs/sha256.h"
#include "ingot/io/file.h"

namespace ingot {
namespace {

static_assert(std::endian::native == std::endian::little, "shards are read as they lie on disk: little-endian");

constexpr int32_t kMagic = 20240520;

class MemoryTokens : public TokenSource {
 public:
  MemoryTokens(std::vector<int32_t> tokens, std::vector<int64_t> begins, int32_t bos, int64_t vocab, std::string name)
      : TokenSource(bos, vocab), tokens_(std::move(tokens)), begins_(std::move(begins)), name_(std::move(name)) {
    if (tokens_.empty()) fail(ErrorCode::bad_data, name_, ": found no tokens");
    for (size_t i = 0; i < tokens_.size(); ++i)
      if (tokens_[i] < 0 || tokens_[i] >= vocab)
        fail(ErrorCode::bad_data, name_, ": token ", i, ": found id ", tokens_[i], ", expected less than ", vocab);
    INGOT_CHECK(!begins_.empty() && begins_[0] == 0 && std::is_sorted(begins_.begin(), begins_.end()) &&
                    begins_.back() < size(),
                name_, ": document begins must ascend from 0 and stay below ", size());
  }
  int64_t size() const override { return int64_t(tokens_.size()); }
  void read(int64_t begin, std::span<int32_t> into) const override {
    INGOT_CHECK(begin >= 0 && begin + int64_t(into.size()) <= size(), name_, ": found tokens [", begin, ", ",
                begin + int64_t(into.size()), "), expected them within ", size());
    std::copy_n(tokens_.begin() + begin, into.size(), into.begin());
  }
  std::vector<int64_t> document_begins() const override { return begins_; }
  std::vector<int64_t> part_bounds() const override { return {0, size()}; }
  std::string fingerprint() const override {
    Sha256 hash;
    hash.update(tokens_.data(), size() * 4);
    hash.update(begins_.data(), int64_t(begins_.size()) * 8);
    return hash.hex();
  }
  std::string name() const override { return name_; }

 private:
  std::vector<int32_t> tokens_;
  std::vector<int64_t> begins_;
  std::string name_;
};

class ShardTokens : public TokenSource {
 public:
  ShardTokens(const std::vector<std::string>& paths, int32_t bos, int64_t vocab, uint32_t tokenizer_hash)
      : TokenSource(bos, vocab), bounds_{0} {
    if (paths.empty()) fail(ErrorCode::not_found, "shards: found no file, expected at least one");
    Sha256 hash;
    for (const std::string& path : paths) {
      Shard shard{File::open(path), {}};
      std::string header(size_t(kShardHeaderBytes), '\0');
      const int64_t bytes = shard.file.size();
      header.resize(size_t(std::min(bytes, kShardHeaderBytes)));
      shard.file.read_at(0, header.data(), int64_t(header.size()));
      shard.header = parse_shard_header(header, bytes, path);
      const uint32_t found = shard.header.tokenizer_hash;
      if (tokenizer_hash != 0 && found != 0 && found != tokenizer_hash)
        fail(ErrorCode::bad_data, path, ": found tokens of the tokenizer with hash ", found, ", expected ",
             tokenizer_hash, ": this shard was made with another tokenizer");
      hash.update(base_name(path));
      hash.update(header);
      bounds_.push_back(bounds_.back() + shard.header.tokens);
      shards_.push_back(std::move(shard));
    }
    fingerprint_ = hash.hex();
    if (size() == 0) fail(ErrorCode::bad_data, paths[0], ": found no tokens in ", paths.size(), " shards");
  }

  int64_t size() const override { return bounds_.back(); }
  void read(int64_t begin, std::span<int32_t> into) const override {
    INGOT_CHECK(begin >= 0 && begin + int64_t(into.size()) <= size(), name(), ": found tokens [", begin, ", ",
                begin + int64_t(into.size()), "), expected them within ", size());
    size_t part = size_t(std::upper_bound(bounds_.begin(), bounds_.end(), begin) - bounds_.begin()) - 1;
    for (; !into.empty(); ++part) {
      const int64_t n = std::min(int64_t(into.size()), bounds_[part + 1] - begin);
      read_part(part, begin - bounds_[part], into.first(size_t(n)));
      into = into.subspan(size_t(n));
      begin += n;
    }
  }
  std::vector<int64_t> document_begins() const override {
    std::vector<int64_t> begins{0};
    std::vector<int32_t> piece;
    for (int64_t at = 0; at < size(); at += int64_t(piece.size())) {
      piece.resize(size_t(std::min(size() - at, int64_t(1) << 20)));
      read(at, piece);
      for (size_t i = 0; i < piece.size(); ++i)
        if (piece[i] == bos() && at + int64_t(i) > 0) begins.push_back(at + int64_t(i));
    }
    return begins;
  }
  std::vector<int64_t> part_bounds() const override { return bounds_; }
  std::string fingerprint() const override { return fingerprint_; }
  std::string name() const override { return shards_[0].file.path(); }

 private:
  struct Shard {
    File file;
    ShardHeader header;
  };

  void read_part(size_t part, int64_t begin, std::span<int32_t> into) const {
    const Shard& shard = shards_[part];
    const int64_t width = shard.header.token_bytes(), n = int64_t(into.size());
    // The narrow tokens arrive in the upper half of the output and are widened forwards in place.
    char* raw = reinterpret_cast<char*>(into.data()) + n * (4 - width);
    shard.file.read_at(kShardHeaderBytes + begin * width, raw, n * width);
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      uint32_t id = 0;
      std::memcpy(&id, raw + i * width, size_t(width));
      largest = std::max(largest, id);
      into[size_t(i)] = int32_t(id);
    }
    if (int64_t(largest) < vocab_size()) return;
    for (int64_t i = 0; i < n; ++i)
      if (const int64_t id = int64_t(uint32_t(into[size_t(i)])); id >= vocab_size())
        fail(ErrorCode::bad_data, shard.file.path(), ": token ", begin + i, ": found id ", id,
             ", expected less than the vocabulary's ", vocab_size());
  }

  std::vector<Shard> shards_;
  std::vector<int64_t> bounds_;
  std::string fingerprint_;
};

}  // namespace

std::shared_ptr<const TokenSource> tokens_in_memory(std::vector<int32_t> tokens, std::vector<int64_t> document_begins,
                                                    int32_t bos, int64_t vocab, std::string name) {
  return std::make_shared<MemoryTokens>(std::move(tokens), std::move(document_begins), bos, vocab, std::move(name));
}

std::shared_ptr<const TokenSource> tokenize_documents(const Tokenizer& tokenizer,
                                                      const std::vector<Document>& documents) {
  INGOT_CHECK(!documents.empty(), "tokenize: found no documents");
  std::vector<std::vector<int32_t>> ids(documents.size());
  parallel_tasks(int64_t(documents.size()), [&](int64_t i) {
    const Document& d = documents[size_t(i)];
    try {
      ids[size_t(i)] = tokenizer.encode(d.text);
    } catch (const Error& e) { fail(e.code, d.name, ": ", e.what()); }
  });
  std::vector<int32_t> tokens;
  std::vector<int64_t> begins;
  for (const std::vector<int32_t>& document : ids) {
    if (tokenizer.bos() < 0 && document.empty()) continue;  // the tokenizer's normalisation removed all of the text
    begins.push_back(int64_t(tokens.size()));
    if (tokenizer.bos() >= 0) tokens.push_back(tokenizer.bos());
    tokens.insert(tokens.end(), document.begin(), document.end());
  }
  return tokens_in_memory(std::move(tokens), std::move(begins), tokenizer.bos(), tokenizer.vocab_size(),
                          documents[0].name);
}

ShardHeader parse_shard_header(std::string_view bytes, int64_t file_bytes, const std::string& where) {
  if (int64_t(bytes.size()) < kShardHeaderBytes || file_bytes < kShardHeaderBytes)
    fail(ErrorCode::bad_data, where, ": found ", std::min(int64_t(bytes.size()), file_bytes),
         " bytes, expected a shard header of ", kShardHeaderBytes);
  int32_t words[4];
  std::memcpy(words, bytes.data(), sizeof words);
  if (words[0] != kMagic)
    fail(ErrorCode::bad_data, where, ": found magic number ", words[0], ", expected ", kMagic, ": not a token shard");
  if (words[1] != 1 && words[1] != 2)
    fail(ErrorCode::bad_data, where, ": found shard version ", words[1], ", expected 1 (uint16 tokens) or 2 (uint32)");
  if (words[2] < 0) fail(ErrorCode::bad_data, where, ": found ", words[2], " tokens, expected at least 0");
  ShardHeader header{words[1], words[2], uint32_t(words[3])};
  const int64_t expected = kShardHeaderBytes + header.tokens * header.token_bytes();
  if (file_bytes != expected)
    fail(ErrorCode::bad_data, where, ": found ", file_bytes, " bytes, expected ", expected, " for ", header.tokens,
         " tokens of ", header.token_bytes(), " bytes", file_bytes < expected ? ": the file is cut short" : "");
  return header;
}

ShardHeader read_shard_header(const std::string& path) {
  const File file = File::open(path);
  const int64_t bytes = file.size();
  std::string header(size_t(std::min(bytes, kShardHeaderBytes)), '\0');
  file.read_at(0, header.data(), int64_t(header.size()));
  return parse_shard_header(header, bytes, path);
}

bool holds_shards(const std::string& path) {
  if (is_directory(path)) {
    const std::vector<std::string> names = list_directory(path);
    return std::any_of(names.begin(), names.end(), [](const std::string& name) { return name.ends_with(".bin"); });
  }
  return path != kStandardInput && (path.ends_with(".bin") || begins_like_shard(path));
}

bool begins_like_shard(const std::string& path) {
  const File file = File::open(path);
  int32_t magic = 0;
  if (file.size() >= 4) file.read_at(0, &magic, 4);
  return magic == kMagic;
}

ShardPaths find_shards(const std::string& path) {
  ShardPaths found;
  const auto sort_in = [&](const std::string& name, const std::string& shard) {
    const bool held_out = name.find("_val_") != std::string::npos || name.starts_with("val_");
    (held_out ? found.held_out : found.train).push_back(shard);
  };
  if (!is_directory(path)) return sort_in(base_name(path), path), found;
  for (const std::string& name : list_directory(path))
    if (name.ends_with(".bin")) sort_in(name, join_path(path, name));
  if (found.train.empty() && found.held_out.empty())
    fail(ErrorCode::not_found, path, ": found no *.bin files, expected token shards");
  return found;
}

std::shared_ptr<const TokenSource> open_shards(const std::vector<std::string>& paths, int32_t bos, int64_t vocab,
                                               uint32_t tokenizer_hash) {
  return std::make_shared<ShardTokens>(paths, bos, vocab, tokenizer_hash);
}

std::shared_ptr<const TokenSource> open_shards(const std::vector<std::string>& paths, const Tokenizer& tokenizer) {
  return open_shards(paths, tokenizer.bos(), tokenizer.vocab_size(), tokenizer.hash());
}

std::vector<std::string> write_shards(const std::string& prefix, const TokenSource& source, uint32_t tokenizer_hash,
                                      int64_t tokens_per_shard) {
  INGOT_CHECK(tokens_per_shard > 0 && tokens_per_shard <= INT32_MAX, "shards: found ", tokens_per_shard,
              " tokens per shard, expected 1 to ", INT32_MAX);
  const bool narrow = source.vocab_size() <= 65536;
  std::vector<std::string> paths;
  std::vector<int32_t> piece;
  std::vector<uint16_t> packed;
  for (int64_t begin = 0; begin < source.size(); begin += tokens_per_shard) {
    const int64_t n = std::min(tokens_per_shard, source.size() - begin);
    char name[32];
    std::snprintf(name, sizeof name, "_%06d.bin", int(paths.size()));
    AtomicFile file(prefix + name);
    int32_t header[256] = {kMagic, narrow ? 1 : 2, int32_t(n), int32_t(tokenizer_hash)};
    file.write(header, sizeof header);
    for (int64_t at = 0; at < n; at += int64_t(piece.size())) {
      piece.resize(size_t(std::min(n - at, int64_t(1) << 20)));
      source.read(begin + at, piece);
      packed.assign(piece.begin(), piece.end());
      if (narrow)
        file.write(packed.data(), int64_t(packed.size()) * 2);
      else
        file.write(piece.data(), int64_t(piece.size()) * 4);
    }
    file.commit();
    paths.push_back(prefix + name);
  }
  return paths;
}

}  // namespace ingot
