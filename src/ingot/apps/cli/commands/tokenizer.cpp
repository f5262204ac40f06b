// ingot tokenizer train|encode|decode.
#include "ingot/text/tokenizer.h"

#include <cctype>
#include <charconv>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/check.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/data/documents.h"
#include "ingot/io/file.h"
#include "ingot/io/formats/archive.h"
#include "ingot/models/registry.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/char_tokenizer.h"

namespace ingot::cli {
namespace {

struct TrainingOptions {
  std::vector<std::string> data, specials = {"<|bos|>"};
  std::string out = "tokenizer.json", kind = "bpe", pattern = "gpt2";
  int64_t vocab = 4096, min_count = 2;
};

WordPattern pattern_of(const std::string& name) {
  for (WordPattern p :
       {WordPattern::gpt2, WordPattern::cl100k, WordPattern::o200k, WordPattern::tekken, WordPattern::smollm})
    if (name == word_pattern_name(p)) return p;
  return WordPattern::qwen2;
}

void train(const TrainingOptions& o) {
  refuse_to_replace(o.out, o.data);
  AtomicFile file(o.out);  // opened before the work, so that an OUT that cannot be written is found first
  if (const int64_t least = 256 + int64_t(o.specials.size()); o.kind != "char" && o.vocab < least)
    fail(ErrorCode::usage, "--vocab: found ", o.vocab, ", expected at least ", least, " for the 256 bytes and ",
         counted(int64_t(o.specials.size()), "special token"));
  std::vector<Document> documents;
  for (const std::string& path : o.data)
    for (Document& d : documents_of(path)) documents.push_back(std::move(d));
  log_info("read ", counted(int64_t(documents.size()), "document"), ", ", format_bytes(double(total_bytes(documents))));
  if (o.kind == "char") {
    std::string all;
    for (const Document& d : documents) all += d.text;
    const CharTokenizer tokenizer = CharTokenizer::from_text(all);
    file.write(tokenizer.to_json());
    file.commit();
    log_info("wrote ", o.out, ": ", tokenizer.vocab_size(), " characters");
    return;
  }
  const std::vector<std::string_view> texts = [&] {
    std::vector<std::string_view> views;
    for (const Document& d : documents) views.push_back(d.text);
    return views;
  }();
  Progress progress;
  BpeTrainOptions options{.pattern = pattern_of(o.pattern), .min_count = o.min_count, .special_tokens = o.specials};
  options.context = &progress;
  options.progress = [](void* context, int64_t merges, int64_t of) {
    static_cast<Progress*>(context)->update("merge " + std::to_string(merges) + "/" + std::to_string(of));
  };
  const ByteBpe tokenizer = train_bpe(texts, int(o.vocab), options);
  file.write(tokenizer.to_json());
  file.commit();
  if (tokenizer.vocab_size() < o.vocab)
    log_warn("the text ran out of repeated pairs: found ", tokenizer.vocab_size(), " tokens, expected ", o.vocab);
  log_info("wrote ", o.out, ": ", tokenizer.vocab_size(), " tokens");
}

struct CodecOptions {
  std::string tokenizer, file;
  bool bos = false;
};

constexpr const char* kTokenizerHelp =
    "a tokenizer.json, a .tiktoken, a SentencePiece .model or a character vocabulary, or the directory, GGUF file or "
    "archive of a model with its tokenizer";

std::shared_ptr<const Tokenizer> tokenizer_of(const std::string& path) {
  if (ArchiveFile::is_one(path)) return load_vocabulary(path).tokenizer;
  return load_tokenizer(path);
}

void encode(const CodecOptions& o) {
  const auto tokenizer = tokenizer_of(o.tokenizer);
  const std::string text = read_input(o.file);
  std::vector<int32_t> ids = about(input_name(o.file), [&] { return tokenizer->encode(text); });
  if (o.bos && tokenizer->bos() < 0)
    fail(ErrorCode::usage, "--bos: found that ", o.tokenizer, " has no token that starts a document, expected one");
  if (o.bos) ids.insert(ids.begin(), tokenizer->bos());
  std::string out;
  out.reserve(ids.size() * 5);
  char digits[16];
  for (const int32_t id : ids) {
    if (!out.empty()) out += ' ';
    out.append(digits, std::to_chars(digits, digits + sizeof digits, id).ptr);
  }
  write_out(out + "\n");
}

std::vector<int32_t> parse_ids(const std::string& text, const std::string& where) {
  std::vector<int32_t> ids;
  const auto separates = [](char c) {
    return std::isspace(static_cast<unsigned char>(c)) || c == ',' || c == '[' || c == ']';
  };
  for (size_t at = 0; at < text.size();) {
    if (separates(text[at])) {
      ++at;
      continue;
    }
    int32_t id = 0;
    const auto [end, error] = std::from_chars(text.data() + at, text.data() + text.size(), id);
    const size_t stop = size_t(end - text.data());
    if (error != std::errc() || (stop < text.size() && !separates(text[stop])))
      fail(ErrorCode::bad_data, where, ": byte ", at, ": found '",
           text.substr(at, std::min(text.find_first_of(" \n", at), at + 20) - at), "', expected a token id");
    ids.push_back(id);
    at = stop;
  }
  return ids;
}

void decode(const CodecOptions& o) {
  const auto tokenizer = tokenizer_of(o.tokenizer);
  write_out(tokenizer->decode(parse_ids(read_input(o.file), input_name(o.file))));
}

}  // namespace

void add_tokenizer(Command& root) {
  Command& c = root.add("tokenizer", "Learns a vocabulary from text, turns text into token ids and back");
  c.examples(R"(  ingot tokenizer train --data corpus/ --vocab 4096 --out tok.json
  echo "Hello, world" | ingot tokenizer encode --tokenizer tok.json
  ingot tokenizer encode --tokenizer tok.json < text | ingot tokenizer decode --tokenizer tok.json)");
  {
    Command& t = c.add("train", "Learns a vocabulary from text and writes a tokenizer.json");
    auto o = std::make_shared<TrainingOptions>();
    t.list("--data PATH", o->data, "a text file, a directory of text files, or JSON lines; may be repeated").require();
    t.integer("--vocab N", o->vocab, 257, 1000000,
              "number of tokens, including special tokens and the 256 bytes (default: 4096)");
    t.text("--out FILE", o->out, "file to write (default: tokenizer.json)");
    t.choice("--kind KIND", o->kind, {"bpe", "char"}, "bpe, or char: one token per character (default: bpe)");
    t.choice("--pattern NAME", o->pattern, {"gpt2", "cl100k", "o200k", "qwen2", "tekken", "smollm"},
             "pattern that splits text into words before merging: gpt2, cl100k, o200k, qwen2, tekken or smollm "
             "(default: gpt2)");
    t.list("--special TEXT", o->specials,
           "a special token, of which the first starts a document; may be repeated (default: <|bos|>)")
        .allow_empty();
    t.integer("--min-count N", o->min_count, 1, 1000000000,
              "merge only pairs that occur at least N times (default: 2)");
    t.examples(R"(  ingot tokenizer train --data corpus/ --vocab 4096 --out tok.json
  ingot tokenizer train --data a.txt --data b.txt --vocab 8192 --pattern o200k --out tok.json
  ingot tokenizer train --data input.txt --kind char --out chars.json)");
    t.run([o, &t] {
      if (o->kind == "char")
        t.refuse_given({"vocab", "special", "pattern", "min-count"}, "--kind char, which has a token per character");
      train(*o);
    });
  }
  {
    Command& e =
        c.add("encode", "Encodes text from standard input or a file as ids, separated by spaces, on standard output");
    auto o = std::make_shared<CodecOptions>();
    e.text("--tokenizer FILE", o->tokenizer, kTokenizerHelp).require();
    e.text("--file FILE", o->file, "the text (default: standard input)");
    e.flag("--bos", o->bos, "begin with the token that starts a document");
    e.examples(R"(  ingot tokenizer encode --tokenizer tok.json < text > ids)");
    e.run([o] { encode(*o); });
  }
  {
    Command& d = c.add(
        "decode",
        "Decodes ids from standard input or a file, separated by spaces, lines or commas, to text on standard output");
    auto o = std::make_shared<CodecOptions>();
    d.text("--tokenizer FILE", o->tokenizer, "the tokenizer that made the ids, as for `ingot tokenizer encode`")
        .require();
    d.text("--file FILE", o->file, "the ids (default: standard input)");
    d.examples(R"(  echo "39 381 78" | ingot tokenizer decode --tokenizer tok.json)");
    d.run([o] { decode(*o); });
  }
}

}  // namespace ingot::cli
