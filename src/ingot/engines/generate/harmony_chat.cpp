#include "ingot/engines/generate/harmony_chat.h"

#include <algorithm>

namespace ingot {
namespace {

// Hands on what each message gained since the last look.
class Shown {
 public:
  explicit Shown(const HarmonyChat::Show& show) : show_(show) {}
  void look(const std::vector<HarmonyMessage>& messages) {
    for (; at_ < messages.size(); ++at_) {
      const HarmonyMessage& m = messages[at_];
      if (show_ && m.content.size() > bytes_) show_(m, std::string_view(m.content).substr(bytes_));
      bytes_ = m.content.size();
      if (at_ + 1 == messages.size()) return;  // it may still grow
      bytes_ = 0;
    }
  }

 private:
  const HarmonyChat::Show& show_;
  size_t at_ = 0, bytes_ = 0;  // the message that grows, and its bytes that are known
};

bool by_assistant(const HarmonyMessage& m) { return m.role == HarmonyRole::assistant; }

}  // namespace

HarmonyChat::HarmonyChat(Decoder& decoder, const ByteBpe& tokenizer, const HarmonyTokens& tokens,
                         std::vector<HarmonyMessage> opening)
    : session_(decoder),
      decoder_(decoder),
      tokenizer_(tokenizer),
      tokens_(tokens),
      conversation_(std::move(opening)),
      opening_(conversation_.size()) {}

void HarmonyChat::start_over(std::vector<HarmonyMessage> opening) {
  conversation_ = std::move(opening);
  opening_ = conversation_.size();
}
void HarmonyChat::set_opening(std::vector<HarmonyMessage> opening) {
  const size_t messages = opening.size();
  opening.insert(opening.end(), conversation_.begin() + int64_t(opening_), conversation_.end());
  conversation_ = std::move(opening);
  opening_ = messages;
}

HarmonyTurn HarmonyChat::say(const std::string& text, SessionOptions options, const Show& show) {
  std::vector<HarmonyMessage> asked = conversation_;
  asked.push_back({.role = HarmonyRole::user, .content = text});
  const std::vector<int32_t> prompt = encode_harmony(render_harmony_prompt(asked), tokenizer_, tokens_);
  if (int64_t(prompt.size()) >= decoder_.context())  // an answer needs room for at least one token
    fail(ErrorCode::usage, "found a conversation of ", prompt.size(), " tokens, expected fewer than ",
         decoder_.context(), ", the context");
  for (const int32_t id : {tokens_.answer_end, tokens_.call, tokens_.end_of_text})
    if (id != tokens_.end) options.stop_ids.push_back(id);  // <|end|> only ends a message
  options.vocab = std::min<int64_t>(decoder_.vocab(), tokenizer_.vocab_size());
  HarmonyParser parser(tokenizer_, tokens_);
  Shown shown(show);
  const auto also = options.on_token;
  options.on_token = [&](int32_t id) {
    parser.push(id);
    // A model that writes somebody else's turn has finished its own.
    if (!parser.messages().empty() && !by_assistant(parser.messages().back())) return false;
    shown.look(parser.messages());
    return !also || also(id);
  };
  HarmonyTurn turn;
  turn.answer = session_.generate(prompt, options);
  if (turn.answer.stop_id >= 0) parser.push(turn.answer.stop_id);
  parser.finish();
  turn.messages = parser.messages();
  if (const auto other = std::find_if_not(turn.messages.begin(), turn.messages.end(), by_assistant);
      other != turn.messages.end()) {
    turn.messages.erase(other, turn.messages.end());
    turn.answer.finish = Finish::stop;
  }
  shown.look(turn.messages);
  if (turn.answer.stop_id == tokens_.call && !turn.messages.empty()) turn.called = turn.messages.back().recipient;
  conversation_ = std::move(asked);
  conversation_.insert(conversation_.end(), turn.messages.begin(), turn.messages.end());
  return turn;
}

}  // namespace ingot
