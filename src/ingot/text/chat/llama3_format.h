#pragma once
// The format of Llama 3:
//   <|begin_of_text|>, then for each message <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>
// Llama 3.1 and 3.2 begin with a system message that contains dates, and call a function by an answer that is one JSON
// object, {"name": ..., "parameters": ...}.
#include <memory>
#include <string>

#include "ingot/text/chat/turns.h"

namespace ingot {

struct Llama3Style {
  const char* name;
  bool dates_and_calls = false;
};

class Llama3Format final : public ChatFormat {
 public:
  // A vocabulary without one of the control tokens is refused (bad_data) with `where` in the message.
  Llama3Format(std::shared_ptr<const Tokenizer> tokenizer, const Llama3Style& style, const std::string& where);

  const char* name() const override { return style_.name; }
  std::vector<std::string> efforts() const override { return {}; }
  std::vector<int32_t> prompt(const ChatConversation& conversation) const override;
  std::vector<int32_t> stop_ids() const override;
  bool is_control(int32_t id) const override;
  std::unique_ptr<ChatParser> parser(std::vector<std::string> functions = {}) const override;
  Grammar::Rule answer_rule(Grammar& grammar, const ChatAnswerForm& form) const override;
  std::vector<int32_t> grammar_controls() const override { return {end_}; }

 private:
  void header(const char* role, PromptIds& out) const;
  void write(const ChatMessage& m, const std::string& before, PromptIds& out) const;

  const std::shared_ptr<const Tokenizer> tokenizer_;
  const Llama3Style style_;
  const int32_t begin_, header_begin_, header_end_, end_;
};

}  // namespace ingot
