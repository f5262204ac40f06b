#pragma once
// A conversation with a model that speaks Harmony: each turn is rendered, and the answer parsed as it comes.
#include "ingot/engines/generate/session.h"
#include "ingot/text/harmony.h"

namespace ingot {

// What the model said in one turn, and how it ended.
struct HarmonyTurn {
  std::vector<HarmonyMessage> messages;
  Answer answer;
  std::string called;  // the recipient of a call it waits for, or empty
};

class HarmonyChat {
 public:
  // New text of an answer: the message it belongs to (its content ends with the text), never half a character.
  using Show = std::function<void(const HarmonyMessage& message, std::string_view text)>;

  // Decoder, tokenizer and tokens must outlive the chat. `opening`: what stands before the first turn.
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
  const Decoder& decoder_;
  const ByteBpe& tokenizer_;
  const HarmonyTokens& tokens_;
  std::vector<HarmonyMessage> conversation_;
  size_t opening_;  // its messages before the first turn
};

}  // namespace ingot
