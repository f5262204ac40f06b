// parity_tokenizer TOKENIZER: the ids of each text on standard input. parity_tokenizer --train VOCAB OUT: learns a
// vocabulary for the o200k pattern from the texts. Texts and ids are preceded by their number, 32 bits, little-endian.
#include <cstdio>
#include <cstdlib>

#include "ingot/text/byte_bpe.h"

using namespace ingot;

namespace {

bool read_text(std::string& text) {
  uint32_t bytes = 0;
  if (std::fread(&bytes, sizeof bytes, 1, stdin) != 1) return false;
  text.resize(bytes);
  return std::fread(text.data(), 1, bytes, stdin) == bytes;
}

void encode(const std::string& path) {
  const auto tokenizer = load_tokenizer(path);
  for (std::string text; read_text(text);) {
    const std::vector<int32_t> ids = tokenizer->encode(text);
    const auto count = uint32_t(ids.size());
    std::fwrite(&count, sizeof count, 1, stdout);
    if (count > 0) std::fwrite(ids.data(), sizeof ids[0], ids.size(), stdout);
  }
}

void train(int vocab, const std::string& path) {
  std::vector<std::string> texts;
  for (std::string text; read_text(text);) texts.push_back(text);
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  train_bpe(views, vocab, {.pattern = WordPattern::o200k, .special_tokens = {}}).save(path);
}

}  // namespace

int main(int count, char** words) {
  try {
    if (count == 4 && std::string(words[1]) == "--train") return train(std::atoi(words[2]), words[3]), 0;
    if (count == 2) return encode(words[1]), 0;
    std::fputs("usage: parity_tokenizer TOKENIZER | --train VOCAB OUT\n", stderr);
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "parity_tokenizer: %s\n", e.what());
    return 1;
  }
}
