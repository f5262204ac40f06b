#pragma once
// The format of Mistral's models, by the version of their tokenizer:
//   <s>, then [INST] TEXT[/INST] for each question and TEXT</s> for each answer
// Functions are declared in front of the last question, [AVAILABLE_TOOLS] LIST[/AVAILABLE_TOOLS]. An answer calls them
// by [TOOL_CALLS] and a list of {"name": ..., "arguments": ..., "id": ...}.
//   version 3: instructions stand in front of the last question's text; a result is
//              [TOOL_RESULTS] {"content": ..., "call_id": ...}[/TOOL_RESULTS]
//   version 7: instructions are [SYSTEM_PROMPT] TEXT[/SYSTEM_PROMPT]; a result is
//              [TOOL_RESULTS] ID[TOOL_CONTENT] TEXT[/TOOL_RESULTS]
// Vocabularies of SentencePiece have the spaces, tekken's have none.
#include <memory>
#include <string>

#include "ingot/text/chat/turns.h"

namespace ingot {

struct MistralStyle {
  const char* name;
  int version = 3;
  bool spaces = false;  // a text begins with a space
};

class MistralFormat final : public ChatFormat {
 public:
  // A vocabulary that lacks a control token is refused (bad_data) with `where` in the message. `default_system`: the
  // instructions of a conversation that has none.
  MistralFormat(std::shared_ptr<const Tokenizer> tokenizer, const MistralStyle& style, const std::string& where,
                std::string default_system = "");

  const char* name() const override { return style_.name; }
  std::vector<std::string> efforts() const override { return {}; }
  std::vector<int32_t> prompt(const ChatConversation& conversation) const override;
  std::vector<int32_t> stop_ids() const override { return {end_}; }
  bool is_control(int32_t id) const override { return is_special(*tokenizer_, id); }
  std::unique_ptr<ChatParser> parser(std::vector<std::string> functions = {}) const override;
  Grammar::Rule answer_rule(Grammar& grammar, const ChatAnswerForm& form) const override;
  std::vector<int32_t> grammar_controls() const override { return {end_, calls_}; }

 private:
  std::string take_instructions(const ChatConversation& c, std::vector<ChatMessage>& messages) const;
  void write_text(const std::string& text, PromptIds& out) const;
  void write_question(const ChatConversation& c, const std::string& text, bool last, PromptIds& out) const;
  void write_answer(const ChatMessage& m, PromptIds& out) const;
  void write_result(const ChatMessage& m, PromptIds& out) const;

  const std::shared_ptr<const Tokenizer> tokenizer_;
  const MistralStyle style_;
  const std::string default_system_;
  const bool writes_spaces_;  // the format has spaces that the tokenizer does not add
  const int32_t begin_, end_, question_begin_, question_end_, functions_begin_, functions_end_, calls_, result_begin_,
      result_end_;
  int32_t system_begin_ = -1, system_end_ = -1, result_content_ = -1;  // of version 7
};

// The last nine characters of a call's id where these are letters and digits, as Mistral's models write ids; else nine
// characters that follow from the id.
std::string mistral_call_id(const std::string& id);

}  // namespace ingot
