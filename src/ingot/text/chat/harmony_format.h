#pragma once
// Harmony, the chat format of GPT-OSS, as a ChatFormat.
#include <memory>
#include <string>

#include "ingot/text/chat/chat_format.h"
#include "ingot/text/chat/harmony.h"

namespace ingot {

class HarmonyFormat final : public ChatFormat {
 public:
  // A vocabulary without one of the control tokens is refused (bad_data) with `where` in the message.
  HarmonyFormat(std::shared_ptr<const ByteBpe> tokenizer, const std::string& where);
  const HarmonyTokens& tokens() const { return tokens_; }

  const char* name() const override { return "harmony"; }
  std::vector<std::string> efforts() const override { return {"low", "medium", "high"}; }
  std::vector<int32_t> prompt(const ChatConversation& conversation) const override;
  std::vector<int32_t> stop_ids() const override;
  bool is_control(int32_t id) const override { return tokens_.is_special(id); }
  std::unique_ptr<ChatParser> parser(std::vector<std::string> functions = {}) const override;
  Grammar::Rule answer_rule(Grammar& grammar, const ChatAnswerForm& form) const override;
  std::vector<int32_t> grammar_controls() const override;

 private:
  const std::shared_ptr<const ByteBpe> tokenizer_;
  const HarmonyTokens tokens_;
};

// A conversation as Harmony's messages: a system message, the developer's instructions and functions, the turns.
std::vector<HarmonyMessage> harmony_messages(const ChatConversation& conversation);

}  // namespace ingot
