#pragma once
// One answer in Harmony to a conversation that the caller keeps: answer() in one call, or HarmonyAnswer id by id for
// whoever drives a decoder's slots himself.
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/engines/generate/session.h"
#include "ingot/text/harmony.h"

namespace ingot {

// What the model said in one turn, and how it ended.
struct HarmonyTurn {
  std::vector<HarmonyMessage> messages;
  Answer answer;
  std::string called;  // the recipient of a call it waits for, or empty
};
// New text of an answer: the message it belongs to (its content ends with the text), never half a character.
using ShowHarmony = std::function<void(const HarmonyMessage& message, std::string_view text)>;

// The ids that end an answer. <|end|> only ends a message and is not among them.
std::vector<int32_t> harmony_stop_ids(const HarmonyTokens& tokens);

// Takes the ids of an answer as they are drawn. Tokenizer and tokens must outlive it.
class HarmonyAnswer {
 public:
  HarmonyAnswer(const ByteBpe& tokenizer, const HarmonyTokens& tokens, ShowHarmony show = {});
  // False: the model has begun somebody else's turn, so its own is over. Not for the stop id.
  bool push(int32_t id);
  // The end of the ids; `answer` is how it came to be, and goes into the turn.
  HarmonyTurn finish(Answer answer);

 private:
  void show_new();
  HarmonyParser parser_;
  const HarmonyTokens& tokens_;
  ShowHarmony show_;
  size_t at_ = 0, bytes_ = 0;  // the message that grows, and its bytes that were shown
};

// The answer to `conversation`. `options` gives limits and sampling; the ids that end an answer are added here, and ids
// that the tokenizer does not know are never drawn. A conversation that the context has no room for is Error{usage}.
HarmonyTurn answer(Session& session, const ByteBpe& tokenizer, const HarmonyTokens& tokens,
                   std::span<const HarmonyMessage> conversation, SessionOptions options, const ShowHarmony& show = {});

}  // namespace ingot
