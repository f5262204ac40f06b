#pragma once
// A conversation with a model that speaks Harmony, kept from turn to turn.
#include "ingot/engines/generate/harmony_answer.h"

namespace ingot {

class HarmonyChat {
 public:
  using Show = ShowHarmony;

  // Decoder, of which it takes a slot, tokenizer and tokens must outlive the chat. `opening`: what stands before the
  // first turn.
  HarmonyChat(Decoder& decoder, const ByteBpe& tokenizer, const HarmonyTokens& tokens,
              std::vector<HarmonyMessage> opening);
  // A user's turn and the answer to it. `options` gives limits and sampling; the ids that end an answer are added here.
  // A turn that cannot be answered, such as one that the context has no room for, is an Error and leaves the
  // conversation as it was; an answer that was cancelled stays in it as far as it came.
  HarmonyTurn say(const std::string& text, SessionOptions options, const Show& show = {});
  void start_over(std::vector<HarmonyMessage> opening);
  void set_opening(std::vector<HarmonyMessage> opening);  // under the turns there are
  const std::vector<HarmonyMessage>& conversation() const { return conversation_; }

 private:
  Session session_;
  const ByteBpe& tokenizer_;
  const HarmonyTokens& tokens_;
  std::vector<HarmonyMessage> conversation_;
  size_t opening_;  // its messages before the first turn
};

}  // namespace ingot
