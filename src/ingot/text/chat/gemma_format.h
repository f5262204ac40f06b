#pragma once
// The format of Gemma 3:
//   <bos>, then <start_of_turn>ROLE\nTEXT<end_of_turn>\n for each message, then <start_of_turn>model\n
// The roles are user and model. Instructions stand in front of the first question, a blank line between.
#include <memory>
#include <string>

#include "ingot/text/chat/turns.h"

namespace ingot {

class GemmaFormat final : public ChatFormat {
 public:
  static constexpr const char* kName = "gemma3";
  // A vocabulary that lacks a control token is refused (bad_data) with `where` in the message.
  GemmaFormat(std::shared_ptr<const Tokenizer> tokenizer, const std::string& where);

  const char* name() const override { return kName; }
  std::vector<std::string> efforts() const override { return {}; }
  std::vector<int32_t> prompt(const ChatConversation& conversation) const override;
  std::vector<int32_t> stop_ids() const override;
  bool is_control(int32_t id) const override { return is_special(*tokenizer_, id); }
  std::unique_ptr<ChatParser> parser(std::vector<std::string> functions = {}) const override;
  Grammar::Rule answer_rule(Grammar& grammar, const ChatAnswerForm& form) const override;
  std::vector<int32_t> grammar_controls() const override { return {end_}; }

 private:
  const std::shared_ptr<const Tokenizer> tokenizer_;
  const int32_t begin_, turn_, end_;
};

}  // namespace ingot
