#include "ingot/text/tokenizer.h"

#include "ingot/core/check.h"
#include "ingot/core/thread_pool.h"
#include "ingot/io/file.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/char_tokenizer.h"
#include "ingot/text/sentencepiece.h"

namespace ingot {

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
  if (is_directory(path)) return load_tokenizer(join_path(path, "tokenizer.json"));
  const std::string content = read_file(path, int64_t(256) << 20);
  const size_t first = content.find_first_not_of(" \t\r\n");
  if (first == content.npos)
    fail(ErrorCode::bad_data, path,
         ": found an empty file, expected a tokenizer (tokenizer.json, SentencePiece .model or characters)");
  if (content[first] != '{') return std::make_unique<SentencePiece>(SentencePiece::parse(content, path));
  // Our own small file names its format first; a tokenizer.json has no such key.
  if (content.substr(0, 256).find("\"ingot-char\"") != content.npos)
    return std::make_unique<CharTokenizer>(CharTokenizer::parse(content, path));
  return std::make_unique<ByteBpe>(ByteBpe::parse(content, path));
}

std::vector<std::vector<int32_t>> encode_documents(const Tokenizer& tokenizer,
                                                   std::span<const std::string_view> documents) {
  std::vector<std::vector<int32_t>> out(documents.size());
  parallel_tasks(int64_t(documents.size()),
                 [&](int64_t i) { out[size_t(i)] = tokenizer.encode(documents[size_t(i)]); });
  return out;
}

}  // namespace ingot
