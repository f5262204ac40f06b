// Any answer of a model is parsed, shows no control token, and renders back to the parsed messages; any text of a user
// stays text. The input is a list of ids (a byte below 24 is one of the first ids, control tokens among them; other
// bytes begin an id of two bytes) and, as bytes, a text.
#include "ingot/text/chat/harmony.h"

#include "ingot/io/utf8.h"
#include "ingot/testing/fuzz.h"

namespace {

using namespace ingot;

struct Vocabulary {
  ByteBpe bpe;
  HarmonyTokens tokens;
  static ByteBpe learn() {
    const std::vector<std::string_view> documents = {"assistant analysis final commentary to=functions.f json user",
                                                     "assistant\nanalysis\nfinal\ncommentary\nuser <|end|> to= <|"};
    return train_bpe(
        documents, 380,
        {.pattern = WordPattern::o200k,
         .special_tokens = {"<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|reserved|>",
                            "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"}});
  }
  Vocabulary() : bpe(learn()), tokens(bpe, "fuzz") {}
};

std::vector<int32_t> ids_of(const uint8_t* data, size_t size, int32_t vocab) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < size; ++i) {
    if (data[i] < 24 || i + 1 == size)
      ids.push_back(int32_t(data[i]));
    else
      ids.push_back((data[i] << 8 | data[i + 1]) % (vocab + 5) - 2), ++i;  // some outside the vocabulary
  }
  return ids;
}

std::vector<HarmonyMessage> parse(const Vocabulary& v, const std::vector<int32_t>& ids, bool answering) {
  HarmonyParser parser(v.bpe, v.tokens, answering);
  std::string streamed, content;
  for (const int32_t id : ids) {
    const std::string text = parser.push(id);
    FUZZ_REQUIRE(find_invalid_utf8(text) < 0);
    streamed += text;
  }
  parser.finish();
  for (const HarmonyMessage& m : parser.messages()) {
    content += m.content;
    FUZZ_REQUIRE(find_invalid_utf8(m.content) < 0);
    for (const std::string& word : {m.name, m.recipient, m.channel}) {
      FUZZ_REQUIRE(find_invalid_utf8(word) < 0);
      FUZZ_REQUIRE(word.find("<|") == std::string::npos && word.find_first_of(" \t\r\n") == std::string::npos);
    }
  }
  FUZZ_REQUIRE(streamed.size() <= content.size());  // text between messages is returned only at the end
  return parser.messages();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Vocabulary v;
  return testing::refuse_or_accept([&] {
    if (size == 0) return;
    const std::vector<int32_t> ids = ids_of(data + 1, size - 1, v.bpe.vocab_size());
    const auto messages = parse(v, ids, data[0] % 2 == 0);
    const auto again = parse(v, encode_harmony(render_harmony(messages, false), v.bpe, v.tokens), false);
    FUZZ_REQUIRE(again == messages);

    const std::string text(reinterpret_cast<const char*>(data), size);
    if (find_invalid_utf8(text) >= 0) return;
    const std::vector<HarmonyMessage> said = {{.role = HarmonyRole::user, .content = text}};
    int controls = 0;
    for (const int32_t id : encode_harmony(render_harmony(said), v.bpe, v.tokens)) controls += v.tokens.is_special(id);
    FUZZ_REQUIRE(controls == 3);  // start, message, end
    FUZZ_REQUIRE(parse(v, encode_harmony(render_harmony(said), v.bpe, v.tokens), false) == said);
  });
}
