#include "ingot/text/chat/chatml_format.h"

#include <algorithm>

#include "ingot/core/check.h"
#include "ingot/io/json.h"
#include "ingot/text/chat/answer_parser.h"

namespace ingot {
namespace {

const char kToolsBefore[] =
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>";
const char kToolsAfter[] =
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": "
    "<args-json-object>}\n</tool_call>";
const char kThinks[] = "medium";
constexpr std::string_view kThoughtsBegin = "<think>", kThoughtsEnd = "</think>";

// Clients without the role of results send results as questions. Thoughts after such a question belong to the same
// turn.
bool is_result_in_a_question(const std::string& text) {
  return text.starts_with("<tool_response>") && text.ends_with("</tool_response>");
}

std::string stripped(const std::string& text, bool at_end) {
  const size_t begin = std::min(text.find_first_not_of('\n'), text.size());
  const size_t end = at_end ? text.find_last_not_of('\n') + 1 : text.size();
  return begin >= end ? "" : text.substr(begin, end - begin);
}

}  // namespace

ChatMlFormat::ChatMlFormat(std::shared_ptr<const Tokenizer> tokenizer, ChatMlStyle style, const std::string& where)
    : tokenizer_(std::move(tokenizer)),
      style_(std::move(style)),
      start_(required_special(*tokenizer_, "<|im_start|>", where)),
      end_(required_special(*tokenizer_, "<|im_end|>", where)),
      end_of_text_(token_named(*tokenizer_, "<|endoftext|>").value_or(-1)) {
  const auto required = [&](const char* text) {
    const std::optional<int32_t> id = token_named(*tokenizer_, text);
    if (!id)
      fail(ErrorCode::bad_data, where, ": found no token ", text, ", which the chat format ", style_.name, " needs");
    return *id;
  };
  if (style_.calls) call_begin_ = required("<tool_call>"), call_end_ = required("</tool_call>");
  if (style_.thoughts) think_begin_ = required("<think>"), think_end_ = required("</think>");
}

// For a model without thoughts the prompt ends with an empty thought.
std::vector<std::string> ChatMlFormat::efforts() const {
  return style_.thoughts ? std::vector<std::string>{"none", kThinks} : std::vector<std::string>{};
}

std::optional<std::string> ChatMlFormat::system_text(const ChatConversation& c,
                                                     std::vector<ChatMessage>& messages) const {
  std::optional<std::string> text = take_system_text(c, messages);
  if (!text && !style_.default_system.empty()) text = style_.default_system;
  if (c.functions.empty() || !style_.calls) return text;
  std::string all = text ? *text + "\n\n" : "";
  all += kToolsBefore;
  for (const ChatFunction& f : c.functions) all += "\n" + function_declaration(f);
  return all + kToolsAfter;
}

void ChatMlFormat::write_assistant(const ChatMessage& m, bool with_thoughts, bool last, PromptIds& out) const {
  out.control(start_).text("assistant\n");
  std::string thoughts = m.thoughts, content = m.content;
  // A client may return the thoughts inside the text of an answer.
  if (const size_t end = content.find(kThoughtsEnd); style_.thoughts && thoughts.empty() && end != content.npos) {
    thoughts = content.substr(0, end);
    if (const size_t begin = thoughts.rfind(kThoughtsBegin); begin != thoughts.npos)
      thoughts.erase(0, begin + kThoughtsBegin.size());
    content = stripped(content.substr(content.rfind(kThoughtsEnd) + kThoughtsEnd.size()), false);
  }
  thoughts = stripped(thoughts, true);
  const bool thinks = style_.thoughts && with_thoughts && (last || !thoughts.empty());
  if (thinks) out.text("<think>\n" + thoughts + "\n</think>\n\n");
  out.text(thinks ? stripped(content, false) : content);
  for (size_t i = 0; i < m.calls.size() && style_.calls; ++i) {
    // Qwen2.5 puts each call on a line of its own, even the first call without text before it.
    if (i > 0 || !content.empty()) out.text("\n");
    out.text("<tool_call>\n{\"name\": \"" + m.calls[i].name + "\", \"arguments\": " +
             (style_.thoughts ? m.calls[i].arguments : python_json(m.calls[i].arguments)) + "}\n</tool_call>");
  }
  out.control(end_).text("\n");
}

std::vector<int32_t> ChatMlFormat::prompt(const ChatConversation& c) const {
  if (!style_.calls) refuse_functions(c, name());
  std::vector<ChatMessage> messages = joined_turns(c.messages);
  PromptIds out(*tokenizer_);
  if (const auto system = system_text(c, messages))
    out.control(start_).text("system\n" + *system).control(end_).text("\n");
  size_t last_question = messages.empty() ? 0 : messages.size() - 1;
  for (size_t i = messages.size(); i-- > 0;)
    if (messages[i].role == ChatRole::user && !is_result_in_a_question(messages[i].content)) {
      last_question = i;
      break;
    }
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& m = messages[i];
    const bool after_result = i > 0 && messages[i - 1].role == ChatRole::result;
    const bool before_result = i + 1 < messages.size() && messages[i + 1].role == ChatRole::result;
    switch (m.role) {
      case ChatRole::instructions: out.control(start_).text("system\n" + m.content).control(end_).text("\n"); break;
      case ChatRole::user: out.control(start_).text("user\n" + m.content).control(end_).text("\n"); break;
      case ChatRole::assistant: write_assistant(m, i > last_question, i + 1 == messages.size(), out); break;
      case ChatRole::result:
        if (!after_result) out.control(start_).text("user");
        out.text("\n<tool_response>\n" + m.content + "\n</tool_response>");
        if (!before_result) out.control(end_).text("\n");
        break;
    }
  }
  out.control(start_).text("assistant\n");
  if (style_.thoughts && c.effort == "none") out.text("<think>\n\n</think>\n\n");
  return out.finish();
}

std::vector<int32_t> ChatMlFormat::stop_ids() const {
  return end_of_text_ >= 0 ? std::vector<int32_t>{end_, end_of_text_} : std::vector<int32_t>{end_};
}

bool ChatMlFormat::is_control(int32_t id) const { return is_special(*tokenizer_, id); }

std::unique_ptr<ChatParser> ChatMlFormat::parser(std::vector<std::string>) const {
  return make_answer_parser(*tokenizer_, {.turn = start_,
                                          .think_begin = think_begin_,
                                          .think_end = think_end_,
                                          .call_begin = call_begin_,
                                          .call_end = call_end_});
}

// The parser finds thoughts and calls by their tokens, so the tokens are controls of the grammar, not text: a text
// cannot contain them, and ordinary tokens that spell their names do not begin a call.
Grammar::Rule ChatMlFormat::answer_rule(Grammar& g, const ChatAnswerForm& form) const {
  using Node = Grammar::Node;
  enum Control { kTurnEnd, kCallBegin, kCallEnd, kThinkBegin, kThinkEnd };  // in the order of grammar_controls()
  const Node end = g.control(kTurnEnd, Grammar::kEnd), answer = g.either({}), calls = g.either({});
  const Node after_call = g.either({end});
  for (const ChatAnswerForm::Call& c : form.calls) {
    const Node close = g.text("}\n", g.control(kCallEnd, after_call));
    const Node arguments = c.arguments ? g.call(*c.arguments, close) : g.text("{}", close);
    g.add(calls, g.control(kCallBegin, g.text("\n{\"name\": \"" + c.name + "\", \"arguments\": ", arguments)));
  }
  g.add(answer, calls);
  if (form.is_text) {
    g.add(after_call, g.text("\n", calls));
    g.add(answer, form.text ? g.call(*form.text, end) : g.any_text(g.either({end, calls})));
  }
  if (!style_.thoughts) return g.rule(answer);
  const Node after_thoughts = g.control(kThinkEnd, g.text("\n\n", answer));
  return g.rule(g.either({answer, g.control(kThinkBegin, g.text("\n", g.any_text(g.text("\n", after_thoughts))))}));
}

std::vector<int32_t> ChatMlFormat::grammar_controls() const {
  return {end_, call_begin_, call_end_, think_begin_, think_end_};
}

}  // namespace ingot
