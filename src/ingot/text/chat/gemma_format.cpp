#include "ingot/text/chat/gemma_format.h"

#include "ingot/text/chat/answer_parser.h"

namespace ingot {

GemmaFormat::GemmaFormat(std::shared_ptr<const Tokenizer> tokenizer, const std::string& where)
    : tokenizer_(std::move(tokenizer)),
      begin_(required_special(*tokenizer_, "<bos>", where)),
      turn_(required_special(*tokenizer_, "<start_of_turn>", where)),
      end_(required_special(*tokenizer_, "<end_of_turn>", where)) {}

std::vector<int32_t> GemmaFormat::prompt(const ChatConversation& c) const {
  refuse_functions(c, name());
  std::vector<ChatMessage> messages = alternating_turns(c.messages);
  const std::optional<std::string> system = take_system_text(c, messages);
  // The format has no turn for later instructions: they become a turn of the user.
  for (ChatMessage& m : messages)
    if (m.role == ChatRole::instructions) m.role = ChatRole::user;
  messages = alternating_turns(messages);
  const bool has_question = !messages.empty() && messages[0].role == ChatRole::user;
  if (system && !has_question) messages.insert(messages.begin(), {.role = ChatRole::user});
  std::string before = system ? *system + (has_question ? "\n\n" : "") : "";
  PromptIds out(*tokenizer_);
  out.control(begin_);
  for (const ChatMessage& m : messages) {
    out.control(turn_).text(m.role == ChatRole::assistant ? "model\n" : "user\n");
    out.text(before + trimmed(m.content)).control(end_).text("\n");
    before.clear();
  }
  out.control(turn_).text("model\n");
  return out.finish();
}

std::vector<int32_t> GemmaFormat::stop_ids() const {
  std::vector<int32_t> ids = {end_};
  if (const auto eos = token_named(*tokenizer_, "<eos>")) ids.push_back(*eos);
  return ids;
}

std::unique_ptr<ChatParser> GemmaFormat::parser(std::vector<std::string>) const {
  return make_answer_parser(*tokenizer_, {.turn = turn_});
}

Grammar::Rule GemmaFormat::answer_rule(Grammar& g, const ChatAnswerForm& form) const {
  const Grammar::Node end = g.control(0, Grammar::kEnd);
  return g.rule(form.text ? g.call(*form.text, end) : g.any_text(end));
}

}  // namespace ingot
