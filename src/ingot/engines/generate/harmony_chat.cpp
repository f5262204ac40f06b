#include "ingot/engines/generate/harmony_chat.h"

namespace ingot {

HarmonyChat::HarmonyChat(Decoder& decoder, const ByteBpe& tokenizer, const HarmonyTokens& tokens,
                         std::vector<HarmonyMessage> opening)
    : session_(decoder),
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
  HarmonyTurn turn = answer(session_, tokenizer_, tokens_, asked, std::move(options), show);
  conversation_ = std::move(asked);
  conversation_.insert(conversation_.end(), turn.messages.begin(), turn.messages.end());
  return turn;
}

}  // namespace ingot
