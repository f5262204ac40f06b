// parity_tokenizer TOKENIZER: the ids of each text on standard input. parity_tokenizer --train VOCAB OUT: learns a
// vocabulary for the o200k pattern from the texts. parity_tokenizer --chat FORMAT TOKENIZER: each text is a
// conversation as in tests/data/chat_formats/prompts.json, and the ids are those of the prompt. Texts and ids are
// preceded by their number, 32 bits, little-endian.
#include <cstdio>
#include <cstdlib>

#include "ingot/io/json.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/chat/templates.h"
#include "ingot/text/chat/turns.h"

using namespace ingot;

namespace {

bool read_text(std::string& text) {
  uint32_t bytes = 0;
  if (std::fread(&bytes, sizeof bytes, 1, stdin) != 1) return false;
  text.resize(bytes);
  return std::fread(text.data(), 1, bytes, stdin) == bytes;
}

void write(const std::vector<int32_t>& ids) {
  const auto count = uint32_t(ids.size());
  std::fwrite(&count, sizeof count, 1, stdout);
  if (count > 0) std::fwrite(ids.data(), sizeof ids[0], ids.size(), stdout);
}

void encode(const std::string& path) {
  const auto tokenizer = load_tokenizer(path);
  for (std::string text; read_text(text);) write(tokenizer->encode(text));
}

ChatMessage message_of(const OrderedJson& json) {
  const std::string role = json.at(0);
  const OrderedJson& more = json.at(2);
  ChatMessage m{.role = role == "system"      ? ChatRole::instructions
                        : role == "user"      ? ChatRole::user
                        : role == "assistant" ? ChatRole::assistant
                                              : ChatRole::result,
                .content = json.at(1).get<std::string>(),
                .thoughts = more.value("thoughts", ""),
                .call_id = more.value("call_id", "")};
  if (more.contains("calls"))
    for (const OrderedJson& call : more.at("calls"))
      m.calls.push_back({.id = call.at("id").get<std::string>(),
                         .name = call.at("name").get<std::string>(),
                         .arguments = python_json(call.at("arguments").dump())});
  return m;
}

void encode_chats(const std::string& format, const std::string& path) {
  const auto chat = make_chat_format(format, load_tokenizer(path), path);
  for (std::string text; read_text(text);) {
    const OrderedJson json = OrderedJson::parse(text);
    ChatConversation c{.date = json.value("date", ""), .effort = json.value("effort", "")};
    for (const OrderedJson& m : json.at("messages")) c.messages.push_back(message_of(m));
    for (const OrderedJson& t : json.at("tools"))
      c.functions.push_back(
          {t.at("name").get<std::string>(), t.at("description").get<std::string>(), t.at("parameters").dump()});
    write(chat->prompt(c));
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
    if (count == 4 && std::string(words[1]) == "--chat") return encode_chats(words[2], words[3]), 0;
    if (count == 2) return encode(words[1]), 0;
    std::fputs("usage: parity_tokenizer TOKENIZER | --train VOCAB OUT | --chat FORMAT TOKENIZER\n", stderr);
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "parity_tokenizer: %s\n", e.what());
    return 1;
  }
}
