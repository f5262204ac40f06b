#pragma once
// ChatML, the format of SmolLM2 and Qwen:
//   <|im_start|>ROLE\nTEXT<|im_end|>\n   for each message, then   <|im_start|>assistant\n
// Qwen's models can also call functions, and Qwen3 thinks before its answer.
#include <memory>
#include <string>

#include "ingot/text/chat/turns.h"

namespace ingot {

struct ChatMlStyle {
  const char* name;
  // The system message of a conversation without instructions, not even empty ones; empty: no system message.
  std::string default_system;
  bool calls = false;     // JSON between <tool_call> and </tool_call>
  bool thoughts = false;  // between <think> and </think> before the text
};

class ChatMlFormat final : public ChatFormat {
 public:
  // A vocabulary without one of the control tokens is refused (bad_data) with `where` in the message.
  ChatMlFormat(std::shared_ptr<const Tokenizer> tokenizer, ChatMlStyle style, const std::string& where);

  const char* name() const override { return style_.name; }
  std::vector<std::string> efforts() const override;
  std::vector<int32_t> prompt(const ChatConversation& conversation) const override;
  std::vector<int32_t> stop_ids() const override;
  bool is_control(int32_t id) const override;
  std::unique_ptr<ChatParser> parser(std::vector<std::string> functions = {}) const override;
  Grammar::Rule answer_rule(Grammar& grammar, const ChatAnswerForm& form) const override;
  std::vector<int32_t> grammar_controls() const override;

 private:
  std::optional<std::string> system_text(const ChatConversation& c, std::vector<ChatMessage>& messages) const;
  void write_assistant(const ChatMessage& m, bool with_thoughts, bool last, PromptIds& out) const;

  const std::shared_ptr<const Tokenizer> tokenizer_;
  const ChatMlStyle style_;
  const int32_t start_, end_;
  const int32_t end_of_text_;  // or -1
  // -1 where the style has no calls or no thoughts
  int32_t call_begin_ = -1, call_end_ = -1, think_begin_ = -1, think_end_ = -1;
};

}  // namespace ingot
