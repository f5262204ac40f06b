#include "ingot/engines/train/run/run_data.h"

#include <algorithm>

#include "ingot/core/log.h"
#include "ingot/io/file.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/char_tokenizer.h"

namespace ingot {
namespace {

std::string tokenizer_file_name(const Tokenizer& t) {
  return t.kind() == "sentencepiece" ? "tokenizer.model" : "tokenizer.json";
}

std::shared_ptr<const Tokenizer> make_tokenizer(const RunConfig& config, const std::vector<Document>& train,
                                                const std::vector<Document>& held_out) {
  if (config.train.tokenizer == "char") {
    std::string text;  // all the text, because a held-out character without a token could not be scored
    for (const auto* part : {&train, &held_out})
      for (const Document& d : *part) text += d.text;
    return std::make_shared<CharTokenizer>(CharTokenizer::from_text(text));
  }
  std::vector<std::string_view> texts;
  for (const Document& d : train) texts.push_back(d.text);
  return std::make_shared<ByteBpe>(train_bpe(texts, int(config.model.vocab)));
}

std::string serialised(const Tokenizer& t) {
  if (const auto* bpe = dynamic_cast<const ByteBpe*>(&t)) return bpe->to_json();
  if (const auto* chars = dynamic_cast<const CharTokenizer*>(&t)) return chars->to_json();
  fail(ErrorCode::unsupported, "tokenizer: found kind ", t.kind(), ", expected one that can be written");
}

void use_tokenizer(RunData& data, RunConfig& config, std::shared_ptr<const Tokenizer> tokenizer, std::string file) {
  data.tokenizer = std::move(tokenizer);
  data.tokenizer_file = std::move(file);
  data.tokenizer_name = tokenizer_file_name(*data.tokenizer);
  config.model.vocab = data.tokenizer->vocab_size();
}

RunData load_shards(const std::string& path, RunConfig& config, const std::string& tokenizer_path) {
  if (tokenizer_path.empty())
    fail(ErrorCode::usage, path,
         ": found token shards and no tokenizer, expected with --tokenizer the one they were made with");
  RunData data;
  use_tokenizer(data, config, load_tokenizer(tokenizer_path), read_file(tokenizer_path));
  const ShardPaths shards = find_shards(path);
  if (shards.held_out.empty())
    fail(ErrorCode::bad_data, path, ": found ", shards.train.size(),
         " training shards and none held out, expected one with val_ in its name");
  data.train = open_shards(shards.train, *data.tokenizer);
  data.held_out = open_shards(shards.held_out, *data.tokenizer);
  return data;
}

}  // namespace

RunData load_run_data(const std::string& path, RunConfig& config, const std::string& tokenizer_path) {
  const std::string& named = config.train.tokenizer;
  const std::string file = !tokenizer_path.empty() ? tokenizer_path : named == "char" || named == "bpe" ? "" : named;
  if (holds_shards(path)) return load_shards(path, config, file);
  RunData data;
  const DocumentSplit split = split_documents(
      read_documents(path, &data.left_out),
      {.every = config.train.held_out_every, .tail = config.train.held_out_tail, .seed = config.train.split_seed});
  if (file.empty()) {
    auto made = make_tokenizer(config, split.train, split.held_out);
    const std::string text = serialised(*made);
    use_tokenizer(data, config, std::move(made), text);
  } else {
    use_tokenizer(data, config, load_tokenizer(file), read_file(file));
  }
  data.train = tokenize_documents(*data.tokenizer, split.train);
  data.held_out = tokenize_documents(*data.tokenizer, split.held_out);
  data.train_bytes = total_bytes(split.train);
  data.held_out_bytes = total_bytes(split.held_out);
  for (const Document& d : split.held_out) data.held_out_texts.push_back(d.text);
  return data;
}

}  // namespace ingot
