// The smallest kind of model: the next character follows the current character as often as in a text. After
// register_model() the program opens such a model by its path and generates like any kind of model.
//   own_model TEXT.pairs PROMPT
#include <cmath>
#include <cstdio>

#include "ingot/engines/generate/generator.h"
#include "ingot/io/file.h"
#include "ingot/models/host_decoder.h"
#include "ingot/models/registry.h"
#include "ingot/text/char_tokenizer.h"

using namespace ingot;

// Logits of the next character: the logarithm of its number of occurrences after the current character.
class Pairs final : public HostDecoder {
 public:
  Pairs(const Tokenizer& tokenizer, std::string_view text, const DecoderOptions& o)
      : HostDecoder(o.slots), vocab_(tokenizer.vocab_size()), fed_(size_t(o.slots)) {
    logits_.assign(size_t(vocab_ * vocab_), std::log(0.01f));
    const std::vector<int32_t> ids = tokenizer.encode(text);
    std::vector<float> counts(logits_.size());
    for (size_t i = 0; i + 1 < ids.size(); ++i) ++counts[size_t(ids[i] * vocab_ + ids[i + 1])];
    for (size_t i = 0; i < counts.size(); ++i)
      if (counts[i] > 0) logits_[i] = std::log(counts[i]);
  }
  int64_t vocab() const override { return vocab_; }
  int64_t context() const override { return 1 << 20; }
  int64_t batch() const override { return 512; }

 private:
  void clear(int slot) override { fed_[size_t(slot)].clear(); }
  int64_t cached_length(int slot) const override { return int64_t(fed_[size_t(slot)].size()); }
  int64_t truncate(int slot, int64_t length) override {
    fed_[size_t(slot)].resize(size_t(length));
    return length;
  }
  void extend_slot(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) override {
    std::vector<int32_t>& fed = fed_[size_t(slot)];
    for (size_t i = 0; i < ids.size(); ++i) {
      fed.push_back(ids[i]);
      if (rows == Rows::all || i + 1 == ids.size())
        take(int64_t(fed.size()) - 1, Tensor(&logits_[size_t(ids[i] * vocab_)], {1, vocab_}));
    }
  }
  int64_t vocab_;
  std::vector<float> logits_;              // (V, V)
  std::vector<std::vector<int32_t>> fed_;  // by slot
};

bool holds(const std::string& path) { return path.ends_with(".pairs"); }
Vocabulary vocabulary(const std::string& path, const VocabularyOptions&) {
  return {.tokenizer = std::make_shared<CharTokenizer>(CharTokenizer::from_text(read_file(path)))};
}
OpenedModel open(const std::string& path, const DecoderOptions& o) {
  const Vocabulary v = vocabulary(path, {});
  return {.memory = v.tokenizer, .decoder = std::make_unique<Pairs>(*v.tokenizer, read_file(path), o)};
}

int main(int count, char** arguments) try {
  if (count != 3) return std::fprintf(stderr, "usage: own_model TEXT.pairs PROMPT\n"), 2;
  register_model({.name = "pairs", .holds = holds, .open = open, .vocabulary = vocabulary});
  const Vocabulary v = load_vocabulary(arguments[1]);
  OpenedModel model = open_model(arguments[1]);
  Generator generator(std::move(model.decoder));
  const Answer answer = generator.generate(*v.tokenizer, v.tokenizer->encode(arguments[2]),
                                           {.tokens = 12, .sampling = {.temperature = 0}});
  std::printf("%s\n", v.tokenizer->decode(answer.tokens).c_str());
} catch (const Error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return exit_status(e.code);
}
